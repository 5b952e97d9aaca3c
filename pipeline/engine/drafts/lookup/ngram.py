"""Drafts by looking up: what followed the last few tokens when they occurred before.

Formulaic, extractive and repetitive texts say the same again. The longest run of tokens that ends a sequence is looked
for in its own prompt and output, and in the outputs that finished before it; of equally long ones the last occurrence
counts, the sequence's own before another's (prompt lookup: Saxena 2023; suffix decoding: Oliaro et al. 2024, arXiv
2411.04975). All sequences are looked up at once, by a compiled pass.

Where finished outputs are alike apart from what they copy out of their prompts, what the output's own prompt says is
drafted in the place of that (copy_patterns.py).

Shapes: S sequences, N places in their texts, M tokens of a run, K most drafts of one.
"""

from collections import deque

import numpy as np

from pipeline.engine.drafts.lookup.compiled_lookup import MIN_MATCH, look_up, new_table
from pipeline.engine.drafts.lookup.copy_patterns import CopyPatterns
from pipeline.engine.drafts.lookup.finished_outputs import FinishedOutputs
from pipeline.engine.drafts.policy import Offer
from pipeline.engine.drafts.proposer import Drafts
from pipeline.engine.schedule.sequence import SlotTable

MAX_ENTRIES = 1 << 22  # of the sequences' own runs: 16 MiB
CORPUS_TOKENS = 1 << 18  # of finished outputs: 1 MiB, and 8 MiB for their runs
INDEXED_PER_CALL = 8192  # tokens, some milliseconds: long prompts are indexed over several steps
LEARNT_PER_CALL = 8  # rows that have finished, some 10 us each
LEARNT_TOKENS = 8192  # of a prompt that copies are looked for in: its first ones
MOST_UNLEARNT = 32  # of them that wait for it while nobody asks for drafts: the last ones


class NgramProposer:
    """Implements `Proposer` over the tokens in `table`, with at most `max_draft_tokens` for one sequence."""

    def __init__(
        self,
        table: SlotTable,
        max_draft_tokens: int,
        max_entries: int = MAX_ENTRIES,
        corpus_tokens: int = CORPUS_TOKENS,
    ) -> None:
        assert max_draft_tokens >= 1
        self.table, self.max_draft_tokens = table, max_draft_tokens
        self._finished = FinishedOutputs(corpus_tokens)
        self._patterns = CopyPatterns(table, self._finished)
        self._unlearnt: deque[tuple[np.ndarray, int]] = deque(maxlen=MOST_UNLEARNT)  # rows' tokens, those of the prompt
        self._end_E = new_table(min(32 * table.token_ids.size, max_entries))
        self._tokens = table.token_ids.reshape(-1)  # a view: slot s begins at s * width
        self._width = table.token_ids.shape[1]
        self._num_indexed = np.zeros(table.num_slots, dtype=np.int64)  # runs that end at or before this place are in

    def warm_up(self) -> None:
        """Have compiled code loaded, or compiled, before the first step: on tables of its own."""
        other = NgramProposer(SlotTable(1, 16, 4), self.max_draft_tokens, 16, 16)
        other._unlearnt.append((np.zeros(8, dtype=np.int32), 4))
        other.offer(np.zeros(0, dtype=np.int64))

    def admitted(self, slot: int) -> None:
        self._num_indexed[slot] = MIN_MATCH - 1
        self._patterns.admitted(slot)

    def left(self, slot: int, finished: bool) -> None:
        if finished:
            table = self.table
            num_prompt, tokens = int(table.num_prompt[slot]), table.token_ids[slot, : table.num_known[slot]]
            if num_prompt > LEARNT_TOKENS:
                tokens = np.concatenate((tokens[:LEARNT_TOKENS], tokens[num_prompt:]))
                num_prompt = LEARNT_TOKENS
            self._unlearnt.append((tokens.copy(), num_prompt))

    def offer(self, slot_S: np.ndarray) -> Offer:
        self._learn()
        known_S = self.table.num_known[slot_S]
        most_new = max(INDEXED_PER_CALL // max(len(slot_S), 1), 2 * (self.max_draft_tokens + 1))
        offer = self._matches(slot_S, known_S, most_new)
        self._patterns.exchange(offer, known_S, most_new)
        return offer

    def draft(self, offer: Offer, count_S: np.ndarray) -> Drafts:
        return Drafts(offer.token_id_SK)

    def undone(self, slot_S: np.ndarray) -> None:
        pass

    def settled(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        pass

    def _learn(self) -> None:
        """From rows that finished since, the last ones first. Not when they finish: steps without drafts, all of them
        in a large batch, need nothing of it."""
        for _ in range(min(len(self._unlearnt), LEARNT_PER_CALL)):
            tokens, num_prompt = self._unlearnt.pop()
            output = tokens[num_prompt:]
            place = self._finished.add(output)
            if place and len(output) <= self._finished.most_tokens:
                self._patterns.learn(tokens, num_prompt, place)

    def _matches(self, slot_S: np.ndarray, known_S: np.ndarray, most_new: int) -> Offer:
        """What followed when the longest run of last tokens occurred before."""
        count_S, match_S = np.empty_like(slot_S), np.empty_like(slot_S)
        token_SK = np.empty((len(slot_S), self.max_draft_tokens), dtype=np.int64)
        indexed_S, order_S = self._num_indexed[slot_S], self.table.order[slot_S]
        look_up(
            *(self._tokens, slot_S * self._width, known_S, indexed_S, order_S, self._end_E),
            *(self._finished.tokens, self._finished.end_E, most_new),
            *(token_SK, count_S, match_S),
        )
        self._num_indexed[slot_S] = np.minimum(np.maximum(known_S - 1, indexed_S), indexed_S + most_new)
        return Offer(slot_S, count_S, match_S, token_SK)
