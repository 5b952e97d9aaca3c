"""Copies out of prompts: learnt from rows that ended, found in others by what stands before them."""

import numpy as np
import pytest

from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.propose.cues import FIRST_ROWS, LEARNT_TOKENS, MOST_SOURCES, ROWS_BETWEEN, Cues
from pipeline.engine.propose.ngram import NgramProposer
from pipeline.engine.propose.suffix_index import MAX_MATCH
from pipeline.engine.sequence import Sequence, SlotTable

BY, WHO, COLON, OTHER = 1, 2, 3, 4  # "... by" in outputs, "who :" or "other :" in prompts


def row(*parts: list[int]) -> tuple[np.ndarray, int]:
    """Tokens of some parts of a prompt and, the last one, an output; and how many the prompt has."""
    return np.concatenate(parts).astype(np.int32), sum(map(len, parts[:-1]))


def test_what_stands_before_a_copy_is_found_in_another_prompt() -> None:
    cues = Cues()
    assert cues.is_empty
    cues.learn(*row([90, 91, WHO, COLON, 50, 51, 52, 92], [60, BY, 50, 51, 52, 61]))
    assert not cues.is_empty
    tokens, num_prompt = row([93, 94, 95, WHO, COLON, 70, 71, 96], [60, BY])
    assert cues.place(tokens, num_prompt) == 5
    assert cues.place(*row([93, WHO, COLON, 70], [99, BY])) == 3  # the token before the copy alone
    assert cues.place(*row([93, WHO, COLON, 70], [BY, 99])) == 0
    assert cues.place(*row([93, WHO, 96, COLON, 70], [60, BY])) == 0  # it stands nowhere
    assert cues.place(*row([93, 94, WHO, COLON], [60, BY])) == 0  # nothing of the prompt behind it


def test_of_several_ways_to_say_it_the_one_that_is_there_counts_then_the_more_frequent() -> None:
    cues = Cues()
    for before in (OTHER, WHO, WHO):
        cues.learn(*row([90, before, COLON, 50, 51, 92], [60, BY, 50, 51, 61]))
    assert cues.place(*row([OTHER, COLON, 70, 71, WHO, COLON, 72], [60, BY])) == 6
    assert cues.place(*row([OTHER, COLON, 70, 71, 93], [60, BY])) == 2


def test_the_longest_copy_says_where_it_came_from() -> None:
    cues = Cues()
    cues.learn(*row([90, OTHER, COLON, 50, 51, 80, WHO, COLON, 50, 51, 52, 53], [60, BY, 50, 51, 52, 61]))
    assert cues.place(*row([OTHER, COLON, 70, 71, WHO, COLON, 72], [60, BY])) == 6


def test_what_is_seldom_followed_by_a_copy_is_no_cue() -> None:
    cues = Cues()
    prompt = [90, WHO, COLON, 50, 51, 92]
    cues.learn(*row(prompt, [60, BY, 50, 51, 61]))
    asked = row([WHO, COLON, 70, 71], [60, BY])
    assert cues.place(*asked) == 2
    cues.learn(*row(prompt, [60, BY, 80, 60, BY, 81, 60, BY, 82]))
    assert cues.place(*asked) == 2  # one of four
    cues.learn(*row(prompt, [60, BY, 80]))
    assert cues.place(*asked) == 0


def test_inside_a_copy_no_other_one_begins() -> None:
    cues = Cues()
    cues.learn(*row([90, WHO, COLON, 50, 51, 52, 53, 92], [60, BY, 50, 51, 52, 53, 61]))
    assert cues.place(*row([50, 51, 70, 71], [50, 51])) == 0


@pytest.mark.parametrize("num_prompt", [0, 1, 2, 3, 6])
def test_short_rows_do_no_harm(num_prompt: int) -> None:
    cues = Cues()
    for length in range(num_prompt, num_prompt + 4):
        tokens = np.array(([1, 2] * 9)[:length], dtype=np.int32)
        cues.learn(tokens, num_prompt)
        assert cues.place(tokens, num_prompt) < max(num_prompt, 1)


def test_memory_is_bounded() -> None:
    cues = Cues(most_cues=64)
    rng = np.random.default_rng(0)
    for _ in range(100):
        cues.learn(rng.integers(0, 40, 90).astype(np.int32), 60)
    assert len(cues._cues) == 64
    cues = Cues()
    for before in range(100, 100 + 3 * MOST_SOURCES):
        cues.learn(*row([90, before, COLON, 50, 51, 92], [60, BY, 50, 51, 61]))
    assert max(len(cue.sources) for cue in cues._cues.values()) == MOST_SOURCES
    cues = Cues()
    cues.learn(*row([99] * LEARNT_TOKENS, [WHO, COLON, 50, 51], [60, BY, 50, 51, 61]))
    assert cues.place(*row([93, WHO, COLON, 70], [60, BY])) == 0


def test_later_rows_are_learnt_from_now_and_then() -> None:
    cues = Cues()
    for _ in range(FIRST_ROWS):
        cues.learn(*row([9, 9, 9], [8]))
    asked = row([93, WHO, COLON, 70], [60, BY])
    for number in range(ROWS_BETWEEN):
        assert cues.place(*asked) == 0, number
        cues.learn(*row([90, 91, WHO, COLON, 50, 51, 92], [60, BY, 50, 51, 61]))
    assert cues.place(*asked) == 3


def test_the_proposer_drafts_the_prompt_behind_a_cue() -> None:
    table = SlotTable(3, 60, 4)
    proposer = NgramProposer(table, 3)

    def admit(order: int, prompt: list[int]) -> int:
        sequence = Sequence(Request(order, prompt, SamplingParams()), np.array(prompt, dtype=np.int32), order)
        slot = table.occupy(sequence, [])
        proposer.admitted(slot)
        return slot

    def append(slot: int, tokens: list[int]) -> None:
        known = int(table.num_known[slot])
        table.token_ids[slot, known : known + len(tokens)] = tokens
        table.num_known[slot] += len(tokens)

    done = admit(0, [90, 91, WHO, COLON, 50, 51, 52, 92])
    append(done, [60, BY, 50, 51, 52, 61])
    proposer.left(done, finished=True)
    table.vacate(done)
    one, other, third = admit(1, [93, WHO, COLON, 70, 71, 72, 73, 96]), admit(2, [9, 8, 7]), admit(3, [WHO, COLON, 75])
    append(one, [60, BY])
    append(third, [60, BY])
    offer = proposer.offer(np.array([one, other, third]))
    assert offer.count_S.tolist() == [3, 0, 3]
    assert offer.match_len_S.tolist() == [MAX_MATCH, 0, MAX_MATCH]
    assert offer.token_id_SK[0].tolist() == [70, 71, 72]
    assert offer.token_id_SK[2].tolist() == [75, 60, BY]
    append(third, [0])
    proposer.left(one, finished=False)
    assert proposer.offer(np.array([third])).count_S.tolist() == [0]
