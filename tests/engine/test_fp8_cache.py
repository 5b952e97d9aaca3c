"""The engine with `kv_cache_dtype: fp8`: the reference kernels with the same numerics give its tokens, however rows are
batched, cut, preempted, shared or drafted for; broken rows are detected; and the cache has its reported size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Engine, SamplingParams
from pipeline.engine.completion import Completion
from pipeline.kernels.cache import FP8
from tests.model_folders import Family, make_family
from tests.parity.harness import float32_engine, greedy, our_logits

NUM_TOKENS = 24
TIE = 2e-2
"""Logits nearer than this may come out either way. Sums in another order move a key by rounding, and where that moves
it over the border between two codes, by a sixteenth of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("fp8"), Family("qwen3", "qwen3"), seed=8)


def fp8_engine(folder: Path, **options: Any) -> Engine:
    return float32_engine(folder, kv_cache_dtype="fp8", **options)


def drawn_prompts() -> list[list[int]]:
    """Draw prompts with lengths around multiples of 8; half of them begin alike."""
    rng = np.random.default_rng(5)
    stem = rng.integers(0, 255, 19).tolist()
    lengths = (1, 7, 8, 9, 16, 33, 50, 64)
    return [(stem if n % 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Generate tokens with the reference kernels, one row at a time, nothing shared."""
    with fp8_engine(folder, kernels="reference", max_num_seqs=1, enable_prefix_caching=False) as engine:
        return [c.token_ids for c in engine.generate(drawn_prompts(), greedy(NUM_TOKENS))]


def compare(folder: Path, ours: list[Completion], expected: list[list[int]]) -> None:
    """Assert equal tokens, or a first difference of at most one row at a near-tie of the reference."""
    apart = 0
    for prompt, completion, theirs in zip(drawn_prompts(), ours, expected, strict=True):
        differing = [n for n, (a, b) in enumerate(zip(completion.token_ids, theirs, strict=True)) if a != b]
        if not differing:
            continue
        apart, first = apart + 1, differing[0]
        with fp8_engine(folder, kernels="reference") as engine:
            logits_V = our_logits(engine, prompt + theirs[:first])[-1]
        gap = float(logits_V[theirs[first]] - logits_V[completion.token_ids[first]])
        assert gap < TIE, f"token {first}: a logit {gap:.1e} behind the best was chosen"
    assert apart <= 1


WAYS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 11, "max_num_seqs": 4},
    "preempted": {"kv_cache_memory_bytes": 176},  # tokens
    "lookup drafts": {"speculation": {"method": "lookup", "num_speculative_tokens": 3, "forced": True}},
    "its own draft model": {"speculation": {"method": "draft_model", "num_speculative_tokens": 3, "forced": True}},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_those_of_the_reference(folder: Path, expected: list[list[int]], way: str) -> None:
    options: dict[str, Any] = dict(WAYS[way])
    if way == "preempted":
        with fp8_engine(folder) as probe:
            options["kv_cache_memory_bytes"] *= probe.runner.decoder.config.kv_bytes_per_token(FP8)
        options["max_model_len"] = 128
    if way == "its own draft model":
        options["speculation"] = options["speculation"] | {"model": str(folder)}
    with fp8_engine(folder, **options) as engine:
        if way == "preempted":
            engine.scheduler.admission.expected_output = 4  # expects far too little, so that it admits far too much
        first = engine.generate(drawn_prompts(), greedy(NUM_TOKENS))
        again = engine.generate(drawn_prompts(), greedy(NUM_TOKENS))
        engine.pool.check()
        if way == "preempted":
            assert engine.stats.num_preemptions > 0
        else:
            assert sum(c.num_cached_tokens for c in again) > 0
        if "draft" in way:
            assert engine.stats.accepted_by_position[0] > 0
        if way == "its own draft model":  # accepted: its keys are neither stale nor others'
            assert engine.stats.accepted_by_position[0] > 0.9 * engine.stats.drafted_by_position[0]
            assert engine.spec_decoder.proposer.runner.kv.layers[0].v_CBKD.dtype == FP8
        assert all(layer.k_CBKD.dtype == FP8 for layer in engine.runner.kv.layers)
    compare(folder, first, expected)
    compare(folder, again, expected)


def test_it_changes_logits_a_little_and_no_more(folder: Path) -> None:
    tokens = drawn_prompts()[-1]
    with float32_engine(folder) as plain, fp8_engine(folder) as engine:
        exact, ours = our_logits(plain, tokens), our_logits(engine, tokens)
    change = float((ours - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert 1e-4 < change < 0.1


def test_the_cache_has_its_reported_size(folder: Path) -> None:
    memory = 1 << 20
    with float32_engine(folder, kv_cache_memory_bytes=memory) as plain:
        wide, config = int(plain.resolved["num_kv_blocks"]), plain.runner.decoder.config
        assert plain.resolved["kv_cache_dtype"] == "float32"
    with fp8_engine(folder, kv_cache_memory_bytes=memory) as engine:
        narrow = int(engine.resolved["num_kv_blocks"])
        assert engine.resolved["kv_cache_dtype"] == "float8_e4m3fn"
        num_bytes = sum(tensor.nbytes for layer in engine.runner.kv.layers for tensor in layer.tensors)
    block_bytes = 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4) * 8
    assert narrow == memory // block_bytes
    assert num_bytes == narrow * block_bytes
    assert narrow > 2.5 * wide


NAN_TOKEN = 300  # the tokenizer never makes it; its embedding is poisoned


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_broken_row_is_an_error_row_and_its_mates_are_unchanged(folder: Path, kernels: str, poison: float) -> None:
    """Only the scales of its keys and values are NaN."""
    prompts = drawn_prompts()
    bad = [*prompts[1][:19], *[9] * 5, NAN_TOKEN, *[9] * 12]
    with fp8_engine(folder, kernels=kernels) as engine:
        sound = engine.generate([*prompts, bad[:24]], greedy(8))[:-1]
    with fp8_engine(folder, kernels=kernels) as engine:
        engine.runner.decoder.embedding.weight_NK[NAN_TOKEN] = poison
        zero, layers, seen = engine.runner.zero_pages, engine.runner.kv.layers, []

        def zero_and_look(blocks: list[int]) -> None:
            for clean in (lambda _: None, zero):
                clean(blocks)
                codes = torch.cat([code.view(torch.uint8).flatten() for layer in layers for code in layer.tensors[:2]])
                assert bool((codes & 0x7F != 0x7F).all()), "no code is NaN"
                seen.append(all(bool(scale.isfinite().all()) for layer in layers for scale in layer.tensors[2:]))

        engine.runner.zero_pages = zero_and_look  # type: ignore[method-assign]
        done = engine.generate([*prompts, bad], [*[greedy(8)] * len(prompts), SamplingParams(max_tokens=8)])
        assert done[-1].error == "non_finite_logits"
        assert seen == [False, True]
        assert [c.error for c in done[:-1]] == [None] * len(prompts)
        assert sum(a.token_ids == b.token_ids for a, b in zip(done, sound)) >= len(prompts) - 1
        again = engine.generate([bad, [*prompts[1][:19], 5]], greedy(2))
        assert [c.error for c in again] == ["non_finite_logits", None]
