"""The draft policy that measures: which arm is fastest at each size of batch, by the clock. No torch.

    select -> (the arm's proposer offers) -> depths -> (the step is computed) -> observe

Time is taken from the end of one step to the end of the next: all that the host does is in it, this policy's own work
too. At each size of batch (`bucket_of`) the fastest arm is found by contests (contest.py), plain steps being the first
incumbent; a size that was not seen yet begins with the arm of the one before it. What contests lose is bounded by an
account.

While nobody drafts, a proposer that only looks up is replayed now and then over the tokens that came
(drafts/replay.py): it drafts where that promises tokens, for the price of the look-ups. What a draft model would do is
only known from steps.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.engine.propose.offer import Offer
from pipeline.engine.propose.policy import StepFacts, StepOutcome
from pipeline.engine.speculation.account import Account
from pipeline.engine.speculation.arms import OFF, Arm, bucket_of, depths_up_to
from pipeline.engine.speculation.contest import MARGIN, Contest
from pipeline.engine.speculation.record import SpeculationCounts
from pipeline.engine.speculation.record import bucket_of as line_of
from pipeline.engine.speculation.row_depth import RowDepths
from pipeline.engine.speculation.step_time import PrefillCost

WARM_UP = 3  # steps after a change of arms that say nothing: caches are cold, proposers catch up
OFF_LOOK, ON_LOOK = 16, 8  # steps between looks at whether another arm may be faster
FIRST_PLAIN_STEPS = 12
PROMISING = 1.1  # tokens a step that a replay has to promise before the first drafts
AGAIN = 1.15  # and how much faster it has to make an arm that was measured, to be tried before its turn
REPLAY_SHARE = 0.005  # of all time
FIRST_CHECK, FIRST_SIBLING, FIRST_OTHER = 512, 192, 384  # steps of an incumbent before its challengers' first turns
INHERITED_CHECK = 128
WILD = 3.0  # a step is charged at most so many times what such steps take
NEW_STEPS = 32  # a size that was seen for fewer steps is as good as unseen

Replay = Callable[[], np.ndarray]
"""Of each step that drafts would have made of the last tokens, how many drafts would have been accepted."""


class _Step(NamedTuple):
    facts: StepFacts
    arm: Arm | None  # None: it says nothing


class MeasuredDrafts:
    """Implements `DraftPolicy`. replays: of each proposer of the engine, None where it cannot be replayed."""

    def __init__(
        self,
        replays: Sequence[Replay | None],
        max_draft_tokens: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._replays, self._depths, self._clock = tuple(replays), depths_up_to(max_draft_tokens), clock
        self._rows = RowDepths(max_draft_tokens)
        self._account, self._prefill, self._counts = Account(), PrefillCost(), SpeculationCounts()
        self._contests: dict[int, Contest] = {}
        self._contest = Contest()  # of the last step
        self._steps: deque[_Step] = deque()  # selected and not observed yet
        self._told_ns: int | None = None
        self._last_arm, self._same_arm = OFF, 0  # of the last steps, and how many these are
        self._promised = np.zeros(0)  # tokens a step by depth, from the last replays
        self._replay_at_ns, self._replay_at = 0, OFF_LOOK
        # by proposer: the rung of its depths that is tried next. A draft model's passes cost, so it begins with few.
        self._rung = [len(self._depths) - 1 if replay else 0 for replay in self._replays]

    # -- a step

    def select(self, facts: StepFacts) -> int | None:
        arm = None
        if facts.num_sequences:
            arm = self._contest_of(facts.num_sequences).active
            if arm != OFF and facts.room <= 0:
                arm = None
        self._steps.append(_Step(facts, arm))
        return None if arm is None or arm == OFF else arm.proposer

    def depths(self, facts: StepFacts, offer: Offer) -> np.ndarray:
        step = self._steps[-1]
        assert step.facts is facts
        assert step.arm is not None
        return np.minimum(np.minimum(offer.count_S, self._rows.depths(offer.slot_S)), step.arm.depth)

    def admitted(self, slot: int) -> None:
        self._rows.admitted(slot)

    def observe(self, outcome: StepOutcome) -> None:
        now_ns = self._clock()
        told_ns, self._told_ns = self._told_ns, now_ns
        step = self._steps.popleft()
        while step.facts is not outcome.facts:  # one that was undone
            step = self._steps.popleft()
        if outcome.verdict is not None:
            self._rows.observe(outcome.verdict)
        num = outcome.facts.num_sequences
        if told_ns is None or not num:
            return
        seconds = 1e-9 * (now_ns - told_ns)
        contest = self._contest = self._contest_of(num)
        contest.steps += 1
        arm = step.arm
        if arm is None:
            self._counts.add_plain(num)
            return
        self._same_arm = self._same_arm + 1 if arm == self._last_arm else 0
        self._last_arm = arm
        tokens = outcome.num_generated / num
        if self._same_arm >= WARM_UP:
            window = contest.window(arm)
            if len(window):
                self._prefill.add(window, seconds, outcome.facts.num_prefill)
            window.add(seconds, outcome.facts.num_prefill, tokens, outcome.verdict is not None)
        own_s = max(seconds - self._prefill.token_s * outcome.facts.num_prefill, 0.0)
        usual = contest.rate(arm, self._prefill.token_s)
        if usual is not None:  # what the machine did besides is nobody's
            own_s = min(own_s, WILD * usual.step_s)
        self._settle(contest, arm, seconds, own_s, tokens)
        self._count(contest, arm, outcome, own_s)
        self._go_on(contest, now_ns)

    def counters(self) -> dict[str, int]:
        return self._counts.flat()

    # -- parts

    def _contest_of(self, num_sequences: int) -> Contest:
        bucket = bucket_of(num_sequences)
        contest = self._contests.get(bucket)
        if contest is None or (contest is not self._contest and contest.steps < NEW_STEPS < self._contest.steps):
            contest = self._contests[bucket] = self._inherit()
        return contest

    def _inherit(self) -> Contest:
        """A size that was not seen yet begins as the last one goes on."""
        last, share = self._contest, None
        if last.incumbent == OFF:
            return Contest()
        off_s, rate = last.off_s(self._prefill.token_s), last.rate(last.incumbent, self._prefill.token_s)
        if off_s is not None and rate is not None:
            share = off_s / rate.step_s
        contest = Contest(last.incumbent, share)
        contest.wait(OFF, INHERITED_CHECK)
        return contest

    def _settle(self, contest: Contest, arm: Arm, seconds: float, own_s: float, tokens: float) -> None:
        """Charge what the step lost against the best arm known, or against plain steps."""
        off_s = contest.off_s(self._prefill.token_s)
        if off_s is None:
            return
        if not self._account.is_open:
            if contest.steps < FIRST_PLAIN_STEPS:
                return
            self._account.open(off_s)
        best = None if arm == contest.incumbent else contest.rate(contest.incumbent, self._prefill.token_s)
        token_s = off_s if best is None else best.token_s
        lost_s = 0.0 if arm == OFF == contest.incumbent else own_s - token_s * tokens
        self._account.settle(seconds, lost_s, off_s)

    def _count(self, contest: Contest, arm: Arm, outcome: StepOutcome, own_s: float) -> None:
        counts, num, b = self._counts, outcome.facts.num_sequences, line_of(outcome.facts.num_sequences)
        counts.on_steps[b] += contest.incumbent != OFF
        if outcome.verdict is None:
            counts.add_plain(num)
            return
        off_s = contest.off_s(self._prefill.token_s)
        value_s = own_s if off_s is None else off_s * outcome.num_generated / num
        drafts, accepted = int(outcome.verdict.drafted_D.sum()), int(outcome.verdict.accepted_D.sum())
        counts.probe_steps[b] += contest.incumbent == OFF
        counts.add_drafted(num, outcome.num_generated, drafts, accepted, own_s, value_s)

    def _go_on(self, contest: Contest, now_ns: int) -> None:
        """End a contest, or begin one."""
        prefill_s = self._prefill.token_s
        if contest.challenger is not None:
            challenger = contest.challenger
            if contest.judge(prefill_s, has_to_end=challenger != OFF and self._account.balance_s < 0.0):
                self._learn(contest, challenger)
        elif contest.incumbent == OFF:
            if contest.steps % OFF_LOOK == 0 and contest.steps >= FIRST_PLAIN_STEPS:
                self._look_while_off(contest, now_ns)
        elif contest.steps % ON_LOOK == 0 and self._same_arm >= ON_LOOK:
            self._look_while_on(contest)

    def _learn(self, contest: Contest, challenger: Arm) -> None:
        """A contest is over: what its proposer tries next."""
        if challenger == OFF:
            return
        p, rung = challenger.proposer, self._depths.index(challenger.depth)
        has_won = contest.incumbent == challenger
        if has_won:
            self._rung[p] = rung
        else:
            self._rung[p] = rung - 1 if rung > 0 else (len(self._depths) - 1 if self._replays[p] else 0)

    def _look_while_off(self, contest: Contest, now_ns: int) -> None:
        if not self._account.can_pay:
            return
        self._replay(now_ns)
        for p, replay in enumerate(self._replays):
            arm = Arm(p, self._depths[self._rung[p]])
            if replay is not None and not self._is_promising(contest, arm):
                continue
            if replay is None and not contest.is_due(arm, FIRST_OTHER):
                continue
            contest.begin(arm, self._prefill.token_s)
            return

    def _is_promising(self, contest: Contest, arm: Arm) -> bool:
        if not len(self._promised):
            return False
        promised = float(self._promised[arm.depth])
        rate, off_s = contest.rate(arm, self._prefill.token_s), contest.off_s(self._prefill.token_s)
        if promised <= PROMISING:
            return False
        if rate is None or off_s is None:
            return contest.is_due(arm)
        ratio = promised * off_s / rate.step_s
        return ratio > AGAIN if not contest.is_due(arm) else ratio > MARGIN

    def _replay(self, now_ns: int) -> None:
        """What each depth would have come to lately."""
        if now_ns < self._replay_at_ns:
            return
        for replay in self._replays:
            if replay is not None:
                accepted_O = replay()
                if len(accepted_O):
                    depth_K = np.arange(self._depths[-1] + 1)
                    promised_K = 1.0 + np.minimum(accepted_O[:, None], depth_K).mean(axis=0)
                    self._promised = 0.5 * (self._promised + promised_K) if len(self._promised) else promised_K
        self._replay_at_ns = now_ns + round((self._clock() - now_ns) / REPLAY_SHARE)

    def _look_while_on(self, contest: Contest) -> None:
        prefill_s, incumbent = self._prefill.token_s, contest.incumbent
        rate, off_s = contest.rate(incumbent, prefill_s), contest.off_s(prefill_s)
        if rate is None or rate.weight < 4.0:
            return
        if off_s is None or off_s / rate.token_s < 1.0:  # it seems slower than plain steps
            if contest.is_due(OFF) or off_s is None or off_s / rate.token_s < 0.8:
                contest.begin(OFF, prefill_s)
            return
        if contest.is_due(OFF, FIRST_CHECK):
            contest.begin(OFF, prefill_s)
            return
        if not self._account.can_pay:
            return
        rung = self._depths.index(incumbent.depth)
        for other in (rung - 1, rung + 1):
            if 0 <= other < len(self._depths):
                arm = Arm(incumbent.proposer, self._depths[other])
                if contest.is_due(arm, FIRST_SIBLING * (2 if other < rung else 1)):
                    contest.begin(arm, prefill_s)
                    return
        for p in range(len(self._replays)):
            if p != incumbent.proposer:
                arm = Arm(p, self._depths[self._rung[p]])
                if contest.is_due(arm, FIRST_OTHER):
                    contest.begin(arm, prefill_s)
                    return
