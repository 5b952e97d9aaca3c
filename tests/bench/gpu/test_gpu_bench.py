"""The GPU benchmark as a whole: a smoke run with nothing but torch, transformers and click, refusals, what is kept."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.bench.gpu import run
from pipeline.bench.gpu.kernels.checks import Check
from pipeline.bench.gpu.kernels.kernel_times import KernelTime
from pipeline.bench.gpu.run import bench_gpu
from pipeline.errors import ConfigError, ModelError, OutputError
from pipeline.kernels.select import select_kernels

ROOT = Path(__file__).parents[3]
ABSENT = ("ray", "pydantic", "pyarrow", "pandas", "s3fs", "boto3", "botocore", "rich", "accelerate", "numba")
BARE = f"""
import socket, sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # as where it is not installed
def refuse(*_):
    raise OSError("no network here")
socket.socket.connect = refuse
from pipeline.cli.main import main
main()
"""
RIGHT = Check("silu_mul", "1 tokens", "float32", "torch", 0.0, 0.1)
SMOKE = ("--device", "cpu", "--quick", "--model", "tiny-awq")


def test_every_section_runs_on_a_bare_machine(tmp_path):
    command = [sys.executable, "-c", BARE, "bench", "gpu", *SMOKE, "--folder", str(tmp_path), "--output", "kept.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "kept.json").read_text())
    assert told["complete"]
    assert not told["failures"]
    assert told["settings"]["scale"] == "smoke"
    assert told["machine"]["card"].startswith("none")
    checks = told["correctness"]["checks"]
    assert told["correctness"]["passed"] == len(checks) > 20
    (model,) = told["models"]
    assert {check["kernel"] for check in checks} - {"linear"} == {time["kernel"] for time in model["kernels"]["times"]}
    assert {time["kernel"] for time in model["kernels"]["times"]} == {
        "add_rms_norm", "silu_mul", "norm_rope_write", "norm_rope_write, fp8", "attention", "attention, fp8", "greedy",
        "sample",
    }  # fmt: skip
    assert {(time["linear"], time["path"]) for time in model["linears"]["times"]} == {
        (linear, path) for linear in ("qkv", "o", "gate_up", "down") for path in ("16 bit", "fp8", "served")
    }
    assert [job["requests"] for job in model["jobs"]["jobs"]] == list(run.REQUEST_SETS)
    for job in model["jobs"]["jobs"]:
        assert 0 < job["bound_s"] <= job["predicted_s"]
        assert job["num_preemptions"] == job["num_out_of_memory"] == 0
    assert "Whole jobs through the engine" in ran.stdout
    assert not told["on_card"]
    aims = {aim["name"]: aim for aim in told["aims"]}
    assert len(aims) == 11
    assert {aim["verdict"] for aim in aims.values()} <= {"met", "missed", "not measured"}
    assert aims["linears as served"]["measured"] > 0
    assert "vLLM took no part" in aims["the set mixed against vLLM"]["about"]
    assert aims["idle time of the card while decoding"]["about"] == "there was no card to profile"
    kinds = [time["kind"] for time in model["kernels"]["times"] if time["kernel"] == "attention"]
    assert sorted(kinds) == ["", "", "checking drafts", "decoding", "decoding, skewed", "prompts"]
    assert "\nAims. Run on a processor" in ran.stdout


def test_the_tests_for_a_card_need_nothing_else():
    """Where neither Ray nor pydantic nor pyarrow is installed they are found and run."""
    collect = f"import sys, pytest\nfor name in {ABSENT[:5]!r}:\n    sys.modules[name] = None\n"
    collect += "sys.exit(pytest.main(['-q', '-m', 'gpu', '--collect-only', '-p', 'no:cacheprovider', 'tests/gpu']))"
    ran = subprocess.run([sys.executable, "-c", collect], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tests/gpu/test_engine.py: " in ran.stdout


def test_without_a_card_it_says_so(pipe, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    out = tmp_path / "out.json"
    code, stdout, stderr = pipe("bench", "gpu", "--output", str(out))
    assert code == 2
    assert stdout == ""
    assert "needs an NVIDIA GPU" in stderr
    assert not out.exists()
    code, stdout, _ = pipe("bench", "gpu", "--json")
    assert code == 2
    assert json.loads(stdout)["error"]["kind"] == "ConfigError"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quick": False}, "only with --quick"),
        ({"sections": ("kernels", "speed")}, "--sections speed"),
        ({"requests": ("chat",)}, "--requests chat"),
        ({"peers": [("openvino", "/bin/true")]}, "--peer openvino: expected one of vllm"),
    ],
)
def test_what_makes_no_sense_is_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        bench_gpu(**{"models": ("tiny",), "device": "cpu", "quick": True} | options)


def test_a_model_that_is_not_there_and_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ModelError):
        bench_gpu(("/no/such/model",), "cpu", quick=True)
    with pytest.raises(OutputError, match=r"--output .*cannot be written"):
        bench_gpu(("tiny",), "cpu", quick=True, out=str(tmp_path / "no" / "such" / "folder"))


def test_what_fails_costs_nothing_else(pipe, tmp_path, monkeypatch):
    good = RIGHT, KernelTime("attention", "decoding, 1 at 1", 2e-6, 1e-6, 1.0, 1.0)

    def breaks():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(run, "kernel_cases", lambda *_: iter([lambda: good, breaks, lambda: good]))
    out = tmp_path / "kept.json"
    code, stdout, _ = pipe(
        "bench", "gpu", *SMOKE, "--sections", "kernels,linears", "--folder", str(tmp_path), "--output", str(out)
    )
    assert code == 70
    told = json.loads(stdout.splitlines()[-1])
    assert told == json.loads(out.read_text())
    assert [failure["why"] for failure in told["failures"]] == ["RuntimeError: CUDA error: an illegal memory access"]
    (model,) = told["models"]
    assert len(model["kernels"]["times"]) == 2
    assert len(model["linears"]["times"]) == 4 * 3 * 2
    assert model["jobs"] is None
    assert "FAILED kernels, tiny-awq: RuntimeError" in stdout


def test_a_wrong_kernel_has_no_time(tmp_path, monkeypatch):
    """Whatever is wrong with it; the others have theirs, and the run ends as failed."""
    kernels = select_kernels(torch.device("cpu"), torch.float32)

    def doubled(kernel):
        return lambda *inputs: 2 * kernel(*inputs)

    def breaks(logits_RV):
        raise RuntimeError("ptxas: out of registers")

    def wrong_values(qkv, cos, sin, norms, eps, cache, slots):
        q_TND = kernels.norm_rope_write(qkv, cos, sin, norms, eps, cache, slots)
        cache.v_CBKD.view(torch.uint8)[0, 0] ^= 1 << 6
        return q_TND

    def prepare(weight):
        return doubled(kernels.prepare_linear(weight))

    wrong = {
        "silu_mul": doubled(kernels.silu_mul), "attention": doubled(kernels.attention), "greedy": breaks,
        "sample": lambda logits, how: kernels.sample(logits, torch.cat([how[:4], how[4:] * 0.5])),
        "norm_rope_write": wrong_values, "prepare_linear": prepare, "rounded": {},
    }  # fmt: skip
    monkeypatch.setattr(run, "select_kernels", lambda *_: replace(kernels, **wrong))
    found = bench_gpu(("tiny",), "cpu", "float32", ("kernels", "linears"), quick=True, folder=str(tmp_path))
    assert found.failed
    (model,) = found.models
    assert {time.kernel for time in model.kernels.times} == {"add_rms_norm"}
    assert {time.path for time in model.linears.times} == {"16 bit"}
    failed = {check.kernel: check.failure for check in found.correctness.failed}
    assert set(failed) == {
        "linear", "silu_mul", "norm_rope_write", "norm_rope_write, fp8", "attention", "attention, fp8", "greedy",
        "sample",
    }  # fmt: skip
    assert failed["greedy"] == "RuntimeError: ptxas: out of registers"
    assert "FAILED greedy float32, 4 rows: RuntimeError" in found.to_text()
    monkeypatch.setattr(run, "select_kernels", lambda *_: kernels)
    checked = bench_gpu(("tiny",), "cpu", "float32", ("correctness",), quick=True, folder=str(tmp_path))
    assert len(checked.correctness.checks) == len(found.correctness.checks)
    assert not checked.failed, checked.to_text()
    assert checked.models[0].kernels is None is checked.models[0].linears


def test_a_killed_run_keeps_what_it_had(tmp_path, monkeypatch):
    out = tmp_path / "kept.json"

    def killed(*_):
        yield lambda: (RIGHT, KernelTime("silu_mul", "1 tokens", 2e-6, 1e-6, 1.0, 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "kernel_cases", killed)
    with pytest.raises(KeyboardInterrupt):
        bench_gpu(("tiny",), "cpu", sections=("kernels", "jobs"), quick=True, folder=str(tmp_path), out=str(out))
    told = json.loads(out.read_text())
    assert not told["complete"]
    assert len(told["models"][0]["kernels"]["times"]) == 1
