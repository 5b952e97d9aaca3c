"""Known texts are read while other rows generate, even if steps are launched before the previous tokens are known."""

import numpy as np
import pytest

from pipeline import Request, SamplingParams
from pipeline.engine.tasks import Choice, Score
from tests.engine.drafts.proposers import draft_with
from tests.engine.drafts.test_draft_model import draft_with_itself
from tests.engine.hash_runner import VOCAB, check_tokens, hash_engine, next_token
from tests.engine.schedule.test_scheduler import run

PARAMS = SamplingParams()


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("has_states", [False, True])
def test_texts_are_read_between_steps_in_flight(
    is_asynchronous: bool, num_blocks: int, drafts: bool, has_states: bool
) -> None:
    rng = np.random.default_rng(1)
    engine = hash_engine(num_blocks, 4, is_asynchronous=is_asynchronous, has_states=has_states)
    if drafts:
        draft_with(engine, draft_with_itself(engine, 3))
    rows = [
        Request(row, rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist(), SamplingParams(max_tokens=9))
        for row in range(12)
    ]
    texts = [rng.integers(0, VOCAB, int(rng.integers(2, 40))).tolist() for _ in range(12)]
    labels = ((3,), (5, 6), (5, 7, 8), tuple(range(1, 16)))
    done: dict = {}
    for number, request in enumerate(rows):
        engine.add(request)
        engine.add(Request(("score", number), texts[number], PARAMS, task=Score(1, 0)))
        if number % 3 == 0:
            engine.add(Request(("choice", number), texts[number], PARAMS, task=Choice(labels)))
        done |= {completion.row_id: completion for completion in engine.step()}
    done |= run(engine, [], check=False)
    check_tokens({row: done[row] for row in range(12)}, rows)
    whole = float(np.log(np.e + VOCAB - 1))  # of one logit of 1 and zeros
    for number, text in enumerate(texts):
        logprobs = [token.logprob for token in done["score", number].result.tokens]
        hits = [next_token(text[:i]) == text[i] for i in range(1, len(text))]
        assert logprobs == pytest.approx([hit - whole for hit in hits], abs=1e-5)
        if number % 3 == 0:
            expected = []
            for label in labels:
                longer = [*text, *label]
                positions = range(len(text), len(longer))
                expected.append(sum((next_token(longer[:p]) == longer[p]) - whole for p in positions))
            assert done["choice", number].result.logprobs == pytest.approx(expected, abs=1e-5)
    assert engine.pool.num_held == 0
    assert engine.table.num_readers == 0
    assert (engine.stats.drafted_by_position[0] > 0) == drafts


def test_labels_of_a_row_that_was_preempted_are_written_into_blocks_of_its_own() -> None:
    """Findable blocks of one turn keep their content when a later turn writes another label."""
    engine = hash_engine(40, 4)
    prompt, shared = [1, 2, 3, 4], (2, 2, 2, 2)
    labels = ((*shared, 3, 4), (*shared, 5, 6), (9, 1))
    engine.add(Request("choice", prompt, PARAMS, task=Choice(labels)))
    assert engine.step() == []
    engine.scheduler.admission.put_back(engine.scheduler.drop(int(engine.scheduler.running[0])))
    run(engine, [], check=False)
    request = Request("after", [*prompt, *shared, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    done = run(engine, [request])
    assert done["after"].num_cached_tokens == 8
    check_tokens(done, [request])


def test_logits_that_are_no_numbers_are_an_error_row_and_leak_no_block() -> None:
    engine = hash_engine(200, 4, bad_token=90)
    text, fine = [90, *range(12)], list(range(10))
    for row, each in enumerate((text, fine)):
        engine.add(Request(row, each, PARAMS, task=Score()))
    engine.add(Request(2, text, PARAMS, task=Choice(((1, 2), (3, 4)))))
    done = run(engine, [])
    assert [done[row].error for row in range(3)] == ["non_finite_logits", None, "non_finite_logits"]
    assert "non-finite logits for the prompt" in done[0].error_message
    assert engine.runner.zeroed
    assert engine.pool.num_held == 0
