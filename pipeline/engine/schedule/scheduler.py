"""Which sequences compute which tokens next: admission, chunked prefill, block allocation, preemption. No torch.

Rules, in order: every running sequence that lacks one token computes it; what is left of the token budget goes to
longer remainders, oldest first; then waiting sequences are admitted, oldest first, while the blocks they are
expected to need fit beside those that the running ones are expected to need still. When blocks run out all the same,
the sequence that loses the least work is preempted and computed again later. The oldest sequence is never preempted,
so one always advances; when it alone does not fit, it ends with an error.

A step that did not fit the device's memory is undone (`undo`) and the following ones are limited to half its tokens;
each `RECOVERY_STEPS` steps that fit double the limit. Under a limit the sequences take turns, those first that have
waited longest, so a sequence that fits no step is soon alone in one. Who has to sit a step out keeps its KV blocks:
the cache was allocated at the start, and giving them up would free no memory.

Drafts (drafts/room.py) come after all that: into the room that a full step leaves and into free blocks. They are
written behind the known tokens and computed with them; those that are confirmed become known (`append`, `accept`), the
others are overwritten, and blocks that held nothing else are given back when that is known. So whatever is drafted,
between two steps a sequence holds the blocks that it would hold without and those of drafts that are still being
checked, and only blocks of confirmed tokens become findable.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.engine.params import EngineStats
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.output_length import Expectation
from pipeline.engine.schedule.sequence import Sequence, SlotTable
from pipeline.engine.schedule.step_plan import StepPlan, runs, share
from pipeline.errors import RowError

RECOVERY_STEPS = 16
UNKNOWN_TOKEN = -1  # stands in the table where a token is promised
MAX_DEFERRED = 64  # waiting sequences looked past because their prefix is being computed right now

Rejected = tuple[Sequence, RowError, str]


class Promise(NamedTuple):
    """What `Scheduler.promise` counts on: of each of these sequences a token, and draft_P drafts before it."""

    slot_P: np.ndarray
    draft_P: np.ndarray


NO_PROMISE = Promise(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class SlotWatcher(Protocol):
    """Is told who comes into the slots and who leaves them: see `Proposer`."""

    def admitted(self, slot: int) -> None: ...
    def left(self, slot: int, finished: bool) -> None: ...


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
        self.waiting: deque[Sequence] = deque()
        self.running = np.zeros(0, dtype=np.int64)  # slots, oldest sequence first
        self.step_tokens = max_num_batched_tokens  # most tokens of a step for now; lower after one ran out of memory
        self.watcher: SlotWatcher | None = None
        self.expectation = Expectation(table, pool.block_size)
        self._num_steps = 0
        self._rejected: list[Rejected] = []
        self._promise = NO_PROMISE

    # -- entering and leaving

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, or reject it at once when it can never be served."""
        known, size = len(sequence.token_ids), self.pool.block_size
        if known == 0:
            self.reject(sequence, RowError.EMPTY_PROMPT, "the prompt has no tokens")
        elif known >= self.table.max_model_len:
            self.reject(
                sequence,
                RowError.PROMPT_TOO_LONG,
                f"the prompt has {known} tokens; with max_model_len = {self.table.max_model_len} at most "
                f"{self.table.max_model_len - 1} fit beside one generated token",
            )
        elif -(-(known + 1) // size) > self.pool.num_blocks:
            self.reject(sequence, RowError.KV_CACHE_EXHAUSTED, self._too_long_alone(known))
        else:
            self.waiting.append(sequence)

    def reject(self, sequence: Sequence, error: RowError, message: str) -> None:
        """End a sequence that holds nothing here with an error."""
        self._rejected.append((sequence, error, message))

    def take_rejected(self) -> list[Rejected]:
        """Sequences that ended without being served since the last call; they hold nothing any more."""
        rejected, self._rejected = self._rejected, []
        return rejected

    @property
    def num_rejected(self) -> int:
        return len(self._rejected)

    def finish(self, slots: list[int]) -> list[Sequence]:
        """Take out running sequences that came to their end, and expect such lengths of others."""
        self.expectation.finished(slots)
        return self._take_out(slots, finished=True)

    def drop(self, slot: int, keep_blocks: bool = True) -> Sequence:
        """Take out a running sequence before its end. Its full blocks can be found from now on, or no more if
        `keep_blocks` is false."""
        (sequence,) = self._take_out([slot], keep_blocks=keep_blocks)
        return sequence

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
            if self.watcher is not None:
                self.watcher.left(slot, finished)
            blocks = table.blocks_of(slot)
            if not keep_blocks:
                self.pool.forget(blocks)
            elif not finished:
                self._make_findable(slot, blocks, prompt // size, computed // size)
            self.pool.release(blocks)
            sequences.append(table.vacate(slot))
        return sequences

    def abort(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Drop those sequences wherever they are, and return them."""
        slots = [slot for slot in self.running.tolist() if is_meant(self.table.at(slot))]
        gone = self._take_out(slots) + [sequence for sequence in self.waiting if is_meant(sequence)]
        gone += [sequence for sequence, *_ in self._rejected if is_meant(sequence)]
        if len(gone) > len(slots):
            self.waiting = deque(sequence for sequence in self.waiting if not is_meant(sequence))
            self._rejected = [rejected for rejected in self._rejected if not is_meant(rejected[0])]
        return gone

    # -- a step

    def plan(self) -> StepPlan | None:
        """Decide the next step and allocate its blocks; None when there is nothing to compute."""
        slot_S, start_S, count_S, preempted = self._plan_running()
        if self.waiting and self.table.num_free_slots and not preempted:
            slots, starts, counts = self._admit(self.step_tokens - int(count_S.sum()))
            if slots:
                slot_S, start_S, count_S = (
                    np.concatenate([running_S, np.array(admitted, dtype=np.int64)])
                    for running_S, admitted in ((slot_S, slots), (start_S, starts), (count_S, counts))
                )
        if not count_S.all():
            used = np.flatnonzero(count_S)
            slot_S, start_S, count_S = slot_S[used], start_S[used], count_S[used]
        if not len(slot_S):
            return None
        return StepPlan(slot_S, start_S, count_S, start_S + count_S == self.table.num_known[slot_S])

    def advance(self, plan: StepPlan) -> None:
        """The plan's tokens have been computed: raise the counters and make full blocks of prompts findable."""
        table, size = self.table, self.pool.block_size
        end_S = plan.known_end_S
        table.num_computed[plan.slot_S] = end_S
        self._num_steps += 1
        table.last_step[plan.slot_S] = self._num_steps
        if self.step_tokens < self.max_num_batched_tokens and self._num_steps % RECOVERY_STEPS == 0:
            self.step_tokens = min(2 * self.step_tokens, self.max_num_batched_tokens)
        if not self.enable_prefix_caching:
            return
        prompt_S = table.num_prompt[plan.slot_S]
        prefilling = np.flatnonzero(plan.start_S < prompt_S)
        first_P, end_P = plan.start_S[prefilling] // size, np.minimum(end_S, prompt_S)[prefilling] // size
        for slot, first, end in zip(plan.slot_S[prefilling].tolist(), first_P.tolist(), end_P.tolist()):
            self._make_findable(slot, table.block_table[slot, :end].tolist(), first, end)

    def undo(self, plan: StepPlan) -> None:
        """The plan did not fit the memory: nothing of it counts, and the next ones are at most half as large.

        What it wrote into blocks that a sequence keeps is written again by the step that counts. Sequences of it that
        have ended since are passed by.
        """
        for slot in plan.slot_S[np.isin(plan.slot_S, self.running)].tolist():
            self._release_uncomputed(slot)
        self.step_tokens = max(plan.num_tokens // 2, 1)

    def lift_limit(self) -> None:
        """Allow full steps again: what did not fit has been taken out."""
        self.step_tokens = self.max_num_batched_tokens

    def append(self, slot_R: np.ndarray, token_R: np.ndarray) -> None:
        """Each of these sequences, all computed, comes to know one more token."""
        known_R = self.table.num_known[slot_R]
        self.table.token_ids[slot_R, known_R] = token_R
        self.table.num_known[slot_R] = known_R + 1

    def accept(self, slot_R: np.ndarray, token_R: np.ndarray) -> None:
        """Like `append`, where the last known token was a draft: it has been computed already."""
        self.table.num_computed[slot_R] = self.table.num_known[slot_R]
        self.append(slot_R, token_R)

    def accept_all(self, slot_S: np.ndarray, count_S: np.ndarray, token_N: np.ndarray) -> None:
        """What `append` does for the first of each sequence's count_S tokens and `accept` for the others. token_N:
        those of the first sequence, then those of the next."""
        table, known_S = self.table, self.table.num_known[slot_S]
        table.token_ids[np.repeat(slot_S, count_S), runs(known_S, count_S)] = token_N
        table.num_known[slot_S] = known_S + count_S
        table.num_computed[slot_S] = np.where(count_S > 1, known_S + count_S - 1, table.num_computed[slot_S])

    def promise(self, slot_R: np.ndarray, draft_R: np.ndarray) -> Promise:
        """Plan as if each of these sequences, all computed, knew the token that the device is drawing for it and,
        before that, its drafts that are being checked.

        Those that end with the next token by their length are left out. `retract` takes it back, which must come before
        the tokens are appended.
        """
        table = self.table
        goes_on = np.flatnonzero(table.num_known[slot_R] + 1 < table.limit[slot_R])
        slot_R, draft_R = slot_R[goes_on], draft_R[goes_on]
        first_R, count_R = table.num_known[slot_R], draft_R + 1
        table.token_ids[np.repeat(slot_R, count_R), runs(first_R, count_R)] = UNKNOWN_TOKEN
        table.num_known[slot_R] += count_R
        table.num_computed[slot_R] += draft_R
        self._promise = Promise(slot_R, draft_R)
        return self._promise

    def retract(self) -> None:
        """Take back what is promised, if anything is."""
        promise, self._promise = self._promise, NO_PROMISE
        self.table.num_known[promise.slot_P] -= promise.draft_P + 1
        self.table.num_computed[promise.slot_P] -= promise.draft_P

    def follow_up(self, plan: StepPlan, promise: Promise) -> StepPlan:
        """A plan that was made under a promise, once the tokens are known: without the sequences that have ended, the
        others where they came to."""
        here = np.flatnonzero(np.isin(plan.slot_S, self.running))
        slot_S, start_S = plan.slot_S[here], plan.start_S[here]
        promised = np.isin(slot_S, promise.slot_P)
        start_S = np.where(promised, self.table.num_computed[slot_S], start_S)
        draft_S = None if plan.draft_S is None else plan.draft_S[here]
        return StepPlan(slot_S, start_S, plan.count_S[here], plan.samples_S[here], draft_S)

    def would_preempt(self) -> bool:
        """Whether the running sequences' next tokens need more blocks than are free."""
        *_, missing_S = self._wanted()
        return int(missing_S.sum()) > self.pool.num_free

    def release_draft_blocks(self, slot_S: np.ndarray, draft_S: np.ndarray) -> None:
        """Take from these sequences the blocks that hold nothing but drafts which were not accepted; draft_S of each
        are still being checked, behind all that is computed."""
        end_S = self.table.num_computed[slot_S] + draft_S
        over = np.flatnonzero(self.table.num_blocks[slot_S] > -(-end_S // self.pool.block_size))
        for slot, end in zip(slot_S[over].tolist(), end_S[over].tolist()):
            self.pool.release(self.table.drop_blocks(slot, end))

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
                self._fail(int(slot_S[0]))
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
        count_S = np.minimum(need_S, 1)  # 0: all it knows is computed, and its last token is being drawn
        long = np.flatnonzero(need_S > 1)
        if len(long):
            budget = self.max_num_batched_tokens - int(count_S.sum()) + len(long)
            count_S[long] = share(need_S[long], budget)
        return count_S

    def _turns(self, slot_S: np.ndarray, need_S: np.ndarray) -> np.ndarray:
        """What each computes under a limit: those first that were computed the longest ago, of equals the oldest."""
        turn = np.argsort(self.table.last_step[slot_S], kind="stable")
        count_S = np.empty_like(need_S)
        count_S[turn] = share(need_S[turn], self.step_tokens)
        return count_S

    def _preempt(self, slot_S: np.ndarray) -> None:
        victim = int(slot_S[1:][np.argmin(self.table.num_computed[slot_S[1:]])])
        computed = int(self.table.num_computed[victim])
        sequence = self.drop(victim)
        sequence.high_water = max(sequence.high_water, computed)
        self.stats.num_preemptions += 1
        at = 0
        while at < len(self.waiting) and self.waiting[at].order < sequence.order:
            at += 1
        self.waiting.insert(at, sequence)

    def _fail(self, slot: int) -> None:
        sequence = self.drop(slot)
        self.reject(sequence, RowError.KV_CACHE_EXHAUSTED, self._too_long_alone(len(sequence.token_ids)))

    # -- admission

    def _admit(self, budget: int) -> tuple[list[int], list[int], list[int]]:
        """Move waiting sequences into slots; returns those, the positions from which they compute in this step, and how
        many tokens."""
        slots: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        pool, size, expectation = self.pool, self.pool.block_size, self.expectation
        expectation.update()
        in_progress = self._hashes_in_progress()
        reserved = expectation.missing_blocks(self.running)
        deferred: list[Sequence] = []
        while self.waiting and budget > 0 and self.table.num_free_slots and len(deferred) < MAX_DEFERRED:
            sequence = self.waiting.popleft()
            hits, being_computed = self._prefix(sequence, in_progress)
            if being_computed:
                deferred.append(sequence)
                continue
            num_final = expectation.blocks(sequence)
            need = num_final - len(hits) + pool.num_free_of(hits)
            if (len(self.running) or slots) and reserved + need > pool.num_free:
                self.waiting.appendleft(sequence)
                break
            start = len(hits) * size
            count = min(len(sequence.token_ids) - start, budget)
            num_blocks = -(-(start + count) // size)
            slots.append(self._start(sequence, hits, num_blocks))
            starts.append(start)
            counts.append(count)
            reserved += max(num_final - num_blocks, 0)
            in_progress.update(sequence.hashes[len(hits) :])
            budget -= count
        self.waiting.extendleft(reversed(deferred))
        if slots:
            self._run(slots)
        return slots, starts, counts

    def _start(self, sequence: Sequence, hits: list[int], num_blocks: int) -> int:
        """Give it a slot, the known blocks of its prefix and fresh ones, so that it holds `num_blocks`."""
        self.pool.share(hits)
        computed = len(hits) * self.pool.block_size
        slot = self.table.occupy(sequence, hits + self.pool.allocate(num_blocks - len(hits)))
        self.table.num_computed[slot] = computed
        if self.watcher is not None:
            self.watcher.admitted(slot)
        if sequence.num_cached < 0:
            sequence.num_cached = min(computed, sequence.num_prompt)
            self.stats.cached_tokens += sequence.num_cached
            self.stats.prompt_tokens += sequence.num_cached
        return slot

    def _run(self, slots: list[int]) -> None:
        """Put them among the running ones; only one that was preempted can be older than some of these."""
        self.running = np.concatenate([self.running, np.array(slots, dtype=np.int64)])
        order_S = self.table.order[self.running]
        if (order_S[1:] < order_S[:-1]).any():
            self.running = self.running[np.argsort(order_S, kind="stable")]

    def _prefix(self, sequence: Sequence, in_progress: set[bytes]) -> tuple[list[int], bool]:
        """Known blocks of its prefix, and whether the block after them is being computed by another sequence."""
        if not self.enable_prefix_caching:
            return [], False
        size = self.pool.block_size
        usable = (len(sequence.token_ids) - 1) // size  # the last token is always computed: its logits are wanted
        sequence.extend_hashes(sequence.token_ids, usable, size)
        hits = self.pool.find(sequence.hashes[:usable])
        return hits, len(hits) < usable and sequence.hashes[len(hits)] in in_progress

    def _hashes_in_progress(self) -> set[bytes]:
        """Hashes of prompt blocks that running sequences still have to compute."""
        if not self.enable_prefix_caching:
            return set()
        slot_S = self.running
        long_S = self.table.num_known[slot_S] - self.table.num_computed[slot_S] > 1
        hashes: set[bytes] = set()
        for slot in slot_S[long_S].tolist():
            done = int(self.table.num_computed[slot]) // self.pool.block_size
            hashes.update(self.table.at(slot).hashes[done:])
        return hashes

    # -- small parts

    def _make_findable(self, slot: int, blocks: list[int], first: int, end: int) -> None:
        """Register those of its blocks from number `first` up to `end`, all computed."""
        if first < end and self.enable_prefix_caching:
            sequence = self.table.at(slot)
            sequence.extend_hashes(self.table.token_ids[slot], end, self.pool.block_size)
            self.pool.register(blocks[first:end], sequence.hashes[first:end])

    def _release_uncomputed(self, slot: int) -> None:
        self.pool.release(self.table.drop_blocks(slot, int(self.table.num_computed[slot])))

    def _too_long_alone(self, tokens: int) -> str:
        return (
            f"{tokens} tokens and one more need more than the whole KV cache of "
            f"{self.pool.num_blocks * self.pool.block_size} tokens; raise engine.kv_cache_memory_bytes"
        )
