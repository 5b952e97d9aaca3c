"""The draft policy that measures: which arm is fastest at each size of batch, by the clock. No torch.

    select -> (the arm's proposer offers) -> depths -> (the step is computed) -> observe

Time is taken from the end of one step to the end of the next: all that the host does is in it, this policy's own work
too. At each size of batch (`bucket_of`) the fastest arm is found by contests (contest.py), plain steps being the first
incumbent; a size at which nothing was decided yet goes on with the arm of the one before it. What contests lose is
bounded by an account. Where drafts are on and have lost a few steps since they were faster the last time, plain steps
are measured again. How deep each sequence drafts is its own (row_depth.py).

While nobody drafts, a proposer that only looks up is replayed now and then over the tokens that came
(drafts/replay.py): it drafts where that promises tokens, for the price of the look-ups. What a draft model would do is
only known from steps. What a draft costs is, before steps with drafts were timed, taken to be what a prompt's token
costs.

Once no sequence waits to be admitted, a job ends with its slow rows, so tokens count as those get them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.engine.drafts.policy import Offer, StepFacts, StepOutcome, Verdict
from pipeline.engine.speculation.acceptance import Acceptance
from pipeline.engine.speculation.account import Account
from pipeline.engine.speculation.arms import OFF, Arm, bucket_of
from pipeline.engine.speculation.contest import LEAST_WEIGHT, MARGIN, Contest
from pipeline.engine.speculation.record import SpeculationCounts
from pipeline.engine.speculation.row_depth import RowDepths
from pipeline.engine.speculation.step_time import PrefillCost, Rate

# Steps
WARM_UP = 3  # after a change of arms, which say nothing: caches are cold, proposers catch up
FIRST_STEPS = 48  # plain ones at the start: little is known then from which to draft
FIRST_CHARGED = 12  # of a size, before it is charged for
OFF_LOOK, ON_LOOK = 16, 8  # between looks at whether another arm may be faster
FIRST_CHECK = 512  # of drafts before plain ones are measured again
FIRST_OTHER, FIRST_ALONE = 1024, 64  # before the first turn of a draft model, beside lookup and alone,
OTHER_PAUSE = 2048  # and until its next one, then four times as many
SETTLED = 64  # of the same arm, from when only one of so many is looked at closely:
PLAIN_EVERY, DRAFTED_EVERY = 4, 2
ACCEPTANCE_EVERY = 8  # acceptance is taken down in one of so many, apart from contests
IDLE_STEPS = 4  # in a row that seem to wait for requests: they do not, they take so long

# Times as fast
SAFE = 1.5  # as the incumbent: an arm whose times are known is tried on credit
AGAIN = 1.1  # as the incumbent: an arm that is expected to be is tried before its turn

MOST_LOST = 1.0  # plain steps' time, by a step with drafts: more is a matter of chance

# Times as long as such steps take
WILD = 3.0  # a step is charged no more: what the machine did besides is nobody's
IDLE = 12.0  # the engine waited for requests, and the step says nothing

# Shares of all time
MOST_REPLAY = 8  # times the quickest replay that one is counted as: the machine was busy with something else
EARLY_STEPS = 192  # in which more is spent on replays: a short job gains by the first contests
EARLY_REPLAY_SHARE, REPLAY_SHARE = 0.03, 0.002

# As long as steps with drafts were not timed
FIRST_DEPTH = 2  # drafts of a sequence: one that costs a lot is noticed before there are many
UNKNOWN_COST = 0.25  # share of a plain step that a draft takes, where no prompts were timed either; ever less until
UNKNOWN_STEPS = 512  # steps, by when more text is known to draft from
UNKNOWN_DRAFT = 0.3  # tokens that come in the time of a draft

Replay = Callable[[], tuple[np.ndarray, np.ndarray]]
"""Of each step that drafts would have made of the last tokens: which slot, how many drafts would have been accepted."""
_Step = tuple[StepFacts, Arm | None, np.ndarray | None]
"""A step, its arm (None: it says nothing), and the slots of those who were asked for drafts."""


class MeasuredDrafts:
    """Implements `DraftPolicy`. replays: of each proposer of the engine, None where it cannot be replayed."""

    def __init__(
        self,
        replays: Sequence[Replay | None],
        max_draft_tokens: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._replays, self._most, self._clock = tuple(replays), max_draft_tokens, clock
        self._rows = RowDepths(max_draft_tokens)
        self._account, self._prefill, self._counts = Account(), PrefillCost(), SpeculationCounts()
        self._contests: dict[int, Contest] = {}
        self._contest, self._num = Contest(), 0  # of the last step, and its sequences
        self._steps: deque[_Step] = deque()  # selected and not observed yet
        self._told_ns: int | None = None
        self._last_arm, self._same_arm = OFF, 0  # of the last steps, and how many these are
        self._timed: set[Arm] = set()
        self._acceptance = [Acceptance(max_draft_tokens) for _ in self._replays]
        self._counted = [1.0] * len(self._replays)  # tokens of steps in the last contest, by what acceptance says
        self._replay_ns, self._replay_at_ns = 10**9, 0
        self._num_steps = self._idle = 0
        self._unsettled_s = 0.0
        self._is_end = False  # no sequence waits to be admitted
        self._slot_S = np.zeros(0, dtype=np.int64)  # those who were asked for drafts, or replayed, last
        # by proposer that cannot be replayed: when it is tried whatever is known of it, and the pause after that
        first = FIRST_OTHER if any(self._replays) else FIRST_ALONE
        self._next_turn, self._pause = [first] * len(self._replays), [OTHER_PAUSE] * len(self._replays)

    # -- a step

    def select(self, facts: StepFacts) -> int | None:
        num = facts.num_sequences
        contest = self._contest if num == self._num or not num else self._contest_of(num)
        arm = contest.incumbent if contest.challenger is None else contest.active
        if arm != OFF and (facts.room <= 0 or not num):
            arm = None
        self._steps.append((facts, arm, None))
        return None if arm == OFF else arm

    def depths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        selected, arm, _ = self._steps[-1]
        assert selected is facts
        assert arm is not None
        self._steps[-1] = (facts, arm, offer.slot_S)
        most = self._most if arm in self._timed else FIRST_DEPTH
        return np.minimum(np.minimum(offer.count_S, most), self._rows.depths(offer.slot_S))

    def admitted(self, slot: int) -> None:
        self._rows.admitted(slot)

    def paused(self, ns: int) -> None:
        if self._told_ns is not None:
            self._told_ns += ns

    def observe(self, outcome: StepOutcome) -> None:
        now_ns = self._clock()
        told_ns, self._told_ns = self._told_ns, now_ns
        facts = outcome.facts
        selected, arm, slot_S = self._steps.popleft()
        while selected is not facts:  # one that was undone
            selected, arm, slot_S = self._steps.popleft()
        num = facts.num_sequences
        if told_ns is None or not num:
            return
        contest = self._contest
        if num != self._num:
            contest, self._num = self._contest_of(num), num
            self._contest = contest
        self._num_steps += 1
        contest.steps += 1
        if arm is None:
            self._counts.plain[num] += 1
            return
        if arm == self._last_arm:
            self._same_arm += 1
        else:
            self._last_arm, self._same_arm = arm, 0
        if self._same_arm > SETTLED and contest.challenger is None and arm == OFF and contest.steps % PLAIN_EVERY:
            self._counts.plain[num] += 1
            self._unsettled_s += 1e-9 * (now_ns - told_ns)
            return
        self._look(contest, arm, outcome, slot_S, 1e-9 * (now_ns - told_ns), now_ns)

    def counters(self) -> dict[str, int]:
        return self._counts.flat()

    # -- parts

    def _contest_of(self, num_sequences: int) -> Contest:
        size, last = bucket_of(num_sequences), self._contest
        contest = self._contests.get(size)
        if contest is None:
            contest = self._contests[size] = Contest(size)
        if contest is not last:
            contest.follow(last)
        return contest

    def _look(
        self, contest: Contest, arm: Arm, outcome: StepOutcome, slot_S: np.ndarray | None, seconds: float, now_ns: int
    ) -> None:
        """At a step, closely. slot_S: those who were asked for drafts."""
        facts, verdict, prefill_s = outcome.facts, outcome.verdict, self._prefill.token_s
        num = facts.num_sequences
        contest.looked(num, self._num_steps)
        rate = contest.rate(arm, prefill_s)
        off_s = rate.step_s if arm == OFF and rate and rate.weight >= LEAST_WEIGHT else contest.off_s(prefill_s)
        is_settled = arm != OFF and self._same_arm > SETTLED and contest.challenger is None
        is_passed = is_settled and contest.steps % DRAFTED_EVERY > 0
        if verdict is not None and not is_passed:
            self._learn(contest, arm, verdict, num, UNKNOWN_DRAFT if rate is None else rate.draft_cost(off_s))
        tokens, drafts = outcome.num_generated / num, 0 if verdict is None else int(verdict.drafted_D.sum())
        self._is_end = facts.num_waiting == 0 and num > 1
        if slot_S is not None and not is_passed:
            self._slot_S = slot_S
            self._rows.asked(slot_S, verdict)
        own_s = self._own_time(contest, arm, rate, seconds - prefill_s * facts.num_prefill)
        if own_s is None:
            self._counts.plain[num] += 1
            return
        self._count(contest, arm, outcome, own_s, off_s)
        self._unsettled_s += seconds
        if is_passed:
            return
        if self._same_arm >= WARM_UP - 1:
            self._timed.add(arm)
        if self._same_arm >= WARM_UP:
            window = contest.window(arm)
            if len(window):
                self._prefill.add(window, seconds, facts.num_prefill, num)
            window.add(seconds, facts.num_prefill, tokens, drafts / num)
        if off_s is not None:
            share = self._unsettled_s / seconds  # this step stands for those before it
            if facts.num_prefill and not prefill_s:
                share = 0.0  # what the prompts took of it is not known yet
            counted = tokens if arm == OFF else tokens * self._slow()
            self._settle(contest, arm, own_s * share, counted * share, off_s)
        self._go_on(contest, now_ns)

    def _learn(self, contest: Contest, arm: Arm, verdict: Verdict, num_sequences: int, cost: float) -> None:
        """cost: of a draft, in tokens."""
        self._rows.observe(verdict, cost)
        if contest.challenger is not None or contest.steps % ACCEPTANCE_EVERY == 0:  # it takes some 15 us
            num_without = num_sequences - len(verdict.slot_D)
            self._acceptance[arm].observe(verdict.drafted_D, verdict.accepted_D, num_without)

    def _settle(self, contest: Contest, arm: Arm, own_s: float, tokens: float, off_s: float) -> None:
        """Charge what the step lost against the best arm known, or against plain steps."""
        if not self._account.is_open:
            if contest.steps < FIRST_CHARGED:
                return
            self._account.open(off_s)
        best = None if arm == contest.incumbent else contest.rate(contest.incumbent, self._prefill.token_s)
        token_s = off_s if best is None else best.token_s
        lost_s = 0.0 if arm == OFF == contest.incumbent else own_s - token_s * tokens
        self._account.settle(self._unsettled_s, lost_s, off_s)
        if arm == contest.incumbent != OFF:
            contest.lost_steps = max(contest.lost_steps + min(lost_s / off_s, MOST_LOST), 0.0)
        self._unsettled_s = 0.0

    def _own_time(self, contest: Contest, arm: Arm, rate: Rate | None, own_s: float) -> float | None:
        """Of a step, own_s without its prompts, what is the arm's; None where the engine seems to have been idle."""
        usual = rate or contest.rate(contest.incumbent, self._prefill.token_s)
        if usual is None:
            return max(own_s, 0.0)
        if own_s > IDLE * usual.step_s:  # nobody asked the engine for anything, or it did something else
            self._idle += 1
            if self._idle == IDLE_STEPS:  # no, steps take that long now
                contest.forget(arm)
            return None
        self._idle = 0
        return min(max(own_s, 0.0), (WILD if rate else IDLE) * usual.step_s)

    def _count(self, contest: Contest, arm: Arm, outcome: StepOutcome, own_s: float, off_s: float | None) -> None:
        """For the report. off_s: of a plain step, where no contest says how these compare."""
        num, verdict = outcome.facts.num_sequences, outcome.verdict
        if contest.incumbent != OFF:
            self._counts.of(num).on_steps += 1
        if verdict is None:
            self._counts.plain[num] += 1
            return
        slowdown = contest.measured_slowdown(arm)
        plain_s = off_s if slowdown is None else own_s / slowdown  # at the speed that the machine has now
        # Where its speed changed between the arms, a plain step seems to take longer than this one, which does more.
        same_tokens_s = own_s if plain_s is None else min(plain_s, own_s) * outcome.num_generated / num
        counts = self._counts.of(num)
        counts.drafted_steps += 1
        counts.probe_steps += contest.incumbent == OFF
        counts.drafted_sequences += num
        counts.drafted_step_tokens += outcome.num_generated
        counts.draft_tokens += int(verdict.drafted_D.sum())
        counts.accepted_tokens += int(verdict.accepted_D.sum())
        counts.spent_us += round(own_s * 1e6)
        counts.plain_us += round(same_tokens_s * 1e6)

    def _slow(self) -> float:
        """Of tokens with drafts, what share counts: once no sequence waits, those of slow ones do."""
        return self._rows.slow_share(self._slot_S) if self._is_end else 1.0

    def _go_on(self, contest: Contest, now_ns: int) -> None:
        """End a contest, or begin one."""
        if contest.challenger is not None:
            has_to_end = contest.active != OFF and not self._account.can_go_on
            if contest.judge(self._prefill.token_s, has_to_end, self._is_end, self._slow()):
                self._count_tokens(contest)
            return
        is_on = contest.incumbent != OFF
        if is_on and contest.lost_steps > contest.alarm:
            contest.alarm *= 2.0
            contest.begin(OFF, self._prefill.token_s)
            return
        if contest.steps % (ON_LOOK if is_on else OFF_LOOK) or (is_on and self._same_arm < ON_LOOK):
            return
        if is_on and self._is_check(contest):
            return
        if not is_on:
            if self._num_steps < FIRST_STEPS:
                return
            self._replay(now_ns)
        self._challenge(contest)

    def _count_tokens(self, contest: Contest) -> None:
        """After a contest: what its steps yielded, at the depths that sequences have, by what acceptance says."""
        for arm in range(len(self._replays)):
            rate = contest.rate(arm, self._prefill.token_s)
            if rate is not None and rate.weight >= LEAST_WEIGHT:
                self._counted[arm] = rate.tokens / self._yields(arm)

    def _is_check(self, contest: Contest) -> bool:
        """Measure plain steps once in a while. Whether there is nothing else to begin."""
        prefill_s = self._prefill.token_s
        rate = contest.rate(contest.incumbent, prefill_s)
        if rate is None or rate.weight < LEAST_WEIGHT:
            return True
        is_time = contest.is_due(OFF, FIRST_CHECK)
        if is_time:
            contest.begin(OFF, prefill_s)
        return is_time

    def _challenge(self, contest: Contest) -> None:
        """Begin a contest with the arm that is expected to be the fastest, if that is faster than the incumbent, or if
        nothing is known of it."""
        own = self._expected(contest, contest.incumbent)
        has_room = self._most + 1 > SAFE * self._yields(contest.incumbent)  # for much more than the incumbent gives
        best, least = None, 0.0
        for p, replay in enumerate(self._replays):
            if p == contest.incumbent:
                continue
            is_turn = replay is None and has_room and self._num_steps >= self._next_turn[p]
            if not self._acceptance[p].is_known:
                if is_turn:
                    best = p
                    break
                continue
            ratio, is_due = self._expected(contest, p), contest.is_due(p)
            if is_turn:  # what was seen of it may be long ago
                ratio, is_due = max(ratio, own * AGAIN), True
            if ratio > max(least, own * (MARGIN if is_due else AGAIN)):
                best, least = p, ratio
        if best is None:
            return
        is_sure = least > SAFE * own and contest.slowdown(best, self._prefill.token_s) is not None
        if self._is_end and self._account.is_in_debt:
            is_sure = False  # slow rows get fewer tokens than is expected of all
        if self._account.take(on_credit=is_sure):
            self._next_turn[best] = self._num_steps + self._pause[best]
            self._pause[best] *= 4
            contest.begin(best, self._prefill.token_s)

    def _expected(self, contest: Contest, arm: Arm) -> float:
        """How many times as fast as plain steps: tokens as accepted recently, in the time measured of this arm, or by
        what a draft may cost."""
        if arm == OFF:
            return 1.0
        prefill_s = self._prefill.token_s
        slowdown = contest.slowdown(arm, prefill_s)
        if slowdown is not None:
            return self._slow() * self._counted[arm] * self._yields(arm) / slowdown
        off_s, cost = contest.off_s(prefill_s), UNKNOWN_COST * max(1.0 - self._num_steps / UNKNOWN_STEPS, 0.0)
        if off_s is not None and prefill_s:
            cost = prefill_s * self._num / off_s
        return self._slow() * self._acceptance[arm].speed(cost)

    def _yields(self, arm: Arm) -> float:
        """Tokens a step, as accepted recently."""
        return 1.0 if arm == OFF else self._acceptance[arm].tokens

    def _replay(self, now_ns: int) -> None:
        """What recent drafts would have come to."""
        if now_ns < self._replay_at_ns:
            return
        for replay, acceptance in zip(self._replays, self._acceptance):
            if replay is not None:
                slot_O, accepted_O = replay()
                if len(accepted_O):
                    self._slot_S = self._rows.replayed(slot_O, accepted_O)
                    acceptance.replayed(slot_O, accepted_O)
        now_after_ns = self._clock()
        if not self._steps:  # else a device has computed the next step meanwhile
            self.paused(now_after_ns - now_ns)  # has a share of all time, and is not to be charged to the next step
        self._replay_ns = min(self._replay_ns, now_after_ns - now_ns)  # the quickest
        price_ns = min(now_after_ns - now_ns, MOST_REPLAY * self._replay_ns)
        share = EARLY_REPLAY_SHARE if self._num_steps < EARLY_STEPS else REPLAY_SHARE
        self._replay_at_ns = now_after_ns + round(price_ns / share)
