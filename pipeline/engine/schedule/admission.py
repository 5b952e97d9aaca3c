"""Waiting sequences, and which of them may run. No torch.

A sequence is admitted when the KV blocks that it and the running ones are expected to hold together are there at every
moment until the last of them ends. Sequences do not end at the same time: those that end early give their blocks back
before the others have grown to their full length, so all together never hold the sum of what each holds in the end.

What may be generated is often far more than what is: a job that allows 512 tokens and uses 40 would hold a tenth of the
sequences that fit. So a sequence is expected to generate what three in four of the last ones did, and at most what it
may. Where sequences generate more, the scheduler preempts.

A sequence whose prefix another one is computing right now waits for it, and shares its blocks then.

The past-future scheduler (Gong et al., ASPLOS 2025) admits requests by such a forecast. It samples each length from
those of finished requests, where one percentile of them is taken here.

Suffixes: S sequences, K sequences by their end, the last one first, H finished sequences.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.sequence import Sequence, SlotTable
from pipeline.engine.stats import EngineStats

HISTORY = 1024  # sequences that finished last, by which others' lengths are predicted
PERCENTILE = 75  # of their lengths, which is expected of others
MAX_DEFERRED = 64  # waiting sequences looked past because their prefix is being computed right now


class Admission:
    """Of one scheduler. Owns the waiting queue, oldest first, and the lengths of finished outputs."""

    min_history = 16  # finished sequences before their lengths predict others'

    def __init__(self, table: SlotTable, pool: BlockPool, stats: EngineStats, enable_prefix_caching: bool) -> None:
        self._table, self._pool, self._stats = table, pool, stats
        self._enable_prefix_caching = enable_prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.expected_output: int | None = None  # generated tokens expected of a sequence; None: all that it may
        self._length_H = np.zeros(HISTORY, dtype=np.int64)  # generated tokens of those that finished last, a ring
        self._num_finished = 0
        self._has_changed = False

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that was preempted at the place of its age."""
        at = 0
        while at < len(self.waiting) and self.waiting[at].order < sequence.order:
            at += 1
        self.waiting.insert(at, sequence)

    def finished(self, slots: list[int]) -> None:
        """The sequences in these slots came to their end."""
        slots = [slot for slot in slots if self._table.generates[slot]]
        place_N = np.arange(self._num_finished, self._num_finished + len(slots)) % HISTORY
        self._length_H[place_N] = self._table.num_known[slots] - self._table.num_prompt[slots]
        self._num_finished += len(slots)
        self._has_changed = self._has_changed or bool(slots)

    def forget_lengths(self) -> None:
        """Expect nothing of coming sequences from those that finished so far."""
        self._num_finished, self.expected_output, self._has_changed = 0, None, False

    def admit(self, budget: int, running: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        """Give waiting sequences slots and blocks, oldest first. The slots, the positions from which they compute in
        this step, and how many tokens, at most `budget` in all."""
        slots: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        pool, size = self._pool, self._pool.block_size
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
            num_held = len(hits) - pool.num_free_of(hits)
            start = len(hits) * size
            count = min(len(sequence.token_ids) - start, budget)
            num_blocks = -(-(start + count) // size)
            with_it = demand.add(len(sequence.token_ids), self._likely_end(sequence), num_held)
            if (len(running) or slots) and (with_it.peak > room or num_blocks - num_held > pool.num_free):
                self.waiting.appendleft(sequence)
                break
            pool.share(hits)
            slots.append(self._table.occupy(sequence, hits + pool.allocate(num_blocks - len(hits)), start))
            starts.append(start)
            counts.append(count)
            if sequence.num_cached < 0:  # not admitted before
                sequence.num_cached = min(start, sequence.num_prompt)
                if not sequence.is_compared:
                    self._stats.cached_tokens += sequence.num_cached
                    self._stats.prompt_tokens += sequence.num_cached
            demand = with_it
            in_progress.update(sequence.hashes[len(hits) :])
            budget -= count
        self.waiting.extendleft(reversed(deferred))
        return slots, starts, counts

    def _prefix(self, sequence: Sequence, in_progress: set[bytes]) -> tuple[list[int], bool]:
        """Known blocks of its prefix, and whether the block after them is being computed by another sequence."""
        if not self._enable_prefix_caching:
            return [], False
        size = self._pool.block_size
        usable = sequence.num_shareable // size
        sequence.extend_hashes(sequence.token_ids, usable, size)
        hits = self._pool.find(sequence.hashes[:usable])
        return hits, len(hits) < usable and sequence.hashes[len(hits)] in in_progress

    def _hashes_in_progress(self, running: np.ndarray) -> set[bytes]:
        """Hashes of prompt blocks that running sequences still have to compute."""
        hashes: set[bytes] = set()
        if self._enable_prefix_caching:
            table, size = self._table, self._pool.block_size
            prefilling = running[table.num_known[running] - table.num_computed[running] > 1]
            for slot, computed in zip(prefilling.tolist(), table.num_computed[prefilling].tolist()):
                hashes.update(table.at(slot).hashes[computed // size :])
        return hashes

    def _update_expected_output(self) -> None:
        if self._has_changed and self._num_finished >= self.min_history:
            length_H = self._length_H[: self._num_finished]
            rank = len(length_H) * PERCENTILE // 100
            self.expected_output = int(np.partition(length_H, rank)[rank])
            self._has_changed = False

    def spare_blocks(self) -> float:
        """Left free for sequences that generate more than is expected: one expected output. The fewer sequences run,
        the less do short outputs make up for long ones, and the larger a part of the cache this is."""
        return (self.expected_output or 0) / self._pool.block_size

    def demand(self, slot_S: np.ndarray) -> "BlockDemand":
        """What the sequences in these slots are expected to need beside the blocks that they hold. A prefix that others
        share counts as freed when the one that computed it ends."""
        table = self._table
        known_S, held_S = table.num_known[slot_S], table.num_blocks[slot_S]
        end_S = self.likely_ends(table.num_prompt[slot_S], known_S, table.limit[slot_S])
        return BlockDemand.of(known_S, end_S, held_S, held_S - table.num_found[slot_S], self._pool.block_size)

    def _likely_end(self, sequence: Sequence) -> int:
        prompt, known, limit = sequence.num_prompt, len(sequence.token_ids), self._table.limit_of(sequence)
        return int(self.likely_ends(*np.array([[prompt], [known], [limit]]))[0])

    def likely_ends(self, prompt_S: np.ndarray, known_S: np.ndarray, limit_S: np.ndarray) -> np.ndarray:
        """Tokens that sequences are expected to have in the end: what is likely of their output, a block more where
        they have that already, and never more than they may have."""
        if self.expected_output is None:
            return limit_S
        return np.minimum(limit_S, np.maximum(prompt_S + self.expected_output, known_S + self._pool.block_size))


@dataclass(frozen=True)
class BlockDemand:
    """Blocks that the running sequences, and those added, will hold if they end as expected. All numbers are beside
    what is held now. Each grows by a token a step, so only the moments just before an end count.

    A sequence's last block is half full on average, so half a block of each counts as empty, and numbers are floats.
    """

    block_size: int
    remaining_K: np.ndarray  # tokens of each until it ends, falling
    blocks_K: np.ndarray  # that k and those before it in K hold just before the end of k, when the others are gone
    num_gone: int  # blocks that are free when all have ended

    @classmethod
    def of(
        cls, known_S: np.ndarray, end_S: np.ndarray, held_S: np.ndarray, freed_S: np.ndarray, block_size: int
    ) -> "BlockDemand":
        """known_S and end_S: tokens of each, now and in the end; an end that is passed counts as the next step. held_S:
        blocks of each now. freed_S: those of them that are free when it has ended; others may hold the rest."""
        remaining_S, num_gone = np.maximum(end_S - known_S, 1), int(freed_S.sum())
        last_first = np.argsort(-remaining_S)
        remaining_K = remaining_S[last_first]
        grown_K = np.arange(1, len(remaining_K) + 1) * remaining_K / block_size
        running_K = np.cumsum((known_S / block_size + 0.5 - held_S)[last_first]) + grown_K
        return cls(block_size, remaining_K, running_K - num_gone + np.cumsum(freed_S[last_first]), num_gone)

    def add(self, known: int, end: int, held: int) -> "BlockDemand":
        """With one more sequence. held: of its blocks, those that others hold already."""
        size, remaining_K, blocks_K = self.block_size, self.remaining_K, self.blocks_K
        remaining, own = max(end - known, 1), known / self.block_size + 0.5 - held
        place = int((-remaining_K).searchsorted(-remaining, side="right"))
        # What those hold that end later, when they have grown by its remaining tokens and not yet by their own.
        beside = blocks_K[place - 1] - place * (remaining_K[place - 1] - remaining) / size if place else -self.num_gone
        after_K = remaining_K[place:]
        return BlockDemand(
            size,
            np.concatenate([remaining_K[:place], [remaining], after_K]),
            np.concatenate(
                [blocks_K[:place], [beside + remaining / size + own], blocks_K[place:] + after_K / size + own]
            ),
            self.num_gone,
        )

    @property
    def peak(self) -> float:
        """The most blocks at once, beside those held now. At least one sequence. Where several end in one step it may
        be some half blocks too high."""
        return float(self.blocks_K.max())
