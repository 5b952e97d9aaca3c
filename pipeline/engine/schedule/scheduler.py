"""Which sequences compute which tokens next: chunked prefill, block allocation, preemption. No torch.

Rules, in order: every running sequence that lacks one token computes it; what is left of the token budget goes to
longer remainders, oldest first; then waiting sequences are admitted (admission.py), on a GPU not in every step
(pacing.py). When blocks run out all the same,
the sequence that loses the least work is preempted and computed again later. The oldest sequence is never preempted,
so one always advances; when it alone does not fit, it ends with an error.

A step that did not fit the device's memory is undone (`undo`) and the following ones are limited to half its tokens;
each `RECOVERY_STEPS` steps that fit double the limit. Under a limit the sequences take turns, those first that have
waited longest, so a sequence that fits no step is soon alone in one. A sequence that sits a step out keeps its KV
blocks: the cache was allocated at the start, and giving them up would free no memory.

Drafts come after all that: into the room that a full step leaves and into free blocks. They are written after the known
tokens and computed with them. Accepted ones become known (`append`), the others are overwritten, and their blocks are
given back (`release_uncomputed`). So between two steps a sequence holds the blocks that it would hold without drafts,
and only blocks of known tokens become findable.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from pipeline.engine.schedule.admission import Admission
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.sequence import Sequence, SlotTable, ranges
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
        self.step_tokens = max_num_batched_tokens  # most tokens of a step for now; lower after one ran out of memory
        self.pacing: AdmissionPacing | None = None  # None: whoever fits is admitted at once
        self._num_steps = 0

    @property
    def waiting(self) -> deque[Sequence]:
        return self.admission.waiting

    # -- entering and leaving

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or end it at once when it can never be served."""
        known, size = len(sequence.token_ids), self.pool.block_size
        room = self.table.max_model_len - sequence.generates
        with_it = ""
        if sequence.reader is not None and sequence.reader.num_after:
            known, with_it = sequence.num_prompt + sequence.reader.num_after, " with its longest label"
        if known == 0:
            sequence.fail(RowError.EMPTY_PROMPT, "the prompt has no tokens")
        elif known > room:
            beside = " beside one generated token" if sequence.generates else ""
            sequence.fail(
                RowError.PROMPT_TOO_LONG,
                f"the prompt has{with_it} {known} tokens; with max_model_len = {self.table.max_model_len} at most "
                f"{room} fit{beside}",
            )
        elif -(-(known + sequence.generates) // size) > self.pool.num_blocks:
            self._fail_too_long(sequence)
        elif sequence.is_compared:
            self.waiting.appendleft(sequence)  # a finished row waits for it, and its prompt's blocks are still here
        else:
            self.waiting.append(sequence)

    def finish(self, slots: list[int]) -> list[Sequence]:
        """Take out running sequences that came to their end, and expect such lengths of others."""
        self.admission.finished(slots)
        if self.pacing is not None:
            self.pacing.ended(len(slots))
        return self._take_out(slots, finished=True)

    def drop(self, slot: int, keep_blocks: bool = True) -> Sequence:
        """Take out a running sequence before its end. Its full blocks can be found from now on, or no more if
        `keep_blocks` is false."""
        (sequence,) = self._take_out([slot], keep_blocks=keep_blocks)
        return sequence

    def abort(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Drop those sequences, waiting or running, and return them."""
        slots = [slot for slot in self.running.tolist() if is_meant(self.table.at(slot))]
        waiting = [sequence for sequence in self.waiting if is_meant(sequence)]
        if waiting:
            self.admission.waiting = deque(sequence for sequence in self.waiting if not is_meant(sequence))
        return self._take_out(slots) + waiting

    def _take_out(self, slots: list[int], keep_blocks: bool = True, finished: bool = False) -> list[Sequence]:
        """Take out running sequences, ended or not.

        Prompts' blocks could be found since they were computed. Generated ones become findable where the sequence is to
        go on later. Those of an ended one do not: hardly ever does a prompt of a job go on from another row's answer,
        and so generating costs no hashes, and its blocks are reused before any prompt's.
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
                self._run(slots)
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
        """Always where prompts are computed in this step anyway, or nothing is."""
        expected = self.admission.expected_output
        if self.pacing is None or expected is None or not len(count_S) or int(count_S.max()) > 1:
            return True
        return self.pacing.is_time(len(count_S), expected)

    def commit(self, plan: StepPlan) -> StepTokens:
        """The plan's tokens have been computed: count them, and make full blocks of prompts findable. Drafts count when
        they are accepted."""
        table, pool, stats, size = self.table, self.pool, self.stats, self.pool.block_size
        end_S, prompt_S = plan.known_end_S, table.num_prompt[plan.slot_S]
        generates_S = compared_S = None
        if table.num_readers:
            generates_S, compared_S = table.generates[plan.slot_S], table.is_compared[plan.slot_S]
        tokens = StepTokens.of(plan, prompt_S, table.repeat_until[plan.slot_S], generates_S, compared_S)
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
        """The plan did not fit the memory: nothing of it counts, and the next ones are at most half as large.

        What it wrote into blocks that a sequence keeps is written again by the step that counts. Sequences of it that
        have ended since are passed by.
        """
        slot_S = plan.slot_S[np.isin(plan.slot_S, self.running)]
        self.release_uncomputed(slot_S)
        self.step_tokens = max(plan.num_tokens // 2, 1)

    def append(self, slot_S: np.ndarray, token_N: np.ndarray, count_S: np.ndarray | None = None) -> None:
        """Each of these sequences comes to know its next tokens, count_S[s] of them or one. All but the last are
        computed by then: drafts that were accepted."""
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
        """The sequence comes to know further tokens after its last one, which the next steps compute together."""
        table, known = self.table, int(self.table.num_known[slot])
        table.token_ids[slot, known : known + len(token_ids)] = token_ids
        table.num_known[slot] = known + len(token_ids)

    def release_uncomputed(self, slot_S: np.ndarray) -> None:
        """Take from these sequences the blocks after their computed tokens, as of rejected drafts."""
        end_S = self.table.num_computed[slot_S]
        over = np.flatnonzero(self.table.num_blocks[slot_S] > -(-end_S // self.pool.block_size))
        for slot, end in zip(slot_S[over].tolist(), end_S[over].tolist()):
            self.pool.release(self.table.drop_blocks(slot, end))

    def would_preempt(self) -> bool:
        """Whether the running sequences' next tokens need more blocks than are free."""
        *_, missing_S = self._wanted()
        return int(missing_S.sum()) > self.pool.num_free

    # -- running sequences

    def _plan_running(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Slots, the position from which each computes, and how many tokens; last whether anyone was preempted."""
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
        """Of the running sequences: slots, from where they compute, how many tokens, and the blocks they lack."""
        table, slot_S = self.table, self.running
        start_S = table.num_computed[slot_S]
        count_S = self._chunks(slot_S, table.num_known[slot_S] - start_S)
        needed_S = (start_S + count_S + (self.pool.block_size - 1)) // self.pool.block_size
        return slot_S, start_S, count_S, np.maximum(needed_S - table.num_blocks[slot_S], 0)

    def _chunks(self, slot_S: np.ndarray, need_S: np.ndarray) -> np.ndarray:
        if self.step_tokens < self.max_num_batched_tokens:
            return self._turns(slot_S, need_S)
        count_S = np.minimum(need_S, 1)  # 0: all it knows is computed, and its next token is being sampled
        long = np.flatnonzero(need_S > 1)
        if len(long):
            budget = self.max_num_batched_tokens - int(count_S.sum()) + len(long)
            count_S[long] = allot(need_S[long], budget)
        return count_S

    def _turns(self, slot_S: np.ndarray, need_S: np.ndarray) -> np.ndarray:
        """What each computes under a limit: those first that were computed the longest ago, of equals the oldest."""
        turn = np.argsort(self.table.last_step[slot_S], kind="stable")
        count_S = np.empty_like(need_S)
        count_S[turn] = allot(need_S[turn], self.step_tokens)
        return count_S

    def _preempt(self, slot_S: np.ndarray) -> None:
        victim = int(slot_S[1:][np.argmin(self.table.num_computed[slot_S[1:]])])
        computed = int(self.table.num_computed[victim])
        sequence = self.drop(victim)
        sequence.high_water = max(sequence.high_water, computed)
        self.stats.num_preemptions += 1
        self.admission.put_back(sequence)

    def _fail_too_long(self, sequence: Sequence) -> None:
        sequence.fail(
            RowError.KV_CACHE_EXHAUSTED,
            f"{len(sequence.token_ids)} tokens and one more need more than the whole KV cache of "
            f"{self.pool.num_blocks * self.pool.block_size} tokens; raise engine.kv_cache_memory_bytes",
        )

    def _run(self, slots: list[int]) -> None:
        """Put them among the running ones; only one that was preempted can be older than some of these."""
        self.running = np.concatenate([self.running, np.array(slots, dtype=np.int64)])
        order_S = self.table.order[self.running]
        if (order_S[1:] < order_S[:-1]).any():
            self.running = self.running[np.argsort(order_S, kind="stable")]

    # -- blocks

    def _make_findable(self, slot: int, blocks: list[int], first: int, end: int) -> None:
        """Register those of its blocks from number `first` up to `end`, all computed."""
        if first < end and self.enable_prefix_caching:
            sequence = self.table.at(slot)
            sequence.extend_hashes(self.table.token_ids[slot], end, self.pool.block_size)
            self.pool.register(blocks[first:end], sequence.hashes[first:end])


def allot(wanted_S: np.ndarray, available: int) -> np.ndarray:
    """How much of `available` each gets: all that it wants, the first ones first."""
    before_S = np.cumsum(wanted_S) - wanted_S
    return np.minimum(np.maximum(available - before_S, 0), wanted_S)
