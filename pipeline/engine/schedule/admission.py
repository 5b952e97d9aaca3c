"""Waiting sequences, and the decision which of them may run. No torch.

A sequence is admitted if the KV blocks that it and the running ones are expected to hold together exist at every moment
until the last of them ends. Sequences do not end at the same time: those that end early release their blocks before the
others have reached their full length, so together they never hold the sum of their final sizes.

Outputs are often far shorter than allowed: if a job allows 512 tokens and uses 40, reserving the limit would run a
tenth of the sequences that fit. So a sequence is expected to generate the 75th percentile of the last outputs, capped
at its limit. If sequences generate more, the scheduler preempts.

A sequence whose prefix another one is computing right now waits for it, and then shares its blocks.

The past-future scheduler (Gong et al., ASPLOS 2025) admits requests by such a forecast. It samples each length from
those of finished requests; here one percentile of them is used.

Suffixes: S sequences, K sequences by their end, the last one first, H finished sequences.
"""

from collections import deque
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.held_prompts import HeldPrompts
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.engine.schedule.state_snapshots import StateSnapshots
from pipeline.engine.stats import EngineStats
from pipeline.roofline.kv_pages import KVPages

HISTORY = 1024  # last finished sequences from which lengths are predicted
PERCENTILE = 75  # of their lengths, predicted for new sequences
MAX_DEFERRED = 64  # waiting sequences skipped because their prefix is being computed right now


class Admission:
    """Admission of one scheduler. Owns the waiting queue, oldest first, and the lengths of finished outputs."""

    min_history = 16  # finished sequences before lengths are predicted

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        stats: EngineStats,
        enable_prefix_caching: bool,
        held: HeldPrompts,
        snapshots: StateSnapshots,
    ) -> None:
        self._table, self._pool, self._stats, self._held, self._snapshots = table, pool, stats, held, snapshots
        self._enable_prefix_caching = enable_prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.expected_output: int | None = None  # expected generated tokens of a sequence; None: its limit
        self._length_H = np.zeros(HISTORY, dtype=np.int64)  # ring of the last finished outputs' lengths
        self._num_finished = 0
        self._has_changed = False

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again, ordered by age."""
        index = 0
        while index < len(self.waiting) and self.waiting[index].order < sequence.order:
            index += 1
        self.waiting.insert(index, sequence)

    def finished(self, slots: list[int]) -> None:
        """Record the output lengths of the sequences in these slots, which have finished."""
        slots = [slot for slot in slots if self._table.generates[slot]]
        index_N = np.arange(self._num_finished, self._num_finished + len(slots)) % HISTORY
        self._length_H[index_N] = self._table.num_known[slots] - self._table.num_prompt[slots]
        self._num_finished += len(slots)
        self._has_changed = self._has_changed or bool(slots)

    def forget_lengths(self) -> None:
        """Clear the output-length history."""
        self._num_finished, self.expected_output, self._has_changed = 0, None, False

    def admit(self, budget: int, running: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Give waiting sequences slots and blocks, oldest first. Return the slots, their start positions and token
        counts in this step, together at most `budget` tokens."""
        slots: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        pool, pages, size = self._pool, self._table.pages, self._pool.block_size
        self._update_expected_output()
        in_progress = self._hashes_in_progress(running)
        demand, room = self.demand(running), pool.num_free - self.spare_blocks()
        deferred: list[Sequence] = []
        while self.waiting and budget > 0 and self._table.num_free_slots and len(deferred) < MAX_DEFERRED:
            sequence = self.waiting.popleft()
            hits, being_computed = self._prefix(sequence, in_progress)
            if being_computed:
                deferred.append(sequence)
                continue
            is_alone = not len(running) and not slots
            known, start = len(sequence.token_ids), len(hits.pages) * size
            shared = self._end_of_shared(sequence, start)
            free_hits, end = pool.num_free_of(hits.all), self._likely_end(sequence)
            held = len(hits.all) - free_hits
            if hits.window_pages:  # own ones will take the place of those that it no longer sees
                held = max(held - min(pages.first_seen(end) - pages.first_seen(start), len(hits.window_pages)), 0)
            with_sequence = demand.add(known, end, held)
            count = min((shared or self._table.end_of_chunk(sequence)) - start, budget)
            num_new = pages.num_new(start, count)
            if pages.window is not None:
                while sum(num_new) + free_hits > pool.num_free and count > (1 if is_alone else pages.block_size):
                    count //= 2
                    num_new = pages.num_new(start, count)
            if not is_alone and (with_sequence.peak > room or sum(num_new) + free_hits > pool.num_free):
                self.waiting.appendleft(sequence)
                break
            pool.share(hits.all)
            if pages.window is not None:
                self._held.hold_window([])
            if sequence.request.is_follow_up:
                self._held.continued(hits.all)
            new, window_new = (pool.allocate(num) for num in num_new)
            slots.append(self._table.occupy(sequence, hits.pages + new, start, hits.window_pages + window_new))
            if self._table.has_states:
                self._table.set_cut(slots[-1], shared)
                if start:
                    self._snapshots.restore(sequence.hashes[len(hits.pages) - 1], slots[-1])
            starts.append(start)
            counts.append(count)
            if sequence.num_cached < 0:  # not admitted before
                sequence.num_cached = min(start, sequence.num_prompt)
                if not sequence.is_compared:
                    self._stats.cached_tokens += sequence.num_cached
                    self._stats.prompt_tokens += sequence.num_cached
            demand = with_sequence
            in_progress.update(self._being_computed(slots[-1], len(hits.pages)))
            budget -= count
        self.waiting.extendleft(reversed(deferred))
        return slots, starts, counts

    def _prefix(self, sequence: Sequence, in_progress: set[bytes]) -> tuple["_Hits", bool]:
        """Return the known pages of its prefix, and whether another sequence is computing the one after them."""
        if not self._enable_prefix_caching:
            return _Hits([], []), False
        hits, usable = self._hits(sequence), sequence.num_shareable // self._pool.block_size
        found = len(hits.pages)
        if self._table.has_states:
            return hits, not in_progress.isdisjoint(sequence.hashes[found:usable])
        return hits, found < usable and sequence.hashes[found] in in_progress

    def _hits(self, sequence: Sequence) -> "_Hits":
        """Return the known pages of its prefix."""
        size = self._pool.block_size
        usable = sequence.num_shareable // size
        sequence.extend_hashes(sequence.token_ids, usable, size)
        found, window_found = self._pool.find(sequence.hashes[:usable]), []
        if self._table.pages.window is not None:
            num_found, window_found = self._pool.find_window(sequence.hashes[: len(found)], self._table.pages)
            found = found[:num_found]
        if self._table.has_states:
            found = found[: self._snapshots.longest(sequence.hashes[: len(found)])]
        return _Hits(found, window_found)

    def hold_next_window(self) -> None:
        """Hold the pages that the next waiting sequence sees after its known prefix in layers with a window, before
        running sequences release them."""
        has_next = self.waiting and self._enable_prefix_caching
        self._held.hold_window(self._hits(self.waiting[0]).window_pages if has_next else [])

    def _end_of_shared(self, sequence: Sequence, start: int) -> int | None:
        """Return the end of the pages that the next waiting sequence also begins with, if there are any after `start`
        and there are states to copy there."""
        if not (self._table.has_states and self._enable_prefix_caching and self.waiting):
            return None
        size, following = self._pool.block_size, self.waiting[0]
        usable = min(sequence.num_shareable, following.num_shareable) // size
        following.extend_hashes(following.token_ids, usable, size)
        pairs = zip(sequence.hashes[:usable], following.hashes)
        end = size * sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return end if end > start else None

    def _being_computed(self, slot: int, num_computed: int) -> list[bytes]:
        """Return the hashes of the pages after the computed ones that others can share once they are computed."""
        table, hashes = self._table, self._table.at(slot).hashes
        if not table.has_states:
            return hashes[num_computed:]
        return [hashes[end - 1]] if (end := self.end_of_snapshot(slot)) > num_computed else []

    def end_of_snapshot(self, slot: int) -> int:
        """Return the number of pages at which the sequence's states will be copied; 0: nowhere."""
        cut, size = int(self._table.cut[slot]), self._pool.block_size
        known = len(self._table.at(slot).hashes)
        return cut // size if cut % size == 0 and cut // size <= known else 0

    def _hashes_in_progress(self, running: np.ndarray) -> set[bytes]:
        """Return the hashes of prompt blocks that running sequences have not computed yet."""
        hashes: set[bytes] = set()
        if self._enable_prefix_caching:
            table, size = self._table, self._pool.block_size
            prefilling = running[table.num_known[running] - table.num_computed[running] > 1]
            for slot, computed in zip(prefilling.tolist(), table.num_computed[prefilling].tolist()):
                hashes.update(self._being_computed(slot, computed // size))
        return hashes

    def _update_expected_output(self) -> None:
        if self._has_changed and self._num_finished >= self.min_history:
            length_H = self._length_H[: self._num_finished]
            rank = len(length_H) * PERCENTILE // 100
            self.expected_output = int(np.partition(length_H, rank)[rank])
            self._has_changed = False

    def spare_blocks(self) -> float:
        """Number of blocks kept free for sequences that generate more than expected: one expected output. The fewer
        sequences run, the less short outputs make up for long ones, and the larger this share of the cache is."""
        expected, pages = self.expected_output or 0, self._table.pages
        in_window = 0 if pages.window is None else min(expected, pages.window)
        return expected / pages.page_size + in_window / pages.block_size

    def demand(self, slot_S: np.ndarray) -> "BlockDemand":
        """Forecast the blocks that the sequences in these slots will need in addition to those they hold. A prefix that
        others share counts as freed when the sequence that computed it ends."""
        table, known_S = self._table, self._table.num_known[slot_S]
        held_S = table.num_pages[slot_S] + table.window_end[slot_S] - table.window_begin[slot_S]
        end_S = self.likely_ends(table.num_prompt[slot_S], known_S, table.limit[slot_S])
        freed_S = held_S - table.num_shared_pages[slot_S]
        return BlockDemand.from_sequences(table.pages, known_S, end_S, held_S, freed_S)

    def _likely_end(self, sequence: Sequence) -> int:
        prompt, known, limit = sequence.num_prompt, len(sequence.token_ids), self._table.limit_of(sequence)
        return int(self.likely_ends(*np.array([[prompt], [known], [limit]]))[0])

    def likely_ends(self, prompt_S: np.ndarray, known_S: np.ndarray, limit_S: np.ndarray) -> np.ndarray:
        """Return the expected final number of tokens of each sequence: the prompt plus the expected output, or one more
        block if it has that already, and never more than its limit."""
        if self.expected_output is None:
            return limit_S
        return np.minimum(limit_S, np.maximum(prompt_S + self.expected_output, known_S + self._pool.block_size))


class _Hits(NamedTuple):
    """Pages of a known prefix: of layers that keep all tokens, and those that its next query sees in the others."""

    pages: list[int]
    window_pages: list[int]

    @property
    def all(self) -> list[int]:
        return self.window_pages + self.pages if self.window_pages else self.pages


@dataclass(frozen=True)
class BlockDemand:
    """Blocks that the running and the added sequences will hold if they end as expected, all in addition to those held
    now. Each sequence grows by a token a step, so only the moments just before an end count.

    A sequence's last block is half full on average, so half a block of each counts as empty, and numbers are floats.
    """

    pages: KVPages
    remaining_K: np.ndarray  # tokens of each until it ends, in descending order
    rate_K: np.ndarray  # blocks that k and those before it in K take in a step
    blocks_K: np.ndarray  # held just before the end of k by k and those before it in K, when the others have ended
    num_gone: int  # blocks that are free when all have ended

    @classmethod
    def from_sequences(
        cls, pages: KVPages, known_S: np.ndarray, end_S: np.ndarray, held_S: np.ndarray, freed_S: np.ndarray
    ) -> "BlockDemand":
        """Build the forecast. known_S and end_S: current and final tokens of each; an end in the past counts as the
        next step. held_S: current blocks of each. freed_S: how many of them are free after its end; others may hold
        the rest."""
        remaining_S, num_gone = np.maximum(end_S - known_S, 1), int(freed_S.sum())
        last_first = np.argsort(-remaining_S)
        remaining_K = remaining_S[last_first]
        num_S, rate_S = pages.growth(known_S, end_S)
        rate_K = np.cumsum(rate_S[last_first])
        running_K = np.cumsum((num_S - held_S)[last_first]) + rate_K * remaining_K
        return cls(pages, remaining_K, rate_K, running_K - num_gone + np.cumsum(freed_S[last_first]), num_gone)

    def add(self, known: int, end: int, held: int) -> "BlockDemand":
        """Return the forecast with one more sequence. held: those of its blocks that others hold already."""
        remaining_K, rate_K, blocks_K = self.remaining_K, self.rate_K, self.blocks_K
        num, rate = self.pages.growth_of(known, end)
        remaining, own = max(end - known, 1), num - held
        index = int((-remaining_K).searchsorted(-remaining, side="right"))
        # Blocks of the sequences that end later, when they have grown by this one's remaining tokens.
        rate_before = rate_K[index - 1] if index else 0.0
        later = blocks_K[index - 1] - rate_before * (remaining_K[index - 1] - remaining) if index else -self.num_gone
        after_K = remaining_K[index:]
        return BlockDemand(
            self.pages,
            np.concatenate([remaining_K[:index], [remaining], after_K]),
            np.concatenate([rate_K[:index], [rate_before + rate], rate_K[index:] + rate]),
            np.concatenate(
                [blocks_K[:index], [later + remaining * rate + own], blocks_K[index:] + after_K * rate + own]
            ),
            self.num_gone,
        )

    @property
    def peak(self) -> float:
        """Maximum number of blocks at once in addition to those held now. Needs at least one sequence. If several end
        in one step it may be some half blocks too high."""
        return float(self.blocks_K.max())
