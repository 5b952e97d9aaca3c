"""Benchmark of speculative decoding: equal work in every mode, and figures of its own steps."""

import pytest

from benchmarks.speculation import AGAIN, AUTO, DRAFT, NGRAM, PLAIN, _SpeculationRun, _way, bench_speculation
from pipeline.engine.stats import EngineStats
from pipeline.errors import PipelineError


def test_every_mode_gives_the_same_tokens() -> None:
    result = bench_speculation(batch_sizes=(2,), rows=3, rounds=1, dtype="float32")
    (batch,) = result.batches
    assert [way.name for way in batch.ways] == [PLAIN, AUTO, AGAIN, NGRAM, DRAFT]
    plain, _, again, lookup, draft = batch.ways
    assert len({way.tokens for way in batch.ways}) == 1
    assert all(way.equal == 3 for way in batch.ways)
    assert (plain.draft_steps, plain.acceptance, plain.tokens_per_step) == (0.0, 0.0, pytest.approx(1.0, abs=0.1))
    assert (again.draft_steps, again.tokens_per_step) == (0.0, plain.tokens_per_step)
    assert min(lookup.draft_steps, draft.draft_steps) > 0.5
    assert min(lookup.tokens_per_step, draft.tokens_per_step) > 1.2
    assert all(0.0 < way.tail_s[0] <= way.seconds[0] for way in batch.ways)


def test_tokens_that_differ_from_plain_decoding_are_an_error_in_float32() -> None:
    def run(*tokens: list[int]) -> _SpeculationRun:
        return _SpeculationRun(1.0, 0.5, list(tokens), EngineStats(generated_tokens=3, batch_sum=3, num_steps=3))

    plain, other = [run([1, 2], [3])] * 2, [run([1, 2], [3]), run([1, 2], [4])]
    assert _way("x", plain, plain, strict=True).equal == 2
    assert _way("x", other, plain, strict=False).equal == 1
    with pytest.raises(PipelineError, match="1 of 2 completions differ from plain decoding"):
        _way("x", other, plain, strict=True)
