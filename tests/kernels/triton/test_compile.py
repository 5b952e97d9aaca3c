"""A sample of the kernels compiles for sm_80, sm_89 and sm_90, keeps the limits of `benchmarks/compiled-kernels.md` and
uses wgmma where possible. `python -m tools.compiled_kernels --check` compiles all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.kernels.triton.launch import H100
from tests.kernels.triton.compiling import CASCADE, FIXED, SOFTMAX, chosen
from tools.compiled_kernels import MAX_SPILLED, PAGE, limits, past_limits

pytestmark = pytest.mark.timeout(900)  # minutes of compilation, on a machine that runs other tests
ROOT = Path(__file__).parents[3]
FP8_PRODUCTS = [f"fp8, {size}" for size in ("1 tokens", "64 tokens", "512 tokens", "512 tokens, parts in one program")]
FP8_PRODUCTS += ["fp8 per token, 1 tokens", "fp8 per token, 512 tokens"]
NORMS = [f"add_rms_norm{form}" for form in ("", ", fp8", ", fp8 per token")]
EXPERTS = [
    *(f"experts, {form}, 64 tokens, Qwen3-30B-A3B" for form in ("int4", "fp8", "nvfp4")),
    "experts, int4, 4096 tokens, Qwen3-30B-A3B",
    "experts, mxfp4, 4096 tokens, gpt-oss-20b",
]
E4M3 = ["e4m3, 1 tokens", "e4m3, dequantize", "e4m3, 64 tokens"]
WITH_WGMMA = [
    "cascade",
    "cascade, fp8 cache",
    "prefill",
    "prefill, fp8 cache",
    "int4, 64 tokens",
    E4M3[2],
    *FIXED,
    *EXPERTS,
]
SPILLING, TOO_LARGE = "control: too many keys for the registers", "control: too many stages for the memory"
SAMPLES = {
    "sm_80": [
        "decode, 1 queries", "decode, 1 queries, fp8 cache", "prefill", "cascade", "int4, 1 tokens", "int4, 64 tokens",
        *E4M3, "dequantize", "adapters, A, 32 tokens", *FIXED, *EXPERTS, SPILLING,
    ],
    "sm_89": [
        *(f"{name}, heads of 512" for name in SOFTMAX), "prefill, heads of 256, windowed", "prefill, fp8 cache",
        "convert, fp8 cache", *NORMS, *FP8_PRODUCTS,
    ],
    "sm_90": [
        *CASCADE, *SOFTMAX, *(f"{name}, softcap and sinks" for name in SOFTMAX), "decode, 1 queries, fp8 cache",
        "delta_net, Qwen3.5-9B", "delta_net, bfloat16 states, Qwen3.5-9B",
        "norm_rope_write", "gate_mul", "scatter", "sample", "greedy, parts", "int4, 1 tokens", "fp8 rounding",
        "experts, route, Qwen3-30B-A3B", "experts, assign, Qwen3-30B-A3B", "experts, combine, Qwen3-30B-A3B",
        "adapters, A, 4096 tokens", "adapters, B, 4096 tokens", *NORMS, *FP8_PRODUCTS, *E4M3[:2], *WITH_WGMMA,
        TOO_LARGE,
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, dict]]:
    """Compile the samples in one process for each target; return the results by target and name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compiling"]
    running = {
        target: subprocess.Popen(
            [*command, target, *sample], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for target, sample in SAMPLES.items()
    }
    found = {}
    for name, process in running.items():
        out, _ = process.communicate()
        assert process.returncode == 0
        found[name] = {line["name"]: line for line in map(json.loads, out.splitlines())}
    return found


@pytest.mark.parametrize("target", SAMPLES)
def test_kernels_keep_their_limits(compiled: dict, target: str) -> None:
    known = limits(PAGE.read_text(encoding="utf-8"))[target]
    served = {name: line for name, line in compiled[target].items() if not name.startswith("control")}
    few = {f"{spilled} bytes of registers spilled" for spilled in range(1, MAX_SPILLED + 1)}
    assert {name: found for name, line in served.items() if (found := set(line["problems"]) - few)} == {}
    assert {name: found for name, line in served.items() if (found := past_limits(line, known[name]))} == {}


@pytest.mark.parametrize("target", SAMPLES)
def test_the_page_has_every_kernel(target: str) -> None:
    names = {name for name in chosen(target) if not name.startswith("control")}
    assert names == set(limits(PAGE.read_text(encoding="utf-8"))[target]), "run `python -m tools.compiled_kernels`"


def test_a_kernel_past_its_limits_is_reported(compiled: dict) -> None:
    line = compiled["sm_90"]["int4, 64 tokens"]
    blocks, instructions = line["blocks"], line["instructions"]
    assert past_limits(line, (blocks, instructions)) == []
    assert len(past_limits(line | {"spill_bytes": 24}, (blocks + 1, instructions - 1))) == 3
    assert any("registers spilled" in problem for problem in compiled["sm_80"][SPILLING]["problems"])
    assert any(f"{H100.max_shared_bytes} at most" in problem for problem in compiled["sm_90"][TOO_LARGE]["problems"])


def test_the_int4_product_moves_nothing_between_threads(compiled: dict) -> None:
    """The loop waits once for products of each group of 128 inputs, two groups a step; no shuffles."""
    for name in ("int4, 1 tokens", "int4, 64 tokens"):
        line = compiled["sm_90"][name]
        assert (line["shuffles"], line["waits"]) == (0, 2)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_experts_unpack_weights_in_registers(compiled: dict, target: str) -> None:
    for name in EXPERTS:
        line = compiled[target][name]
        assert (line["shuffles"], line["barriers"] <= 5) == (0, True), name


def test_large_tiles_reach_wgmma(compiled: dict) -> None:
    reached = {name for name, line in compiled["sm_90"].items() if line["uses_wgmma"]}
    assert reached >= {*WITH_WGMMA, "int4, 1 tokens"}
    assert "decode, 1 queries" not in reached, "16 rows are too few for wgmma"
    assert not any(line["uses_wgmma"] for line in compiled["sm_80"].values())


@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
def test_fp8_products_use_the_units_for_them(compiled: dict, target: str) -> None:
    products = {name: line for name, line in compiled[target].items() if line["multiplies_e4m3"]}
    assert set(products) - set(EXPERTS) == set(FP8_PRODUCTS)
    assert all(line["uses_wgmma"] for line in products.values()) == (target == "sm_90")


@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
def test_a_norm_that_rounds_to_fp8_sums_its_squares_in_the_order_of_the_other(compiled: dict, target: str) -> None:
    """Otherwise tokens would depend on the kernel that rounds."""
    plain, *rounding = (compiled[target][name]["sums"] for name in NORMS)
    assert len(plain) > 1
    assert rounding == [plain, plain]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_fixed_products_multiply_by_one_instruction_whatever_the_number_of_tokens(compiled: dict, target: str) -> None:
    """Otherwise the order of an output's sum would vary."""
    several = [compiled[target][name]["products"] for name in FIXED]
    assert len(several[0]) == 1
    assert all(products == several[0] for products in several)
