"""Rows with every kind of option, engines for them, and the comparison of two runs."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from tests.engine.hash_runner import hash_engine
from tests.engine.schedule.test_scheduler import random_requests


def odd_requests(rng: np.random.Generator, count: int, max_len: int) -> list[Request]:
    """Build requests with every kind of option, and stop strings that occur in their texts."""
    kinds = [
        {},
        {},
        {"temperature": 0.15},
        {"temperature": 0.2, "top_p": 0.9, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"logprobs": 2},
        {"temperature": 0.15, "logprobs": 0, "min_p": 0.01, "repetition_penalty": 1.1},
        {"min_tokens": 6, "stop_token_ids": tuple(range(0, 40))},
        {"stop": (" 3", "7 1")},
        {"stop": (" 3",), "min_tokens": 5, "temperature": 0.15},
    ]
    return [
        replace(
            r,
            params=replace(
                r.params, seed=row, max_tokens=max(r.params.max_tokens, 6), **kinds[int(rng.integers(len(kinds)))]
            ),
        )
        for row, r in enumerate(random_requests(rng, count, max_len))
    ]


def same(ours: Mapping[object, Completion], plain: Mapping[object, Completion]) -> bool:
    """Compare completions except for times and shared prefixes; log-probabilities up to rounding."""
    assert ours.keys() == plain.keys()
    for row, expected in plain.items():
        mine = ours[row]
        for name in ("token_ids", "text", "finish_reason", "error", "num_prompt_tokens"):
            assert getattr(mine, name) == getattr(expected, name)
        assert (mine.logprobs is None) == (expected.logprobs is None)
        for a, b in zip(mine.logprobs or [], expected.logprobs or [], strict=True):
            assert (a.token_id, [token for token, _ in a.top]) == (b.token_id, [token for token, _ in b.top])
            assert [a.logprob, *(v for _, v in a.top)] == pytest.approx([b.logprob, *(v for _, v in b.top)], abs=1e-4)
    return True


def roomy_engine(max_len: int, memory: int | None) -> Engine:
    return hash_engine(400, 4, memory=memory, max_model_len=max_len, max_num_seqs=16, max_num_batched_tokens=200)
