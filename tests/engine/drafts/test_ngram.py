"""Lookup against a search through the whole texts."""

import numpy as np
import pytest

from pipeline.engine.drafts.lookup.compiled_lookup import MAX_MATCH, MIN_MATCH, new_table
from pipeline.engine.drafts.lookup.ngram import NgramProposer
from pipeline.engine.drafts.policy import Proposal
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.roofline.kv_pages import KVPages

NONE = np.array([], dtype=np.int64)


class Literal(NgramProposer):
    """Proposer without copy patterns, which have their own tests."""

    def propose(self, slot_S: np.ndarray) -> Proposal:
        self._learn()
        return self._matches(slot_S, self.table.num_known[slot_S], 8192)


def admit(table: SlotTable, proposer: NgramProposer, order: int, tokens: list[int]) -> int:
    sequence = Sequence(Request(order, tokens, SamplingParams(max_tokens=500)), np.array(tokens, dtype=np.int32), order)
    slot = table.occupy(sequence, [])
    proposer.admitted(slot)
    return slot


def append(table: SlotTable, slot: int, tokens: list[int]) -> None:
    known = int(table.num_known[slot])
    table.token_ids[slot, known : known + len(tokens)] = tokens
    table.num_known[slot] += len(tokens)


def leave(table: SlotTable, proposer: NgramProposer, slot: int, finished: bool) -> None:
    proposer.on_evicted(slot, finished)
    table.vacate(slot)


def longest_match(text: list[int], tail: list[int]) -> tuple[int, int]:
    """Return the length and the last end of the longest run of at most MAX_MATCH tokens that ends `tail` and occurs in
    `text` with a token after it."""
    for length in range(min(MAX_MATCH, len(tail)), MIN_MATCH - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == tail[-length:]:
                return length, end
    return 0, 0


def expected_drafts(text: list[int], outputs: list[list[int]], max_drafts: int) -> tuple[int, list[int]]:
    """Return the match length and the tokens after it, in the text or in a finished output that matches better."""
    length, end = longest_match(text, text)
    drafts = (text[end:] * max_drafts)[:max_drafts] if length else []
    for output in outputs[::-1]:
        other, end = longest_match(output, text)
        if other > length:
            length, drafts = other, output[end : end + max_drafts]
    return length, drafts


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_what_followed_the_longest_match_the_last_time(seed: int) -> None:
    """Sequences arrive, grow at their own pace, finish or are evicted and resume in other slots; small alphabets match
    often."""
    rng = np.random.default_rng(seed)
    table, max_drafts = SlotTable(9, 150, KVPages(4, 0)), int(rng.integers(1, 9))
    proposer = Literal(table, max_drafts)
    alphabet = int(rng.choice([2, 4, 12]))
    order = num_looked_up = num_forgotten = num_own = num_others = 0
    slots: dict[int, int] = {}
    outputs: list[list[int]] = []
    for _ in range(60):
        while len(slots) < 9 and rng.random() < 0.5:
            slots[admit(table, proposer, order, rng.integers(0, alphabet, int(rng.integers(1, 40))).tolist())] = order
            order += 1
        looked_up = np.array([s for s in slots if rng.random() < 0.8], dtype=np.int64)
        proposal = proposer.propose(looked_up)
        for s, slot in enumerate(looked_up.tolist()):
            text = table.token_ids[slot, : table.num_known[slot]].tolist()
            found = int(proposal.match_len_S[s]), proposal.token_id_SK[s, : proposal.count_S[s]].tolist()
            expected = expected_drafts(text, outputs, max_drafts)
            num_looked_up += 1
            if found != expected:  # another run overwrote its entry
                assert found[0] <= expected[0]
                num_forgotten += 1
            num_own += expected[0] > 0
            num_others += expected[0] > longest_match(text, text)[0]
        for slot in list(slots):
            append(table, slot, rng.integers(0, alphabet, int(rng.integers(0, 6))).tolist())
            if rng.random() < 0.05 or table.num_known[slot] > 140:
                output = table.token_ids[slot, table.num_prompt[slot] : table.num_known[slot]].tolist()
                is_finished = rng.random() < 0.7
                leave(table, proposer, slot, finished=is_finished)
                proposer.propose(NONE)
                outputs += [output] if is_finished and len(output) > MIN_MATCH else []
                del slots[slot]
    assert num_own > 50
    assert num_others > 5
    assert num_forgotten <= num_looked_up // 50


@pytest.mark.parametrize("seed", range(3))
def test_finished_outputs_are_bounded_and_never_run_together(seed: int) -> None:
    """Drafts followed that very run in one recent output."""
    rng = np.random.default_rng(seed)
    table = SlotTable(2, 140, KVPages(4, 0))
    proposer, outputs, num_found = Literal(table, 4, corpus_tokens=64), list[list[int]](), 0
    for order in range(200):
        output = rng.integers(0, 3, int(rng.choice([1, 2, 3, 9, 20, 62, 100]))).tolist()
        slot = admit(table, proposer, 2 * order, [7])
        append(table, slot, output)
        leave(table, proposer, slot, finished=True)
        outputs = [*outputs[-30:], output[-61:]]
        text = rng.permutation(np.arange(100, 109)).tolist() + rng.integers(0, 3, int(rng.integers(2, 5))).tolist()
        slot = admit(table, proposer, 2 * order + 1, text)
        proposal = proposer.propose(np.array([slot]))
        leave(table, proposer, slot, finished=False)
        length, drafts = int(proposal.match_len_S[0]), proposal.token_id_SK[0, : proposal.count_S[0]].tolist()
        found = [*text[-length:], *drafts]
        if length and longest_match(text, text)[0] < length:
            assert any(found == o[i : i + len(found)] for o in outputs for i in range(len(o)))
            num_found += 1
    assert num_found > 100


def test_a_table_that_is_far_too_small_forgets_and_never_fails() -> None:
    rng = np.random.default_rng(0)
    table = SlotTable(4, 200, KVPages(4, 0))
    proposer = Literal(table, 3, max_entries=16, corpus_tokens=16)
    assert len(new_table(16)) == len(new_table(9)) == 16
    slots = np.array([admit(table, proposer, n, rng.integers(0, 3, 150).tolist()) for n in range(4)])
    matches = 0
    for _ in range(30):
        proposal = proposer.propose(slots)
        for s, slot in enumerate(slots.tolist()):
            text = table.token_ids[slot, : table.num_known[slot]].tolist()
            length = int(proposal.match_len_S[s])
            matches += length > 0
            found = text[len(text) - length :] + proposal.token_id_SK[s, : proposal.count_S[s]].tolist()
            assert length == 0 or any(found[: length + 1] == text[i : i + length + 1] for i in range(len(text)))
            append(table, slot, rng.integers(0, 3, 1).tolist())
    assert matches > 0


def test_a_batch_that_was_not_looked_up_before_is_known_at_once() -> None:
    """Drafts from half of a text are worse than none until the rest is indexed."""
    rng, num = np.random.default_rng(0), 64
    table = SlotTable(num, 200, KVPages(4, 0))
    proposer = Literal(table, 3)
    texts = [rng.permutation(90).tolist() for _ in range(num)]
    slots = np.array([admit(table, proposer, n, [*text, *text[40:50]]) for n, text in enumerate(texts)])
    proposal = proposer.propose(slots)
    assert (proposal.match_len_S >= 4).all()
    assert proposal.token_id_SK.tolist() == [text[50:53] for text in texts]
