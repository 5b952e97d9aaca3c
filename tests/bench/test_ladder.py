"""The ladder at a small size: every rung the same tokens, each rung what its name says."""

import json

import pytest

from pipeline.bench import ladder
from pipeline.bench.ladder import (
    BLOCK_SIZE,
    CONTINUOUS,
    DYNAMIC,
    INT4,
    INT8,
    ONE,
    ROUNDED,
    SHARING,
    STATIC,
    bench_ladder,
)
from pipeline.engine.params import Request, SamplingParams
from pipeline.errors import PipelineError


def test_every_rung_gives_the_same_tokens(tmp_path):
    said = []
    found = bench_ladder("demo", 6, 2, 1, (2, 6), "float32", 1, str(tmp_path), said.append)
    rungs = {rung.name: rung for rung in found.rungs}
    assert list(rungs) == [ONE, STATIC, DYNAMIC, CONTINUOUS, SHARING, INT8, INT4, ROUNDED]
    assert [rung.equal for rung in found.rungs[:-1]] == [6] * 7
    # what the weights save holds keys and values
    assert rungs[ROUNDED].at_once >= rungs[INT4].at_once >= rungs[INT8].at_once > rungs[SHARING].at_once
    assert rungs[ONE].at_once == 1.0
    assert 1.0 < rungs[STATIC].at_once <= 2.0
    assert {rungs[name].computed_tokens for name in (ONE, STATIC, DYNAMIC, CONTINUOUS)} == {found.prompt_tokens}
    saved = found.prompt_tokens - rungs[SHARING].computed_tokens
    assert saved == 5 * (found.shared_tokens // BLOCK_SIZE) * BLOCK_SIZE  # all but the first request's
    assert found.kv_tokens % (2 * BLOCK_SIZE) == 0
    assert json.loads(json.dumps(found.to_json()))["rungs"][0]["name"] == ONE
    others = f"6 of 6 requests in every rung but the last, which rounds otherwise: {rungs[ROUNDED].equal} of 6 there."
    assert f"Tokens equal to the first rung's: {others}" in found.to_text()
    assert said[-1] == f"round 1 of 1: {ROUNDED}"
    assert len({line for line in said if line.startswith("loading")}) == 3  # the last two rungs: one folder


def test_a_checkpoint_without_int4_weights_has_no_such_rung(tmp_path):
    found = bench_ladder("demo:target", 3, 2, 1, (2, 3), "float32", 1, str(tmp_path))
    assert found.rungs[-1].name == SHARING
    assert "No rung of int4 weights: the checkpoint has none." in found.to_text()


def test_it_is_said_which_rungs_are_not_there():
    assert ladder._left_out([ONE, INT8, INT4, ROUNDED], True, "float32") == ""
    none = "there are no kernels for them in bfloat16 here"
    assert ladder._left_out([ONE, INT4, ROUNDED], True, "bfloat16") == f"No rung of int8 weights: {none}."
    assert ladder._left_out([INT4], True, "bfloat16") == f"No rung of int8 weights and int8 activations: {none}."
    assert ladder._left_out([ONE], True, "bfloat16").startswith(f"No rung of int4 weights: {none}, so")


def test_sorted_batches_hold_their_longest_in_the_memory_there_is():
    lengths = [100, 10, 50, 49, 12, 11, 90]
    requests = [Request(i, [1] * (n - 5), SamplingParams(max_tokens=5)) for i, n in enumerate(lengths)]
    waves = ladder._by_length(requests, kv_tokens=2 * 112)
    assert [[lengths[r.row_id] for r in wave] for wave in waves] == [[100, 90], [50, 49, 12], [11, 10]]


def test_other_tokens_are_no_comparison(tmp_path, monkeypatch):
    run = ladder._run

    def wrong(engine, shares, drive, requests):
        done = run(engine, shares, drive, requests)
        if shares:
            done.token_ids[0][-1] += 1
        return done

    monkeypatch.setattr(ladder, "_run", wrong)
    with pytest.raises(
        PipelineError, match=r"\+ prefix sharing: 1 float32 completions are not one request at a time's"
    ):
        bench_ladder("demo", 3, 2, 1, (2, 3), "float32", 1, str(tmp_path))
