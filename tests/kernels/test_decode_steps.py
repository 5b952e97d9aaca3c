"""Steps of single tokens through all layers at once: the bits of layer by layer, and only where they are served."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.engine.resolve import quantized_on_load
from pipeline.kernels.cache import FP8
from pipeline.kernels.contract import AttentionInput, Kernels
from pipeline.kernels.cpu import decode_steps
from pipeline.kernels.rounded import with_rounded_activations
from pipeline.kernels.select import select_kernels
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder, KVCache
from tests.checkpoints import FAMILIES, make_family

CPU, BLOCK = torch.device("cpu"), 8
PROMPTS = [5, 19, 12]
STEPS: list[dict[int, int]] = [  # of each, how many tokens a sequence computes
    dict(enumerate(PROMPTS)),
    {0: 1, 1: 1, 2: 1},
    {1: 1},
    {0: 1, 1: 2, 2: 1},
    {2: 1, 0: 1},
    {0: 1, 1: 1, 2: 1},
]
SINGLE = [step for step in STEPS if set(step.values()) == {1}]


def decoder_of(folder: Path, kernels: Kernels) -> Decoder:
    return Decoder(folder, quantized_on_load(read_config(folder), "int4-rtn"), kernels, torch.float32, CPU)


def run(decoder: Decoder, kv_dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], KVCache]:
    """The hidden states of each of STEPS."""
    kv = KVCache.allocate(decoder.config, 4 * len(PROMPTS), BLOCK, kv_dtype, CPU)
    known, found = [0] * len(PROMPTS), []
    random = np.random.default_rng(0)
    cos_PD2, sin_PD2 = decoder.config.rope.tables(decoder.config.head_dim, 64)
    for step in STEPS:
        position_T = np.concatenate([np.arange(known[s], known[s] + count) for s, count in step.items()])
        sequence_T = np.repeat(list(step), list(step.values()))
        for s, count in step.items():
            known[s] += count
        table_SM = np.arange(4 * len(PROMPTS), dtype=np.int32).reshape(-1, 4)
        where = AttentionInput(
            np.cumsum([0, *step.values()]).astype(np.int32),
            np.array([known[s] for s in step], np.int32),
            table_SM[list(step)],
            torch.from_numpy(table_SM[sequence_T, position_T // BLOCK].astype(np.int64) * BLOCK + position_T % BLOCK),
            BLOCK,
        )
        token_T = torch.from_numpy(random.integers(0, 256, len(position_T)))
        rotations = cos_PD2[position_T], sin_PD2[position_T]
        found.append(decoder.forward(token_T, *rotations, where, np.arange(len(position_T)), kv))
    return found, kv


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step through all layers at once, whether it ran on several threads."""
    seen: list[bool] = []
    use_threads = decode_steps.use_threads
    monkeypatch.setattr(decode_steps, "use_threads", lambda parallel: seen.append(parallel) or use_threads(parallel))
    return seen


@pytest.mark.parametrize("name", ["qwen3", "qwen3-bias", "mistral-window", "llama-linear-bias-tied"])
@pytest.mark.parametrize("activation_dtype", ["auto", "int8"])
def test_bits_are_those_of_layer_by_layer(name: str, activation_dtype: str, tmp_path: Path, told: list[bool]) -> None:
    folder = make_family(tmp_path, next(family for family in FAMILIES if family.name == name), seed=3)
    kernels = select_kernels(CPU, torch.float32)
    if activation_dtype != "auto":
        kernels = with_rounded_activations(kernels, activation_dtype, CPU)
    wanted, wanted_kv = run(decoder_of(folder, replace(kernels, decode_steps=None)))
    assert not told
    decoder = decoder_of(folder, kernels)
    for _ in range(2):  # the second time on another cache
        found, kv = run(decoder)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for layer, wanted_layer in zip(kv.layers, wanted_kv.layers, strict=True):
            assert torch.equal(layer.k_CBKD, wanted_layer.k_CBKD)
            assert torch.equal(layer.v_CBKD, wanted_layer.v_CBKD)
    assert told == [False] * 2 * len(SINGLE)  # so small a model is not worth two threads


def test_a_step_has_one_number_of_threads(tmp_path: Path, told: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of a layer's linears is worth several threads, all kernels of the step run on as many."""
    decoder = decoder_of(make_family(tmp_path, FAMILIES[0], seed=3), select_kernels(CPU, torch.float32))
    monkeypatch.setattr(decoder.layers[0].down, "is_parallel", lambda num_tokens: num_tokens >= 2)
    run(decoder)
    assert told == [len(step) >= 2 for step in SINGLE]


def test_other_layers_and_caches_are_computed_layer_by_layer(tmp_path: Path, told: list[bool]) -> None:
    folder, kernels = make_family(tmp_path, FAMILIES[0], seed=3), select_kernels(CPU, torch.float32)
    run(decoder_of(folder, kernels), FP8)
    run(Decoder(folder, read_config(folder), kernels, torch.float32, CPU))  # weights in float32, for BLAS
    assert not told
    assert select_kernels(CPU, torch.float32, deterministic=True).decode_steps is None
