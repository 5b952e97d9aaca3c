"""Every family against transformers in float32: logits at all positions, and greedy tokens by every way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engine.schedule.admission import BlockDemand
from tests.model_folders import FAMILIES, VOCAB, Family, load_reference, make_family
from tests.parity.harness import (
    LOGIT_TOLERANCE,
    Agreement,
    compare_greedy,
    float32_engine,
    greedy,
    greedy_reference,
    our_logits,
    own_error,
    reference_logits,
    state_bytes,
)

SEED = 20
NUM_TOKENS = 24
SHARED = NUM_TOKENS // 2  # tokens of the first round that prompts of the second one have
LENGTHS = [1, 2, 7, 8, 9, 15, 16, 17, 33, 64]  # around the borders of blocks of 8


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda f: f.name)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, list[list[int]], list[list[int]]]:
    chosen: Family = request.param
    folder = make_family(tmp_path_factory.mktemp(chosen.name), chosen, SEED)
    model = load_reference(folder)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in LENGTHS]
    with float32_engine(folder) as engine:
        ours = [completion.token_ids for completion in engine.generate(prompts, greedy(NUM_TOKENS))]
    return folder, model, prompts, [greedy_reference(model, p, NUM_TOKENS, o) for p, o in zip(prompts, ours)]


def test_logits_at_every_position(family: tuple) -> None:
    folder, model, prompts, expected = family
    with float32_engine(folder) as engine:
        for prompt, continuation in zip(prompts[::3], expected[::3]):
            tokens = prompt + continuation
            difference = float((our_logits(engine, tokens) - reference_logits(model, tokens)).abs().max())
            if difference >= LOGIT_TOLERANCE:  # states add up the rounding errors of all tokens
                assert difference < LOGIT_TOLERANCE + 2 * own_error(folder, tokens)


WAYS = {
    "batched": {},
    "one at a time, without sharing": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 11, "max_num_seqs": 4},
    "preempted": {"max_model_len": 128, "spare_pages": 2},
    "drafted": {"speculation": {"method": "lookup", "num_speculative_tokens": 3, "forced": True}},
}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_greedy_tokens(family: tuple, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model, prompts, expected = family
    options = dict(WAYS[way])
    tight = options.pop("spare_pages", None)
    if tight:  # a cache for one row and few pages more
        with float32_engine(folder, **options) as probe:
            pages = probe.table.pages
            options["kv_cache_memory_bytes"] = (pages.num_pages(128) + tight) * pages.page_bytes + state_bytes(probe)
            monkeypatch.setattr(BlockDemand, "peak", 0.0)  # expects far too little, so that it admits far too much
    seen = Agreement()
    with float32_engine(folder, **options) as engine:
        # twice: the second round finds the first one's blocks, and half of its prompts have a continuation behind them
        repeats = 2 if way == "batched" else 1  # states are kept where the next row has the same prefix
        longer = [p + e[:SHARED] for p, e in zip(prompts, expected) for _ in range(repeats)]
        first = engine.generate(prompts, greedy(NUM_TOKENS))
        second = engine.generate(longer, greedy(NUM_TOKENS - SHARED))
        engine.pool.check()
        assert engine.pool.num_held == 0
        if tight:
            assert engine.stats.num_preemptions > 0
        if way == "drafted":
            assert engine.stats.num_draft_steps > 0
        if way == "batched":
            assert sum(c.num_cached_tokens for c in second) > 0
        if way == "one at a time, without sharing":
            assert sum(c.num_cached_tokens for c in second) == 0
    for prompt, ours, theirs in zip(prompts, first, expected):
        compare_greedy(model, prompt, ours.token_ids, theirs, seen)
    for i, (prompt, ours) in enumerate(zip(longer, second)):
        compare_greedy(model, prompt, ours.token_ids, expected[i // repeats][SHARED:], seen)
    assert seen.near_ties <= 2
    assert seen.compared >= 0.8 * (NUM_TOKENS + NUM_TOKENS - SHARED) * len(prompts)
