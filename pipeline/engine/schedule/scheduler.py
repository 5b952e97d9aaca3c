"""Scheduler: decides which sequences compute which tokens next (chunked prefill, block allocation, preemption). No
torch.

Rules, in order: every running sequence that lacks one token computes it; the rest of the token budget goes to longer
remainders, oldest first; then waiting sequences are admitted (admission.py), on a GPU not in every step (pacing.py).
When blocks run out, the sequence that loses the least work is preempted and recomputed later. The oldest sequence is
never preempted, so one always advances; if it does not fit alone, it ends with an error.

A step that runs out of device memory is undone (`undo`) and the following ones are limited to half its tokens; every
`RECOVERY_STEPS` steps that fit double the limit. Under a limit the sequences take turns, longest waiting first, so a
sequence that fits in no step is soon alone in one. A sequence that skips a step keeps its KV blocks: the cache was
allocated at startup, and releasing them would free no memory.

Drafts come last: they use the remaining token budget and free blocks. They are written after the known tokens and
computed with them. Accepted ones become known (`append`), the others are overwritten and their blocks released
(`release_uncomputed`). So between two steps a sequence holds the same blocks as without drafts, and only blocks of
known tokens become findable.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from pipeline.engine.schedule.admission import Admission
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import SlotTable, ranges
from pipeline.engine.schedule.step_plan import StepPlan, StepTokens
from pipeline.engine.stats import EngineStats
from pipeline.errors import RowError

RECOVERY_STEPS = 16


class Scheduler:
    """Owns the waiting queue, the running set and every block reference of their sequences."""

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        stats: EngineStats,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        assert max_num_batched_tokens >= table.num_slots, "each running sequence must fit a step"
        self.table, self.pool, self.stats = table, pool, stats
        self.max_num_batched_tokens, self.enable_prefix_caching = max_num_batched_tokens, enable_prefix_caching
        self.admission = Admission(table, pool, stats, enable_prefix_caching)
        self.running = np.zeros(0, dtype=np.int64)  # slots, oldest sequence first
        self.step_tokens = max_num_batched_tokens  # current token budget; lower after a step ran out of memory
        self.pacing: AdmissionPacing | None = None  # None: sequences that fit are admitted at once
        self._num_steps = 0

    @property
    def waiting(self) -> deque[Sequence]:
        return self.admission.waiting

    # -- entering and leaving

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or end it at once if it can never be served."""
        known, size = len(sequence.token_ids), self.pool.block_size
        room = self.table.max_model_len - sequence.generates
        suffix = ""
        if sequence.reader is not None and sequence.reader.num_after:
            known, suffix = sequence.num_prompt + sequence.reader.num_after, " with its longest label"
        if known == 0:
            sequence.fail(RowError.EMPTY_PROMPT, "the prompt has no tokens")
        elif known > room:
            generated = " with one generated token" if sequence.generates else ""
            sequence.fail(
                RowError.PROMPT_TOO_LONG,
                f"the prompt has{suffix} {known} tokens; with max_model_len = {self.table.max_model_len} at most "
                f"{room} fit{generated}",
            )
        elif -(-(known + sequence.generates) // size) > self.pool.num_blocks:
            self._fail_too_long(sequence)
        elif sequence.is_compared:
            self.waiting.appendleft(sequence)  # a finished row waits for it, and its prompt is still cached
        else:
            self.waiting.append(sequence)

    def finish(self, slots: list[int]) -> list[Sequence]:
        """Remove finished sequences and record their lengths for the forecast."""
        self.admission.finished(slots)
        if self.pacing is not None:
            self.pacing.ended(len(slots))
        return self._remove(slots, finished=True)

    def drop(self, slot: int, keep_blocks: bool = True) -> Sequence:
        """Remove a running sequence before its end. Its full blocks become findable, or, without `keep_blocks`,
        unfindable."""
        (sequence,) = self._remove([slot], keep_blocks=keep_blocks)
        return sequence

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove the matching sequences, waiting or running, and return them."""
        slots = [slot for slot in self.running.tolist() if matches(self.table.at(slot))]
        waiting = [sequence for sequence in self.waiting if matches(sequence)]
        if waiting:
            self.admission.waiting = deque(sequence for sequence in self.waiting if not matches(sequence))
        return self._remove(slots) + waiting

    def _remove(self, slots: list[int], keep_blocks: bool = True, finished: bool = False) -> list[Sequence]:
        """Remove running sequences, ended or not.

        Blocks of prompts are findable since they were computed. Generated ones become findable if the sequence will
        resume later. Those of ended ones do not: a prompt of a job hardly ever continues another row's answer, so
        generation needs no hashes, and its blocks are reused before any prompt's.
        """
        table, size = self.table, self.pool.block_size
        leaves_S = np.zeros(table.num_slots, dtype=bool)
        leaves_S[slots] = True
        self.running = self.running[~leaves_S[self.running]]
        sequences = []
        for slot, prompt, computed in zip(slots, table.num_prompt[slots].tolist(), table.num_computed[slots].tolist()):
            blocks = table.blocks_of(slot)
            if not keep_blocks:
                self.pool.forget(blocks)
            elif not finished:
                self._make_findable(slot, blocks, prompt // size, computed // size)
            self.pool.release(blocks)
            sequences.append(table.vacate(slot, finished))
        return sequences

    # -- a step

    def plan(self) -> StepPlan | None:
        """Decide the next step and allocate its blocks; None when there is nothing to compute."""
        slot_S, start_S, count_S, preempted = self._plan_running()
        if self.waiting and self.table.num_free_slots and not preempted and self._is_time_to_admit(count_S):
            slots, starts, counts = self.admission.admit(self.step_tokens - int(count_S.sum()), self.running)
            if slots:
                self._start(slots)
                if self.pacing is not None:
                    self.pacing.admitted()
                slot_S, start_S, count_S = (
                    np.concatenate([running_S, np.array(admitted, dtype=np.int64)])
                    for running_S, admitted in ((slot_S, slots), (start_S, starts), (count_S, counts))
                )
        if not count_S.all():
            used = np.flatnonzero(count_S)
            slot_S, start_S, count_S = slot_S[used], start_S[used], count_S[used]
        if not len(slot_S):
            return None
        samples_S = start_S + count_S == self.table.num_known[slot_S]
        if self.table.num_readers:
            samples_S &= self.table.generates[slot_S]
        return StepPlan(slot_S, start_S, count_S, samples_S)

    def _is_time_to_admit(self, count_S: np.ndarray) -> bool:
        """Return whether to admit now: always if this step computes prompts anyway, or nothing."""
        expected = self.admission.expected_output
        if self.pacing is None or expected is None or not len(count_S) or int(count_S.max()) > 1:
            return True
        return self.pacing.is_time(len(count_S), expected)

    def commit(self, plan: StepPlan) -> StepTokens:
        """Count the plan's tokens, which have been computed, and make full blocks of prompts findable. Drafts count
        once they are accepted."""
        table, pool, stats, size = self.table, self.pool, self.stats, self.pool.block_size
        end_S, prompt_S = plan.known_end_S, table.num_prompt[plan.slot_S]
        generates_S = compared_S = None
        if table.num_readers:
            generates_S, compared_S = table.generates[plan.slot_S], table.is_compared[plan.slot_S]
        tokens = StepTokens.from_plan(plan, prompt_S, table.recompute_until[plan.slot_S], generates_S, compared_S)
        stats.num_steps += 1
        stats.prompt_tokens += tokens.prefill
        stats.recomputed_tokens += tokens.repeated
        stats.batch_sum += len(plan.slot_S)
        stats.kv_used_ppm_sum += pool.num_held * 1_000_000 // pool.num_blocks
        table.num_computed[plan.slot_S] = end_S
        self._num_steps += 1
        table.last_step[plan.slot_S] = self._num_steps
        if self.step_tokens < self.max_num_batched_tokens and self._num_steps % RECOVERY_STEPS == 0:
            self.step_tokens = min(2 * self.step_tokens, self.max_num_batched_tokens)
        if self.enable_prefix_caching:
            prefilling = np.flatnonzero(plan.start_S < prompt_S)
            first_P, end_P = plan.start_S[prefilling] // size, np.minimum(end_S, prompt_S)[prefilling] // size
            for slot, first, end in zip(plan.slot_S[prefilling].tolist(), first_P.tolist(), end_P.tolist()):
                self._make_findable(slot, table.block_table[slot, :end].tolist(), first, end)
        return tokens

    def undo(self, plan: StepPlan) -> None:
        """Undo a plan that ran out of memory: none of it counts, and later plans are at most half as large.

        The step that counts overwrites what this one wrote into blocks that a sequence keeps. Sequences of the plan
        that have ended since are skipped.
        """
        slot_S = plan.slot_S[np.isin(plan.slot_S, self.running)]
        self.release_uncomputed(slot_S)
        self.step_tokens = max(plan.num_tokens // 2, 1)

    def append(self, slot_S: np.ndarray, token_N: np.ndarray, count_S: np.ndarray | None = None) -> None:
        """Append known tokens to each sequence: count_S[s] of them, or one. All but the last are already computed:
        they are accepted drafts."""
        table, known_S = self.table, self.table.num_known[slot_S]
        if count_S is None:
            table.token_ids[slot_S, known_S] = token_N
            known_S += 1
        else:
            table.token_ids[np.repeat(slot_S, count_S), ranges(known_S, count_S)] = token_N
            known_S += count_S
        table.num_known[slot_S] = known_S
        table.num_computed[slot_S] = known_S - 1

    def append_uncomputed(self, slot: int, token_ids: list[int]) -> None:
        """Append known tokens that the next steps compute together."""
        table, known = self.table, int(self.table.num_known[slot])
        table.token_ids[slot, known : known + len(token_ids)] = token_ids
        table.num_known[slot] = known + len(token_ids)

    def release_uncomputed(self, slot_S: np.ndarray) -> None:
        """Release the blocks after the computed tokens of these sequences, such as those of rejected drafts."""
        end_S = self.table.num_computed[slot_S]
        over = np.flatnonzero(self.table.num_blocks[slot_S] > -(-end_S // self.pool.block_size))
        for slot, end in zip(slot_S[over].tolist(), end_S[over].tolist()):
            self.pool.release(self.table.drop_blocks(slot, end))

    def would_preempt(self) -> bool:
        """Return whether the running sequences' next tokens need more blocks than are free."""
        *_, missing_S = self._wanted()
        return int(missing_S.sum()) > self.pool.num_free

    # -- running sequences

    def _plan_running(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Return slots, start positions and token counts, and whether a sequence was preempted."""
        table, preempted = self.table, False
        while True:
            slot_S, start_S, count_S, missing_S = self._wanted()
            num_missing = int(missing_S.sum())
            if num_missing <= self.pool.num_free:
                break
            if len(slot_S) == 1:
                self._fail_too_long(self.drop(int(slot_S[0])))
            else:
                preempted = True
                self._preempt(slot_S)
        if num_missing:
            grown_S = np.flatnonzero(missing_S)
            table.append_blocks(slot_S[grown_S], missing_S[grown_S], self.pool.allocate(num_missing))
        return slot_S, start_S, count_S, preempted

    def _wanted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return for the running sequences: slots, start positions, token counts and numbers of missing blocks."""
        table, slot_S = self.table, self.running
        start_S = table.num_computed[slot_S]
        count_S = self._chunks(slot_S, table.num_known[slot_S] - start_S)
        needed_S = (start_S + count_S + (self.pool.block_size - 1)) // self.pool.block_size
        return slot_S, start_S, count_S, np.maximum(needed_S - table.num_blocks[slot_S], 0)

    def _chunks(self, slot_S: np.ndarray, need_S: np.ndarray) -> np.ndarray:
        if self.step_tokens < self.max_num_batched_tokens:
            return self._turns(slot_S, need_S)
        count_S = np.minimum(need_S, 1)  # 0: all known tokens are computed, and the next one is being sampled
        long = np.flatnonzero(need_S > 1)
        if len(long):
            budget = self.max_num_batched_tokens - int(count_S.sum()) + len(long)
            count_S[long] = allot(need_S[long], budget)
        return count_S

    def _turns(self, slot_S: np.ndarray, need_S: np.ndarray) -> np.ndarray:
        """Return the counts under a limit: those computed the longest ago first, of equals the oldest."""
        turn = np.argsort(self.table.last_step[slot_S], kind="stable")
        count_S = np.empty_like(need_S)
        count_S[turn] = allot(need_S[turn], self.step_tokens)
        return count_S

    def _preempt(self, slot_S: np.ndarray) -> None:
        victim = int(slot_S[1:][np.argmin(self.table.num_computed[slot_S[1:]])])
        computed = int(self.table.num_computed[victim])
        sequence = self.drop(victim)
        sequence.num_computed_before_preemption = max(sequence.num_computed_before_preemption, computed)
        self.stats.num_preemptions += 1
        self.admission.put_back(sequence)

    def _fail_too_long(self, sequence: Sequence) -> None:
        sequence.fail(
            RowError.KV_CACHE_EXHAUSTED,
            f"{len(sequence.token_ids)} tokens and the next one exceed the whole KV cache of "
            f"{self.pool.num_blocks * self.pool.block_size} tokens; raise engine.kv_cache_memory_bytes",
        )

    def _start(self, slots: list[int]) -> None:
        """Add slots to the running ones, kept by age; only a preempted sequence can be older than running ones."""
        self.running = np.concatenate([self.running, np.array(slots, dtype=np.int64)])
        order_S = self.table.order[self.running]
        if (order_S[1:] < order_S[:-1]).any():
            self.running = self.running[np.argsort(order_S, kind="stable")]

    # -- blocks

    def _make_findable(self, slot: int, blocks: list[int], first: int, end: int) -> None:
        """Register the slot's blocks with numbers first .. end - 1, which are all computed."""
        if first < end and self.enable_prefix_caching:
            sequence = self.table.at(slot)
            sequence.extend_hashes(self.table.token_ids[slot], end, self.pool.block_size)
            self.pool.register(blocks[first:end], sequence.hashes[first:end])


def allot(wanted_S: np.ndarray, available: int) -> np.ndarray:
    """Divide `available` among the sequences: each gets all it wants, in order, until nothing is left."""
    before_S = np.cumsum(wanted_S) - wanted_S
    return np.minimum(np.maximum(available - before_S, 0), wanted_S)
