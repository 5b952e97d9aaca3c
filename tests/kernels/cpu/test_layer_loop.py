"""Steps of one token a sequence or a few through all layers at once: same bits as layer by layer, and only where
supported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.engine.startup.resolve import quantized_on_load
from pipeline.kernels.activations.act_quant import Activations, with_act_quant
from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.cache import FP8
from pipeline.kernels.contract import Kernels
from pipeline.kernels.cpu import layer_loop
from pipeline.kernels.cpu.attention.attention import Plan, plan_of
from pipeline.kernels.cpu.linear.linear_bf16 import use_avx512_bf16
from pipeline.kernels.select import select_kernels
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder
from pipeline.model.kv_cache import KVCache, single_kv_pages
from pipeline.model.rotation import RotationTables
from tests.model_folders import FAMILIES, make_family

CPU, BLOCK = torch.device("cpu"), 8
PROMPTS = [5, 19, 12]
STEPS: list[dict[int, int]] = [  # of each, how many tokens a sequence computes; the first are its prompts
    dict(enumerate(PROMPTS)),
    {0: 1, 1: 1, 2: 1},
    {1: 1},
    {0: 1, 1: 2, 2: 1},
    {2: 1, 0: 1},
    {2: 7},  # over the end of a block
    {0: 9, 1: 1, 2: 3},  # one over all of a block
    {0: 2, 1: 5},
    {0: 1, 1: 1, 2: 1},
]
WEIGHTS = ["int4-rtn", "int8", "bfloat16"]


def decoder_of(
    folder: Path, kernels: Kernels, weights: str = "int4-rtn", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Load a decoder with weights in one of WEIGHTS."""
    config = read_config(folder)
    if weights != "bfloat16":
        return Decoder(folder, quantized_on_load(config, weights), kernels, dtype, CPU)
    narrow = folder / "narrow"
    if not narrow.exists():
        narrow.mkdir()
        for shard in folder.glob("*.safetensors"):
            save_file({name: each.to(torch.bfloat16) for name, each in load_file(shard).items()}, narrow / shard.name)
        (narrow / "model.safetensors.index.json").write_text((folder / "model.safetensors.index.json").read_text())
    return Decoder(narrow, config, kernels, dtype, CPU)


def run(decoder: Decoder, kv_dtype: torch.dtype | None = None) -> tuple[list[torch.Tensor], KVCache]:
    """Return the hidden states of each of STEPS: of prompts only after the last token, else after all tokens."""
    dtype = kv_dtype or decoder.dtype
    pages = single_kv_pages(decoder.config, BLOCK, dtype)
    kv = KVCache.allocate(decoder.config, 5 * len(PROMPTS), pages, dtype, CPU)
    known, found = [0] * len(PROMPTS), []
    random = np.random.default_rng(0)
    tables = RotationTables(decoder.config.ropes, decoder.config.head_dim, 64, CPU)
    table_SM = random.permutation(5 * len(PROMPTS)).astype(np.int32).reshape(-1, 5)
    for step in STEPS:
        position_T = np.concatenate([np.arange(known[s], known[s] + count) for s, count in step.items()])
        sequence_T = np.repeat(list(step), list(step.values()))
        for s, count in step.items():
            known[s] += count
        query_start_S1 = np.cumsum([0, *step.values()]).astype(np.int32)
        attn_metadata = AttentionInput(
            query_start_S1,
            np.array([known[s] for s in step], np.int32),
            table_SM[list(step)],
            torch.from_numpy(table_SM[sequence_T, position_T // BLOCK].astype(np.int64) * BLOCK + position_T % BLOCK),
            BLOCK,
        )
        token_T = torch.from_numpy(random.integers(0, 256, len(position_T)))
        row_R = query_start_S1[1:].astype(np.int64) - 1 if step is STEPS[0] else np.arange(len(position_T))
        positions = torch.from_numpy(position_T)
        found.append(decoder.forward(token_T, positions, tables.at(positions), attn_metadata, row_R, kv))
    return found, kv


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that receives, for each step through all layers at once, whether it ran on several threads."""
    seen: list[bool] = []

    def planned(*arguments: Any) -> Plan:
        plan = plan_of(*arguments)
        seen.append(plan.parallel)
        return plan

    monkeypatch.setattr(layer_loop, "plan_of", planned)
    return seen


DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not use_avx512_bf16(), reason="no products of pairs")),
]


@pytest.mark.parametrize("name", ["qwen3-bias", "mistral-window", "llama-linear-bias-tied", "gemma2", "gemma3"])
@pytest.mark.parametrize(("weights", "activation_dtype"), [*((each, "auto") for each in WEIGHTS), ("int4-rtn", "int8")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_layer_by_layer(
    name: str, weights: str, activation_dtype: str, dtype: torch.dtype, tmp_path: Path, threaded: list[bool]
) -> None:
    folder = make_family(tmp_path, next(family for family in FAMILIES if family.name == name), seed=3)
    kernels = select_kernels(CPU, dtype)
    if activation_dtype != "auto":
        kernels = with_act_quant(kernels, Activations.for_all_weights(activation_dtype), CPU)
    wanted, wanted_kv = run(decoder_of(folder, replace(kernels, fused_layer_loop=None), weights, dtype))
    assert not threaded
    decoder = decoder_of(folder, kernels, weights, dtype)
    for _ in range(2):  # the second time on another cache
        found, kv = run(decoder)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for layer, wanted_layer in zip(kv.layers, wanted_kv.layers, strict=True):
            assert torch.equal(layer.k_CBKD, wanted_layer.k_CBKD)
            assert torch.equal(layer.v_CBKD, wanted_layer.v_CBKD)
    assert threaded == [False] * 2 * len(STEPS[1:])  # the model is too small for two threads


def test_layers_with_a_softcap_and_sinks(tmp_path: Path, threaded: list[bool]) -> None:
    folder, kernels = make_family(tmp_path, FAMILIES[0], seed=3), select_kernels(CPU, torch.float32)
    assert kernels.fused_layer_loop is not None
    found: list[list[torch.Tensor]] = []
    for softcap, with_sinks, is_fused in (
        (0.0, False, True),
        (0.1, True, False),
        (0.1, True, True),
        (0.1, False, True),
    ):
        decoder = decoder_of(folder, replace(kernels, fused_layer_loop=None))
        torch.manual_seed(0)
        for layer in decoder.layers:
            layer.softcap = softcap
            layer.sinks_N = torch.randn(decoder.config.num_heads) if with_sinks else None
        if is_fused:
            config = decoder.config
            decoder._decode_steps = kernels.fused_layer_loop(decoder.layers, config.head_dim, config.norm_eps)
        found.append(run(decoder)[0])
    assert len(threaded) == 3 * len(STEPS[1:])
    plain, apart, fused, without_sinks = found
    for step in range(len(STEPS)):
        assert torch.equal(fused[step], apart[step])
        assert not torch.equal(fused[step], plain[step])
        assert not torch.equal(fused[step], without_sinks[step])


def test_other_layers_and_caches_are_computed_layer_by_layer(tmp_path: Path, threaded: list[bool]) -> None:
    folder, kernels = make_family(tmp_path, FAMILIES[0], seed=3), select_kernels(CPU, torch.float32)
    run(decoder_of(folder, kernels), FP8)
    run(Decoder(folder, read_config(folder), kernels, torch.float32, CPU))  # weights in float32, for BLAS
    assert not threaded
    assert select_kernels(CPU, torch.float32, deterministic=True).fused_layer_loop is None
