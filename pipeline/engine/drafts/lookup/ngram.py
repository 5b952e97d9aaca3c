"""Drafts by looking up: what followed the last few tokens when they occurred before.

Formulaic, extractive and repetitive texts say the same again. The longest run of tokens that ends a sequence is looked
for in its own prompt and output, and in the outputs that finished before it; of equally long ones the last occurrence
counts, the sequence's own before another's (prompt lookup: Saxena 2023; suffix decoding: Oliaro et al. 2024, arXiv
2411.04975). All sequences are looked up at once: by a compiled pass where there is one, else by some array operations.

Where finished outputs are alike apart from what they copy out of their prompts, what the output's own prompt says is
drafted in the place of that (copy_patterns.py).

Shapes: S sequences, N places in their texts, M tokens of a run, K most drafts of one.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from pipeline.engine.drafts.lookup.compiled import CompiledLookup
from pipeline.engine.drafts.lookup.copy_patterns import CopyPatterns
from pipeline.engine.drafts.lookup.corpus import FinishedOutputs
from pipeline.engine.drafts.lookup.suffix_index import MIN_MATCH, SuffixIndex, tails
from pipeline.engine.drafts.policy import Offer
from pipeline.engine.drafts.proposer import Drafts
from pipeline.engine.forward.in_flight import StepInFlight
from pipeline.engine.schedule.sequence import SlotTable

MAX_ENTRIES = 1 << 22  # of the sequences' own runs: 16 MiB
CORPUS_TOKENS = 1 << 18  # of finished outputs: 1 MiB, and 8 MiB for their runs
INDEXED_PER_CALL = 8192  # tokens, some milliseconds: long prompts are indexed over several steps
LEARNT_PER_CALL = 8  # rows that have finished, some 10 us each
LEARNT_TOKENS = 8192  # of a prompt that copies are looked for in: its first ones
MOST_UNLEARNT = 32  # of them that wait for it while nobody asks for drafts: the last ones


class NgramProposer:
    """Implements `Proposer` over the tokens in `table`, with at most `max_draft_tokens` for one sequence.

    compiled: what looks up in a tenth of the time, and finds copy patterns; None: numpy, and no patterns.
    """

    name = "ngram"

    def __init__(
        self,
        table: SlotTable,
        max_draft_tokens: int,
        max_entries: int = MAX_ENTRIES,
        corpus_tokens: int = CORPUS_TOKENS,
        compiled: CompiledLookup | None = None,
    ) -> None:
        assert max_draft_tokens >= 1
        self.table, self.max_draft_tokens = table, max_draft_tokens
        self.finished = FinishedOutputs(corpus_tokens, None if compiled is None else compiled.index_runs)
        self._patterns = None if compiled is None else CopyPatterns(compiled, table, self.finished)
        self._unlearnt: deque[tuple[np.ndarray, int]] = deque(maxlen=MOST_UNLEARNT)  # rows' tokens, those of the prompt
        self.index = SuffixIndex(min(32 * table.token_ids.size, max_entries))
        self._tokens = table.token_ids.reshape(-1)  # a view: slot s begins at s * width
        self._width = table.token_ids.shape[1]
        self._num_indexed = np.zeros(table.num_slots, dtype=np.int64)  # runs that end at or before this place are in
        self._draft_K = np.arange(max_draft_tokens)
        self._compiled = compiled
        self._look_up = None if compiled is None else compiled.look_up

    def warm_up(self) -> None:
        """Have compiled code loaded, or compiled, before the first step: on tables of nobody's."""
        other = NgramProposer(SlotTable(1, 16, 4), self.max_draft_tokens, 16, 16, self._compiled)
        other._unlearnt.append((np.zeros(8, dtype=np.int32), 4))
        other.offer(np.zeros(0, dtype=np.int64))

    def admitted(self, slot: int) -> None:
        self._num_indexed[slot] = MIN_MATCH - 1
        if self._patterns is not None:
            self._patterns.admitted(slot)

    def left(self, slot: int, finished: bool) -> None:
        if finished:
            table = self.table
            num_prompt, tokens = int(table.num_prompt[slot]), table.token_ids[slot, : table.num_known[slot]]
            if num_prompt > LEARNT_TOKENS:
                tokens = np.concatenate((tokens[:LEARNT_TOKENS], tokens[num_prompt:]))
                num_prompt = LEARNT_TOKENS
            self._unlearnt.append((tokens.copy(), num_prompt))

    def looked_at(self, slot_S: np.ndarray) -> np.ndarray:
        return self._num_indexed[slot_S] + 1

    def offer(self, slot_S: np.ndarray, flight: StepInFlight | None = None) -> Offer:
        return self.offer_at(slot_S, self.table.num_known[slot_S])

    def offer_at(self, slot_S: np.ndarray, known_S: np.ndarray) -> Offer:
        self._learn()
        most_new = max(INDEXED_PER_CALL // max(len(slot_S), 1), 2 * (self.max_draft_tokens + 1))
        offer = self._matches(slot_S, known_S, most_new)
        if self._patterns is not None:
            self._patterns.exchange(offer, known_S, most_new)
        return offer

    def draft(self, offer: Offer, count_S: np.ndarray, flight: StepInFlight | None = None) -> Drafts:
        return Drafts(offer.token_id_SK)

    def follows(self, flight: StepInFlight) -> bool:
        return False  # it looks up the very tokens

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
            place = self.finished.add(output)
            if place and len(output) <= self.finished.most_tokens and self._patterns is not None:
                self._patterns.learn(tokens, num_prompt, place)

    def _matches(self, slot_S: np.ndarray, known_S: np.ndarray, most_new: int) -> Offer:
        """What followed when the longest run of last tokens occurred before."""
        begin_S = slot_S * self._width
        if self._look_up is not None:
            return self._compiled_offer(self._look_up, slot_S, known_S, begin_S, most_new)
        tail_SM, key_SL = self._catch_up(slot_S, known_S, begin_S, most_new)
        end_S, match_S = self.index.find(key_SL, tail_SM, self._tokens, begin_S, known_S)
        # The text since then repeats itself if the match goes on: so drafts may run into each other, as in LZ77.
        place_SK = end_S[:, None] + self._draft_K % (known_S - end_S)[:, None]
        token_SK = self._tokens.take(begin_S[:, None] + place_SK)
        count_S = np.where(match_S > 0, self.max_draft_tokens, 0)
        if not self.finished.is_empty:
            other_end_S, other_match_S = self.finished.find(tail_SM)
            other_SK, other_count_S = self.finished.after(other_end_S, self.max_draft_tokens)
            is_better_S = (other_match_S > match_S) & (other_count_S > 0)
            token_SK = np.where(is_better_S[:, None], other_SK, token_SK)
            count_S = np.where(is_better_S, other_count_S, count_S)
            match_S = np.where(is_better_S, other_match_S, match_S)
        return Offer(slot_S, count_S, match_S, token_SK.astype(np.int64))

    def _compiled_offer(
        self, look_up: Callable[..., None], slot_S: np.ndarray, known_S: np.ndarray, begin_S: np.ndarray, most_new: int
    ) -> Offer:
        count_S, match_S = np.empty_like(slot_S), np.empty_like(slot_S)
        token_SK = np.empty((len(slot_S), self.max_draft_tokens), dtype=np.int64)
        indexed_S, order_S = self._num_indexed[slot_S], self.table.order[slot_S]
        finished, own = self.finished, self.index
        look_up(
            *(self._tokens, begin_S, known_S, indexed_S, order_S, own.end_E),
            *(finished.tokens, finished.index.end_E, most_new),
            *(token_SK, count_S, match_S),
        )
        self._num_indexed[slot_S] = np.minimum(np.maximum(known_S - 1, indexed_S), indexed_S + most_new)
        return Offer(slot_S, count_S, match_S, token_SK)

    def _catch_up(
        self, slot_S: np.ndarray, known_S: np.ndarray, begin_S: np.ndarray, most_new: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Index at most `most_new` runs of each sequence that became known, and return the last tokens of each and
        their keys.

        The run at the very end is left for later: nothing follows it yet.
        """
        indexed_S = self._num_indexed[slot_S]
        count_S = np.clip(known_S - 1 - indexed_S, 0, most_new)
        num_new = int(count_S.sum())
        sequence_N = np.arange(len(slot_S))
        end_N = known_S
        if num_new:
            new_N = np.repeat(sequence_N, count_S)
            offset_N = np.arange(num_new) - np.repeat(np.cumsum(count_S) - count_S, count_S)
            end_N = np.concatenate([indexed_S[new_N] + 1 + offset_N, known_S])
            sequence_N = np.concatenate([new_N, sequence_N])
        tail_NM = tails(self._tokens, begin_S[sequence_N], end_N)
        key_NL = self.index.keys(tail_NM, self.table.order[slot_S][sequence_N])
        if num_new:
            self.index.insert(key_NL[:num_new], end_N[:num_new])
            self._num_indexed[slot_S] = indexed_S + count_S
        return tail_NM[num_new:], key_NL[num_new:]
