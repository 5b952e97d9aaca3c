"""Workloads: fixed by their seed, the same lengths and other prompts each round; the figures made of rounds."""

import pytest

from pipeline.bench.measure import Spread, alternating, facts_to_text, machine_facts, ratio, read_bandwidth
from pipeline.bench.workload import FIRST_TOKEN, Workload, count_tokens
from pipeline.errors import ConfigError

WORK = Workload(requests=48, prompt_tokens=120, output_low=16, output_high=128, vocab_size=32_000)


def test_rounds_have_the_same_lengths_and_share_no_prefix():
    one, two = WORK.round("1"), WORK.round("2")
    assert one == WORK.round("1")
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in one] == WORK.lengths()
    assert [(len(r.prompt_token_ids), r.max_tokens) for r in two] == WORK.lengths()
    starts = [tuple(r.prompt_token_ids[:8]) for r in one + two]
    assert len(set(starts)) == len(starts)
    tokens = [token for r in one for token in r.prompt_token_ids]
    assert FIRST_TOKEN <= min(tokens) < max(tokens) < 32_000
    assert count_tokens(one) == (WORK.num_prompt_tokens, WORK.num_output_tokens)
    assert WORK.one("1", 5) == WORK.one("1", 5) != WORK.one("2", 5)
    assert (len(WORK.one("1", 5).prompt_token_ids), WORK.one("1", 5).max_tokens) == (120, 5)
    assert WORK.longest == max(prompt + output for prompt, output in WORK.lengths())


def test_lengths_are_ragged_around_what_was_asked():
    prompts, outputs = zip(*WORK.lengths())
    assert 90 < sorted(prompts)[24] < 160
    assert max(prompts) > 2 * sorted(prompts)[24]
    assert 16 <= min(outputs) < 30
    assert 115 < max(outputs) <= 128
    assert "48 requests" in WORK.to_text()
    assert Workload(1, 1, 1, 1, 100).lengths()[0][1] == 1


def test_a_request_asks_for_exactly_its_tokens():
    request = WORK.round("1")[0].to_request("row")
    assert request.params.ignore_eos
    assert request.params.temperature == 0
    assert (request.row_id, request.params.max_tokens) == ("row", WORK.lengths()[0][1])


@pytest.mark.parametrize("wrong", [(0, 1, 1, 1, 99), (1, 0, 1, 1, 99), (1, 1, 2, 1, 99), (1, 1, 1, 1, FIRST_TOKEN)])
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected"):
        Workload(*wrong)


def test_figures():
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([3.0, 1.0]).to_text(1) == "2.0 (1.0 to 3.0)"
    assert Spread.of([1234.5]).to_text(1) == "1,234.5"
    assert alternating(["a", "b"], 3) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert read_bandwidth(1) > 1e8
    assert "torch" in facts_to_text(machine_facts())
