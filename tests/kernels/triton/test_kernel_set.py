"""The whole engine on the Triton kernels gives the tokens it gives on the reference's."""

from pathlib import Path

import pytest
import torch

from pipeline.kernels.contract import Kernels
from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.triton.kernel_set import triton_kernels
from pipeline.kernels.triton.linear import Scratch
from tests.checkpoints import Family, quantize_randomly, write_checkpoint
from tests.kernels.triton.problems import DEVICE
from tests.parity.harness import float32_engine, greedy

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the engine runs on the CPU here, and the kernels on the GPU"),
]

PROMPTS = [[5, 9, 2, 7] * 3, [17]]  # one too long for the decode kernel


def tokens(folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    monkeypatch.setattr("pipeline.engine.loaded.select_kernels", lambda device, dtype: kernels)
    with float32_engine(folder, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        return [completion.token_ids for completion in engine.generate(PROMPTS, greedy(3))]


def test_greedy_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with 4-bit weights, norms on queries and keys, and a window on its second layer. The prompts go
    through the wide form of the weights, what is decoded through the narrow one."""
    config = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "eos_token_id": 257,
    }
    made = write_checkpoint(tmp_path / "dense", Family("qwen3", "qwen3"), config, seed=5)
    folder = quantize_randomly(made, tmp_path / "awq", 32, True, seed=5)
    device = torch.device("cpu")
    reference = reference_kernels(torch.float32, device)
    expected = tokens(folder, reference, monkeypatch)
    assert [len(ids) for ids in expected] == [3, 3]

    monkeypatch.setattr("pipeline.kernels.triton.linear.CROSSOVER_SCRATCH", 10)
    kernels = triton_kernels(torch.float32, device, scratch=Scratch(torch.float32, device))
    assert tokens(folder, kernels, monkeypatch) == expected
    assert set(kernels.served_by) == set(reference.served_by)


def test_it_is_said_what_serves() -> None:
    device = torch.device("cpu")
    plain, special = (
        triton_kernels(torch.float32, device, scratch=scratch, deterministic=scratch is not None).served_by
        for scratch in (None, Scratch(torch.float32, device))
    )
    assert ("kept" in plain["linear"], "shared scratch" in special["linear"]) == (True, True)
    assert ("batch-invariant" in plain["attention"], "batch-invariant" in special["attention"]) == (False, True)
