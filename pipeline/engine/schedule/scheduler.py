"""Scheduler: decides which sequences compute which tokens next (chunked prefill, block allocation, preemption). No
torch.

Rules, in order: every running sequence that lacks one token computes it; the rest of the token budget goes to longer
remainders, oldest first; then waiting sequences are admitted (admission.py), on a GPU not in every step (pacing.py).
When blocks run out, the sequence that loses the least work is preempted and recomputed later. The oldest sequence is
never preempted, so one always advances; if it does not fit alone, it ends with an error.

Blocks are allocated in pages (`roofline/kv_pages.py`). Layers with a window free theirs before each plan. Those of a
prompt that is computed in one chunk are all held meanwhile, so where they do not fit, chunks are made smaller first.

A step that runs out of device memory is undone (`undo`) and the following ones are limited to half its tokens; every
`RECOVERY_STEPS` steps that fit double the limit. Under a limit the sequences take turns, longest waiting first, so a
sequence that fits in no step is soon alone in one. A sequence that skips a step keeps its KV blocks: the cache was
allocated at startup, and releasing them would free no memory. Layers may keep states instead of keys and values
(`kernels/delta_net.py`), in the slot of their sequence: a chunk of a prompt advances them, so if it is undone, the
sequence begins again.

Drafts come last: they use the remaining token budget and free blocks. They are written after the known tokens and
computed with them. Accepted ones become known (`append`), the others are overwritten and their blocks released
(`release_uncomputed`). So between two steps a sequence holds the same blocks as without drafts, and only blocks of
known tokens become findable.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pipeline.engine.schedule.admission import Admission
from pipeline.engine.schedule.block_pool import BlockPool, window_hashes
from pipeline.engine.schedule.held_prompts import HeldPrompts
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.sequence import Sequence
from pipeline.engine.schedule.slot_table import SlotTable, ranges
from pipeline.engine.schedule.state_snapshots import StateSnapshots
from pipeline.engine.schedule.step_plan import StepPlan, StepTokens
from pipeline.engine.stats import EngineStats
from pipeline.errors import RowError
from pipeline.kernels.delta_shape import MAX_LAG

RECOVERY_STEPS = 16


class _Wanted(NamedTuple):
    """Next tokens of the running sequences, and the pages that these lack for them, of both kinds."""

    slot_S: np.ndarray
    start_S: np.ndarray
    count_S: np.ndarray
    missing_S: np.ndarray
    window_missing_S: np.ndarray

    @property
    def num_pages(self) -> int:
        return int(self.missing_S.sum() + self.window_missing_S.sum())


class Scheduler:
    """Owns the waiting queue, the running set and every block reference of their sequences."""

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        stats: EngineStats,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        num_snapshots: int = 0,
    ) -> None:
        """num_snapshots: states after those of the running sequences, for the ends of shared prefixes."""
        assert max_num_batched_tokens >= table.num_slots, "each running sequence must fit a step"
        self.table, self.pool, self.stats = table, pool, stats
        self.max_num_batched_tokens, self.enable_prefix_caching = max_num_batched_tokens, enable_prefix_caching
        self.held, self.snapshots = HeldPrompts(pool), StateSnapshots(table.num_slots, num_snapshots)
        self.admission = Admission(table, pool, stats, enable_prefix_caching, self.held, self.snapshots)
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
        known = len(sequence.token_ids)
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
        elif self.table.pages.num_pages(known + sequence.generates) > self.pool.num_blocks:
            self._fail_too_long(sequence)
        elif sequence.is_compared or sequence.request.is_follow_up:
            self.waiting.appendleft(sequence)  # its row waits for it, and the row's prompt is still cached
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
            self.held.hold_window([])
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
            pages = table.pages_of(slot)
            if not keep_blocks:
                self.pool.forget(pages)
            elif not finished:
                self._make_findable(slot, prompt // size, computed // size)
            if finished and table.at(slot).request.expects_follow_up:
                self.held.hold(pages, self._num_steps)
            else:
                self.pool.release(pages)
            sequences.append(table.vacate(slot, finished))
        return sequences

    # -- a step

    def plan(self) -> StepPlan | None:
        """Decide the next step and allocate its blocks; None when there is nothing to compute."""
        self._release_passed()
        if self.held.prompts:
            self.held.expire(self._num_steps)
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
            if self.held.prompts and self.waiting:
                self.held.release_all()
                return self.plan()
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
                self._make_findable(slot, first, end)
        if table.has_states:
            self._keep_states(plan)
        return tokens

    def _keep_states(self, plan: StepPlan) -> None:
        """Record what the states contain after a step, and copy those that have reached the end of a prefix."""
        table, end_S = self.table, plan.start_S + plan.count_S
        table.num_applied[plan.slot_S] = np.where(plan.count_S > MAX_LAG, end_S, plan.start_S)
        for slot in plan.slot_S[end_S == table.cut[plan.slot_S]].tolist():
            if self.enable_prefix_caching and (num_pages := self.admission.end_of_snapshot(slot)):
                self.snapshots.save(table.at(slot).hashes[num_pages - 1], slot)
            table.set_cut(slot, None)

    def undo(self, plan: StepPlan) -> None:
        """Undo a plan that ran out of memory: none of it counts, and later plans are at most half as large.

        The step that counts overwrites what this one wrote into blocks that a sequence keeps. Sequences of the plan
        that have ended since are skipped.
        """
        self.release_uncomputed(plan.slot_S[np.isin(plan.slot_S, self.running)])
        self.begin_again(plan)
        self.step_tokens = max(plan.num_tokens // 2, 1)

    def begin_again(self, plan: StepPlan) -> None:
        """Put back the sequences whose states a plan that does not count may have advanced, which cannot be undone."""
        if self.table.has_states:
            has_advanced_S = (plan.count_S > MAX_LAG) & (plan.start_S > 0) & np.isin(plan.slot_S, self.running)
            for slot in plan.slot_S[has_advanced_S].tolist():
                self._put_back(slot)

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
        table, end_S = self.table, self.table.num_computed[slot_S]
        over_S = table.num_pages[slot_S] > -(-end_S // table.pages.page_size)
        if table.pages.window is not None:
            over_S |= table.window_end[slot_S] > -(-end_S // table.pages.block_size)
        over = np.flatnonzero(over_S)
        for slot, end in zip(slot_S[over].tolist(), end_S[over].tolist()):
            self.pool.release(table.drop_pages(slot, end))

    def would_preempt(self) -> bool:
        """Return whether the running sequences' next tokens need more blocks than are free."""
        self._release_passed()
        return self._wanted(self.max_num_batched_tokens).num_pages > self.pool.num_free

    def _release_passed(self) -> None:
        if self.table.pages.window is not None:
            self.admission.hold_next_window()
            self.pool.release(self.table.drop_passed(self.running))

    # -- running sequences

    def _plan_running(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
        """Return slots, start positions and token counts, and whether a sequence was preempted."""
        table, preempted, prompt_tokens = self.table, False, self.max_num_batched_tokens
        while True:
            wanted = self._wanted(prompt_tokens)
            slot_S, count_S = wanted.slot_S, wanted.count_S
            if wanted.num_pages <= self.pool.num_free:
                break
            if self.held.holds_any:
                self.held.release_all()
                continue
            if table.pages.window is not None:
                in_chunks = int(count_S[count_S > 1].sum())
                if in_chunks // 2 >= (1 if len(slot_S) == 1 else table.pages.block_size):
                    prompt_tokens = in_chunks // 2
                    continue
            if len(slot_S) == 1:
                self._fail_too_long(self.drop(int(slot_S[0])))
            else:
                preempted = True
                self._preempt(slot_S)
            prompt_tokens = self.max_num_batched_tokens
        self.grow(slot_S, wanted.missing_S, wanted.window_missing_S)
        return slot_S, wanted.start_S, count_S, preempted

    def grow(self, slot_S: np.ndarray, missing_S: np.ndarray, window_missing_S: np.ndarray) -> None:
        """Allocate these numbers of pages of each kind for the sequences."""
        for count_S, append in (
            (missing_S, self.table.append_pages),
            (window_missing_S, self.table.append_window_pages),
        ):
            grown = np.flatnonzero(count_S)
            if len(grown):
                append(slot_S[grown], count_S[grown], self.pool.allocate(int(count_S.sum())))

    def _wanted(self, prompt_tokens: int) -> "_Wanted":
        """Return what the running sequences compute next, at most `prompt_tokens` tokens in chunks."""
        table, slot_S = self.table, self.running
        start_S = table.num_computed[slot_S]
        count_S = self._chunks(slot_S, table.num_known[slot_S] - start_S, prompt_tokens)
        return _Wanted(slot_S, start_S, count_S, *table.missing_pages(slot_S, start_S + count_S))

    def _chunks(self, slot_S: np.ndarray, need_S: np.ndarray, prompt_tokens: int) -> np.ndarray:
        if self.step_tokens < self.max_num_batched_tokens:
            count_S = self._turns(slot_S, need_S)
            long = np.flatnonzero(count_S > 1)
            budget = prompt_tokens
        else:
            count_S = np.minimum(need_S, 1)  # 0: all known tokens are computed, and the next one is being sampled
            long = np.flatnonzero(need_S > 1)
            budget = min(prompt_tokens, self.max_num_batched_tokens - int(count_S.sum()) + len(long))
            count_S[long] = need_S[long]
        if len(long):
            count_S[long] = allot(count_S[long], budget)
        if self.table.has_states:
            count_S = np.minimum(count_S, self.table.cut[slot_S] - self.table.num_computed[slot_S])
        return count_S

    def _turns(self, slot_S: np.ndarray, need_S: np.ndarray) -> np.ndarray:
        """Return the counts under a limit: those computed the longest ago first, of equals the oldest."""
        turn = np.argsort(self.table.last_step[slot_S], kind="stable")
        count_S = np.empty_like(need_S)
        count_S[turn] = allot(need_S[turn], self.step_tokens)
        return count_S

    def _preempt(self, slot_S: np.ndarray) -> None:
        self._put_back(int(slot_S[1:][np.argmin(self.table.num_computed[slot_S[1:]])]))

    def _put_back(self, slot: int) -> None:
        """Remove a running sequence, which will be computed again."""
        computed = int(self.table.num_computed[slot])
        sequence = self.drop(slot)
        sequence.num_computed_before_preemption = max(sequence.num_computed_before_preemption, computed)
        self.stats.num_preemptions += 1
        self.admission.put_back(sequence)

    def _fail_too_long(self, sequence: Sequence) -> None:
        sequence.fail(
            RowError.KV_CACHE_EXHAUSTED,
            f"{len(sequence.token_ids)} tokens and the next one exceed the whole KV cache of "
            f"{self.table.pages.max_tokens(self.pool.num_blocks)} tokens; raise engine.kv_cache_memory_bytes",
        )

    def _start(self, slots: list[int]) -> None:
        """Add slots to the running ones, kept by age; only a preempted sequence can be older than running ones."""
        self.running = np.concatenate([self.running, np.array(slots, dtype=np.int64)])
        order_S = self.table.order[self.running]
        if (order_S[1:] < order_S[:-1]).any():
            self.running = self.running[np.argsort(order_S, kind="stable")]

    # -- blocks

    def _make_findable(self, slot: int, first: int, end: int) -> None:
        """Register the slot's pages with numbers first .. end - 1, which are all computed, and the pages of the window
        in them that it still has."""
        if first >= end or not self.enable_prefix_caching:
            return
        table, sequence = self.table, self.table.at(slot)
        sequence.extend_hashes(table.token_ids[slot], end, self.pool.block_size)
        self.pool.register(table.first_pages(slot, end)[first:], sequence.hashes[first:end])
        if table.pages.window is not None:
            per_page = table.pages.blocks_per_page
            begin = max(first * per_page, int(table.window_begin[slot]))
            blocks = range(begin, max(begin, end * per_page))
            pages = table.window_pages(slot, blocks.start, blocks.stop)
            self.pool.register(pages, window_hashes(sequence.hashes, blocks, per_page))


def allot(wanted_S: np.ndarray, available: int) -> np.ndarray:
    """Divide `available` among the sequences: each gets all it wants, in order, until nothing is left."""
    before_S = np.cumsum(wanted_S) - wanted_S
    return np.minimum(np.maximum(available - before_S, 0), wanted_S)
