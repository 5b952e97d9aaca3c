"""Lookup drafts: the tokens that followed the last few tokens when they occurred before.

Formulaic, extractive and repetitive texts repeat themselves. The longest run of tokens that ends a sequence is searched
in its own prompt and output, and in previously finished outputs; of equally long ones the last occurrence counts, the
sequence's own before another's (prompt lookup: Saxena 2023; suffix decoding: Oliaro et al. 2024, arXiv 2411.04975).
A compiled pass looks up all sequences at once.

If finished outputs are alike apart from what they copy out of their prompts, those parts are drafted from the output's
own prompt (copy_patterns.py).

Shapes: S sequences, N positions in their texts, M tokens of a run, K maximum drafts of one.
"""

from collections import deque

import numpy as np

from pipeline.engine.drafts.lookup.compiled_lookup import MIN_MATCH, look_up, new_table
from pipeline.engine.drafts.lookup.copy_patterns import CopyPatterns
from pipeline.engine.drafts.lookup.finished_outputs import FinishedOutputs
from pipeline.engine.drafts.policy import Proposal
from pipeline.engine.drafts.proposer import Drafts
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.roofline.kv_pages import KVPages

MAX_ENTRIES = 1 << 22  # of the sequences' own runs: 16 MiB
CORPUS_TOKENS = 1 << 18  # of finished outputs: 1 MiB, and 8 MiB for their runs
INDEXED_PER_CALL = 8192  # tokens, some milliseconds: long prompts are indexed over several steps
LEARNT_PER_CALL = 8  # finished rows, some 10 us each
LEARNT_TOKENS = 8192  # leading tokens of a prompt in which copies are searched
MAX_UNLEARNT = 32  # finished rows that are kept for learning while no drafts are requested: the last ones


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
        self._unlearnt: deque[tuple[np.ndarray, int]] = deque(maxlen=MAX_UNLEARNT)  # tokens of a row, prompt length
        self._end_E = new_table(min(32 * table.token_ids.size, max_entries))
        self._tokens = table.token_ids.reshape(-1)  # a view: slot s begins at s * width
        self._width = table.token_ids.shape[1]
        self._num_indexed = np.zeros(table.num_slots, dtype=np.int64)  # runs that end at or before this are indexed

    def warm_up(self) -> None:
        """Load or compile the numba code before the first step, with dummy tables."""
        other = NgramProposer(SlotTable(1, 16, KVPages(4, 0)), self.max_draft_tokens, 16, 16)
        other._unlearnt.append((np.zeros(8, dtype=np.int32), 4))
        other.propose(np.zeros(0, dtype=np.int64))

    def admitted(self, slot: int) -> None:
        self._num_indexed[slot] = MIN_MATCH - 1
        self._patterns.admitted(slot)

    def on_evicted(self, slot: int, finished: bool) -> None:
        if finished:
            table = self.table
            num_prompt, tokens = int(table.num_prompt[slot]), table.token_ids[slot, : table.num_known[slot]]
            if num_prompt > LEARNT_TOKENS:
                tokens = np.concatenate((tokens[:LEARNT_TOKENS], tokens[num_prompt:]))
                num_prompt = LEARNT_TOKENS
            self._unlearnt.append((tokens.copy(), num_prompt))

    def propose(self, slot_S: np.ndarray) -> Proposal:
        self._learn()
        known_S = self.table.num_known[slot_S]
        max_new = max(INDEXED_PER_CALL // max(len(slot_S), 1), 2 * (self.max_draft_tokens + 1))
        proposal = self._matches(slot_S, known_S, max_new)
        self._patterns.apply_patterns(proposal, known_S, max_new)
        return proposal

    def draft(self, proposal: Proposal, count_S: np.ndarray) -> Drafts:
        return Drafts(proposal.token_id_SK)

    def on_rollback(self, slot_S: np.ndarray) -> None:
        pass

    def on_verified(self, slot_S: np.ndarray, drafted_S: np.ndarray, accepted_S: np.ndarray) -> None:
        pass

    def _learn(self) -> None:
        """Learn from rows that finished since the last call, the last ones first. Not done when they finish, because
        steps without drafts, such as all steps of a large batch, do not need it."""
        for _ in range(min(len(self._unlearnt), LEARNT_PER_CALL)):
            tokens, num_prompt = self._unlearnt.pop()
            output = tokens[num_prompt:]
            begin = self._finished.add(output)
            if begin and len(output) <= self._finished.max_tokens:
                self._patterns.index_finished(tokens, num_prompt, begin)

    def _matches(self, slot_S: np.ndarray, known_S: np.ndarray, max_new: int) -> Proposal:
        """Return the tokens that followed the last occurrence of the longest matching run."""
        count_S, match_S = np.empty_like(slot_S), np.empty_like(slot_S)
        token_SK = np.empty((len(slot_S), self.max_draft_tokens), dtype=np.int64)
        indexed_S, order_S = self._num_indexed[slot_S], self.table.order[slot_S]
        look_up(
            *(self._tokens, slot_S * self._width, known_S, indexed_S, order_S, self._end_E),
            *(self._finished.tokens, self._finished.end_E, max_new),
            *(token_SK, count_S, match_S),
        )
        self._num_indexed[slot_S] = np.minimum(np.maximum(known_S - 1, indexed_S), indexed_S + max_new)
        return Proposal(slot_S, count_S, match_S, token_SK)
