"""Draft policy by measurement: drafts on or off at each batch size, by measured time. No torch.

    select -> (the proposer offers) -> lengths -> (the step is computed) -> observe

Time is measured from the end of one step to the end of the next, so it includes all host work, this policy's too. At
each batch size (`size_of`) contests decide (contest.py); plain steps are the first incumbent, and a size without a
decision inherits that of the previous size. An account bounds the loss of contests. Drafts are measured again once they
have lost the time of a few plain steps since they were last faster. The number of drafts is chosen for each sequence
(row_lengths.py).
"""

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from pipeline.engine.drafts.policy import Proposal, StepFacts, StepOutcome
from pipeline.engine.speculation.contest import Account, Contest, size_of
from pipeline.engine.speculation.counts import SpeculationCounts
from pipeline.engine.speculation.row_lengths import RowLengths
from pipeline.engine.speculation.step_time import OUTLIER, PrefillCost

FIRST_STEPS = 48  # plain steps at startup: there is little text yet to draft from
WARM_UP = 3  # steps ignored after drafts are switched on or off: caches are cold, the proposer catches up
SETTLED, EXAMINE_EVERY = 64, 2  # equal steps after which only every second one is examined
UNKNOWN_COST = 0.3  # of a draft, in tokens, until steps with drafts were timed
UNKNOWN_OUTLIER = 6.0  # cap on a drafted step's time, in plain steps, until drafted steps were timed
MAX_DRIFT_STEPS = 1.0  # cap on one step's share of the time that drafts lost or gained, in plain steps


class MeasuredDrafts:
    """Implements `DraftPolicy` by timing steps with and without drafts."""

    def __init__(self, max_draft_tokens: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._rows = RowLengths(max_draft_tokens)
        self._account, self._prefill, self._counts = Account(), PrefillCost(), SpeculationCounts()
        self._contest = Contest(0)  # of the last step's size
        self._contests = {0: self._contest}
        self._steps: deque[tuple[StepFacts, bool | None]] = deque()  # selected, not observed; None: not to be timed
        self._ended_ns: int | None = None  # end of the last step
        self._had_drafts, self._num_alike = False, 0  # of the last step; steps since drafts were switched
        self._num_steps = 0
        self._unsettled_s = 0.0

    def select(self, facts: StepFacts) -> bool:
        wants: bool | None = self._contest_of(facts.num_sequences).drafts
        if wants and (facts.room <= 0 or not facts.num_sequences):
            wants = None
        self._steps.append((facts, wants))
        return bool(wants)

    def lengths(self, facts: StepFacts, proposal: Proposal) -> np.ndarray:
        return np.minimum(proposal.count_S, self._rows.lengths(proposal.slot_S))

    def admitted(self, slot: int) -> None:
        self._rows.admitted(slot)

    def paused(self, ns: int) -> None:
        if self._ended_ns is not None:
            self._ended_ns += ns

    def observe(self, outcome: StepOutcome) -> None:
        now_ns, began_ns = self._clock(), self._ended_ns
        self._ended_ns = None if outcome.is_last else now_ns
        selected, has_drafts = self._steps.popleft()
        while selected is not outcome.facts:  # skip undone steps
            selected, has_drafts = self._steps.popleft()
        num = selected.num_sequences
        if began_ns is None or not num:
            return
        contest = self._contest = self._contest_of(num)
        self._num_steps += 1
        contest.steps, contest.num_sequences = contest.steps + 1, num
        seconds = max(1e-9 * (now_ns - began_ns), 1e-9)
        own_s = max(seconds - self._prefill.token_s * selected.num_prefill, 0.0)
        self._count(contest, outcome, own_s)
        if has_drafts is None:
            return
        self._num_alike = self._num_alike + 1 if has_drafts == self._had_drafts else 0
        self._had_drafts = has_drafts
        self._unsettled_s += seconds
        if self._num_alike <= SETTLED or contest.is_running or contest.steps % EXAMINE_EVERY == 0:
            self._examine(contest, has_drafts, outcome, seconds, own_s)

    def counters(self) -> dict[str, int]:
        return self._counts.flat()

    # -- parts

    def _contest_of(self, num_sequences: int) -> Contest:
        size, last = size_of(num_sequences) if num_sequences else self._contest.size, self._contest
        if size == last.size:
            return last
        contest = self._contests.get(size)
        if contest is None:
            contest = self._contests[size] = Contest(size, last)
        else:
            contest.follow(last)
        return contest

    def _examine(self, contest: Contest, has_drafts: bool, outcome: StepOutcome, seconds: float, own_s: float) -> None:
        """Learn from a step. own_s: its time without its prompts."""
        facts, acceptance, prefill_s = outcome.facts, outcome.acceptance, self._prefill.token_s
        num, window = facts.num_sequences, contest.window(has_drafts)
        rate, off_s = contest.rate(has_drafts, prefill_s), contest.off_s(prefill_s)
        if acceptance is not None:
            self._rows.observe(acceptance, UNKNOWN_COST if rate is None else rate.draft_cost(off_s))
        tokens, drafts = outcome.num_generated / num, 0 if acceptance is None else int(acceptance.drafted_D.sum())
        if self._num_alike >= WARM_UP:
            if len(window):
                self._prefill.add(window, seconds, facts.num_prefill, num)
            window.add(seconds, facts.num_prefill, tokens, drafts / num)
        if off_s is not None and (prefill_s or not facts.num_prefill):  # otherwise the prompts' time is unknown
            self._settle(contest, has_drafts, own_s, tokens, seconds, off_s)
        if contest.is_running:
            contest.judge(prefill_s, contest.drafts and self._account.is_in_debt, self._num_steps)
        elif contest.is_due():
            can_begin = self._account.can_pay and self._num_steps >= FIRST_STEPS
            if contest.rate(contest.is_on, prefill_s) is not None and (can_begin or contest.is_on):
                contest.begin(prefill_s)

    def _settle(
        self, contest: Contest, has_drafts: bool, own_s: float, tokens: float, seconds: float, off_s: float
    ) -> None:
        """Charge the step's loss against the incumbent, or, for the incumbent's own steps, against plain steps."""
        lost_s = drift = 0.0
        if has_drafts or contest.is_on:
            best = contest.rate(contest.is_on, self._prefill.token_s) if has_drafts != contest.is_on else None
            drift = (own_s - tokens * off_s) / off_s
            rate = contest.rate(has_drafts, self._prefill.token_s)
            # Cap the time to ignore unrelated stalls; the rates exclude them too.
            own_s = min(own_s, UNKNOWN_OUTLIER * off_s if rate is None else OUTLIER * rate.step_s)
            lost_s = own_s - tokens * (off_s if best is None else best.token_s)
        steps = self._unsettled_s / seconds  # this step represents those since the last examined one
        self._account.settle(self._unsettled_s, steps * lost_s, off_s)
        if has_drafts and contest.is_on:
            contest.lost_steps = max(contest.lost_steps + steps * min(drift, MAX_DRIFT_STEPS), 0.0)
        self._unsettled_s = 0.0

    def _count(self, contest: Contest, outcome: StepOutcome, own_s: float) -> None:
        """Count a step for the report. own_s: its time without its prompts."""
        num, acceptance, counts = outcome.facts.num_sequences, outcome.acceptance, self._counts
        b = counts.bucket_of(num)
        counts.on_steps[b] += contest.is_on
        if acceptance is None:
            counts.plain_steps[b] += 1
            return
        # A plain step at the machine's current speed. If that changed during the contest, a plain step may seem to take
        # longer than a step with drafts, which does more work.
        plain_s = None if contest.slowdown is None else own_s / max(contest.slowdown, 1.0)
        same_tokens_s = own_s if plain_s is None else plain_s * outcome.num_generated / num
        counts.drafted_steps[b] += 1
        counts.probe_steps[b] += not contest.is_on
        counts.drafted_sequences[b] += num
        counts.drafted_step_tokens[b] += outcome.num_generated
        counts.draft_tokens[b] += int(acceptance.drafted_D.sum())
        counts.accepted_tokens[b] += int(acceptance.accepted_D.sum())
        counts.spent_us[b] += round(own_s * 1e6)
        counts.plain_us[b] += round(same_tokens_s * 1e6)
