"""The engine with activations in fp8: whoever serves it, the tokens are those of the definition in plain torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.engine.startup import memory
from pipeline.engine.startup.memory import weight_bytes
from pipeline.model.config import read_config
from tests.engine.test_gpu_kernels import QWEN3, engine_of
from tests.kernels.triton.problems import DEVICE
from tests.model_folders import Family, write_checkpoint
from tests.weights.packers import quantize_randomly

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    write_checkpoint(path / "plain", Family("qwen3", "qwen3"), QWEN3, seed=4)
    return quantize_randomly(path / "plain", path / "int4", group_size=64, zero_point=True, seed=5)


def completed(engine: Engine) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens of ragged prompts, two of which begin alike, and their log-probabilities."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 16).tolist()
    prompts = [(stem if n < 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate((10, 1, 5))]
    with engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=0))
    likelihoods = [token.logprob for completion in done for token in completion.logprobs or ()]
    return [completion.token_ids for completion in done], np.array(likelihoods)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[list[int]], np.ndarray]:
    return completed(engine_of(folder, "reference", activation_dtype="fp8"))


@pytest.mark.parametrize(
    ("kernels", "limits"),
    [("triton", {}), ("cpu", {}), ("cpu", {"max_num_seqs": 1, "max_num_batched_tokens": 7})],
    ids=["triton", "cpu", "cpu, one after the other"],
)
def test_tokens_are_the_oracles(folder: Path, expected: Any, kernels: str, limits: dict[str, int]) -> None:
    tokens, likelihoods = completed(engine_of(folder, kernels, activation_dtype="fp8", **limits))
    assert tokens == expected[0]
    assert np.median(abs(likelihoods - expected[1])) < 1e-4


@pytest.mark.parametrize("kernels", ["triton", "cpu"])
def test_tokens_with_one_scale_a_token_are_the_oracles(folder: Path, expected: Any, kernels: str) -> None:
    oracle, ours = (
        completed(engine_of(folder, each, activation_dtype="fp8-per-token")) for each in ("reference", kernels)
    )
    assert ours[0] == oracle[0]
    assert np.median(abs(ours[1] - oracle[1])) < 1e-4
    assert np.median(abs(ours[1] - expected[1])) > 1e-3, "weights are rounded too"


def test_activations_as_they_come_give_other_logits(folder: Path, expected: Any) -> None:
    _, likelihoods = completed(engine_of(folder, "reference"))
    assert np.median(abs(likelihoods - expected[1])) > 1e-2


def test_it_says_what_is_in_fp8(folder: Path) -> None:
    with engine_of(folder, "triton", activation_dtype="fp8") as engine:
        assert engine.resolved["weights"] == "AWQ int4, groups of 64; inputs of 8 of 9 linears in fp8"
        assert "fp8" in str(engine.resolved["kernel.linear"])
    with engine_of(folder, "triton", activation_dtype="fp8-per-token") as engine:
        assert "inputs of 8 of 9 linears in fp8-per-token" in str(engine.resolved["weights"])
    with engine_of(folder, "triton") as engine:
        assert "fp8" not in f"{engine.resolved['weights']} {engine.resolved['kernel.linear']}"


def test_a_draft_model_keeps_its_own(folder: Path) -> None:
    plain = folder.with_name("plain")
    speculation: Any = {"method": "draft_model", "model": str(plain), "num_speculative_tokens": 2, "forced": True}
    config = EngineConfig(str(folder), device="cpu", dtype="float32", max_model_len=48, activation_dtype="fp8")
    with Engine(EngineConfig(**vars(config) | {"speculation": speculation})) as engine:
        assert "8 of 9 linears in fp8" in str(engine.resolved["weights"])


def test_memory_is_planned_with_a_byte_a_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(folder)
    gpu, linears = torch.device("cuda"), config.num_linear_parameters()
    rest = 2 * (config.num_parameters() - linears)
    planned = weight_bytes(config, gpu, torch.bfloat16, activation_dtype="fp8")
    assert planned == pytest.approx(rest + linears * (1 + 4 / 64), abs=1)
    assert planned < weight_bytes(config, gpu, torch.bfloat16)
    cpu, embeddings = torch.device("cpu"), 2 * config.vocab_size * config.hidden_size * torch.bfloat16.itemsize
    for alone, per_weight in ((False, 2 + 0.5 + 8 / 64), (True, 0.5 + 3 / 64)):  # with a dense form beside, or without
        monkeypatch.setattr(memory, "serves_int4_alone", lambda dtype, alone=alone: alone)
        rounded, plain = (weight_bytes(config, cpu, torch.bfloat16, activation_dtype=each) for each in ("fp8", "auto"))
        assert rounded == pytest.approx(embeddings + linears * (0.5 + 8 / 64), abs=1)
        assert plain == pytest.approx(embeddings + linears * per_weight, abs=1)
