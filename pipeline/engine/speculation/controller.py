"""The controller of speculative decoding: in each step, whether to draft, who, and how much. No torch.

    wants_candidates -> (a proposer is asked) -> choose -> (the step is computed) -> observe
    shadows -> (a proposer is asked) -> (steps without drafts) -> foretold

On or off: it goes on when the expected gain in tokens per second, drafting and all, is over `MIN_GAIN`, and off when it
falls below `KEEP_GAIN`. What share of the sequences had how many candidates is remembered, so a batch that shrinks in a
job's tail switches it on without a trial. While off it learns in two ways. In some steps the drafts of a
proposer that only looks up are replayed over the tokens that came (shadows); that feeds the same estimates as drafts
do, and where it leaves hope, drafts are tried for some steps (`Trial`). Probes are single drafted steps of a
proposer that is not the one at work, made where what is not known could still make it pay. `LossBudget` bounds what
drafts can lose, `Attention` what looking on takes.

While prompts wait for room in a step, drafts would take their place; then it is off unless tokens cost next to nothing
there. Beside prompts that have it, drafts are judged by what they add to the step.

One proposer is asked in a step, since asking costs too: the one with the largest expected gain. While on, some plain
steps come now and then, to see what they cost (`PlainTimes`); then the proposers are compared anew.

S: sequences that decode, P: proposers, C: classes (`Acceptance`), K: draft positions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.engine.speculation.acceptance import ProposerPrior
from pipeline.engine.speculation.attention import Attention
from pipeline.engine.speculation.beliefs import Beliefs
from pipeline.engine.speculation.budget import LossBudget
from pipeline.engine.speculation.checks import PlainTimes
from pipeline.engine.speculation.choice import Split, Values, deal
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.gains import Gains
from pipeline.engine.speculation.mean_gain import MeanGain
from pipeline.engine.speculation.messages import Batch, Candidates, Choice, Decided, Outcome
from pipeline.engine.speculation.proposing import ProposingCost
from pipeline.engine.speculation.record import SpeculationCounts, bucket_of
from pipeline.engine.speculation.trial import Trial

MIN_GAIN = 0.05  # expected gain that switches it on
KEEP_GAIN = 0.02  # and below which it goes off
FIRST_PLAIN_STEPS = 5  # at the start: how start-up's table deviates from the work shows in them
LOOK_STEPS = 16  # while off: steps until the next look at whether to go on or to probe, doubled by each look
MAX_LOOK_STEPS = 128  # that finds nothing or puts it on for no longer than this, up to this
LASTING_STEPS = 64
SHADOWS_A_LOOK = 8  # offers that were compared, of each sequence, until it is seen whether to go on now,
MOST_SHADOWS_A_LOOK = 64  # and of all
LOOKS_A_TRIAL = 4  # worth of them before drafts are tried
AS_A_STEP = 8  # sequences whose offers say as much as those of a step, of however many
REST_STEPS = 8  # while on, in one step of so many offers that nobody drafts are compared too
PROBE_TRIES = 4  # steps in a row in which a probe asks for candidates before it gives up for now
FORETOLD_SHARE = 0.3  # of what was compared before a trial that counts beside what is seen in it
PAUSE_STEPS = 8  # in which nobody is asked, after which proposers have to catch up,
CATCH_UP_STEPS = 12  # for so many steps in which they are
FREE_ELASTICITY = 0.2  # below it tokens cost next to nothing
TIME_TRUST = 1.25  # what a step or its proposing takes counts at most by this factor above or below what is expected


class Controller:
    """One for an engine. Each step calls `wants_candidates`, `choose` if it said so, and `observe`, in this order, with
    the same batch. Not safe for several threads."""

    def __init__(
        self, cost: StepCost, proposers: Sequence[ProposerPrior], proposing: Sequence[ProposingCost], max_drafts: int
    ) -> None:
        assert len(proposers) == len(proposing) >= 1
        self.cost, self.proposing, self.max_drafts = cost, tuple(proposing), max_drafts
        self.beliefs = Beliefs(proposers, max_drafts)
        self.budget = LossBudget()
        self.gains = Gains(cost, self.proposing, self.budget, max_drafts)
        self.is_on = False  # what is believed at the start decides in the first step
        self._counts = SpeculationCounts()
        self._at_work = 0  # the proposer that is asked while on
        self._asked = 0  # the one that was asked in this step
        self._asked_at = -PAUSE_STEPS  # number of the last step in which any was,
        self._asked_steps = 0  # and of those without a pause
        self._no_choice = np.zeros(0, dtype=np.int64)
        self._choice: Choice | None = None
        self._passed = 0  # steps since the last one that was observed
        self._passing, self._passing_steps = 1, 0  # sequences of the last of them, and steps not counted yet
        self._worth = 0.0  # seconds of plain steps that one token of the chosen step is worth
        self._probing = False
        self._num_steps = 0
        self._look_at = 0  # step of the next look while off
        self._look_steps = LOOK_STEPS
        self._on_at = 0  # step in which it went on
        self._most_sequences = 0  # since that look
        self._attention, self._pause = Attention(), 0
        self._observe_at = 0  # step of which it is to be told while off
        looks_up = [p for p, each in enumerate(proposing) if not each.has_passes]
        self._shadowed = looks_up[0] if looks_up else None  # the proposer whose offers are compared,
        self._shadowing = 1  # sequences there were then,
        self._num_shadows = 0  # how many were since there was a look at it,
        self._num_compared = 0  # and since they were drafted
        self._rest_at = 0  # step from which on those are compared that nobody drafts, while on
        self._trial = Trial()
        self._tries = 0
        self._trying: int | None = None  # the proposer that is probed while another is at work
        self._plain = PlainTimes()
        self._is_time_to_compare = False
        self._gain = MeanGain(MIN_GAIN)  # while on

    @property
    def counts(self) -> SpeculationCounts:
        """Totals so far, by batch size."""
        self._count_passed()
        return self._counts.copy()

    def left(self, slot: int) -> None:
        """Another sequence may come into this slot."""
        self.gains.persistence.left(slot)

    # -- before a step

    def passes(self, num_sequences: int) -> bool:
        """Whether a step of so many sequences is a plain one that need not be told of: then nothing else is called."""
        number = self._num_steps + 1
        is_dull = not self._is_at_it and self.budget.is_open and number < min(self._observe_at, self._look_at)
        if not is_dull or num_sequences == 0:
            return False
        self._most_sequences = max(self._most_sequences, num_sequences)
        self._num_steps = number
        if num_sequences != self._passing:
            self._count_passed()
            self._passing = num_sequences
        self._passing_steps += 1
        self._passed += 1
        return True

    def _count_passed(self) -> None:
        self._counts.add_plain(self._passing, self._passing_steps)
        self._passing_steps = 0

    def wants_candidates(self, batch: Batch) -> int | None:
        """The number of the proposer to ask in this step; None: a plain step without `choose`. About 1 us while off."""
        self._choice, self._probing = None, False
        return self._asked if self._decide(batch) else None

    def choose(self, batch: Batch, candidates: Candidates) -> Choice:
        """How many tokens each sequence drafts, of the candidates of the proposer that was asked."""
        is_probe = self._probing and not self._trial.is_on
        beliefs = self.beliefs
        values = beliefs.hopeful(self._asked, self._num_steps) if is_probe else self._present_values()
        num, lookup_s = batch.num_sequences, self.proposing[self._asked].lookup_s(batch.num_sequences)
        class_S, available_S, deep_CK = beliefs.sorted(self._asked, candidates)
        beliefs.lately[self._asked].remember(deep_CK, num)
        if batch.slot_S is not None and num > 1:  # of one alone nothing is compared
            self.gains.persistence.add(batch.slot_S, values.tokens_CK1[class_S, available_S])
        split = self.gains.split(batch, self._asked, deep_CK, values, lookup_s)
        self._worth = split.worth_s / split.expected_tokens
        if is_probe:
            self._after_try(split.num_drafts > 0)
        elif self.is_on and not self._keeps_on(batch, split, lookup_s):
            split = replace(split, num_drafts=0)
        if split.num_drafts:
            length_S = deal(split, class_S, available_S, self._num_steps)
        else:
            length_S = np.zeros_like(available_S)
        self._choice = Choice(length_S, class_S, self._asked, self._probing)
        return self._choice

    # -- after a step

    @property
    def decided(self) -> Decided:
        """For the last step that was asked for."""
        return Decided(self._choice, self._worth, self._probing)

    def observe(self, batch: Batch, outcome: Outcome, decided: Decided | None = None) -> None:
        """Learn from the step that `batch` described, drafted or not. decided: what was for it; None: it is the last
        one."""
        self._num_steps += 1
        decided = self.decided if decided is None else decided
        choice, num = decided.choice, batch.num_sequences
        if num == 0:
            return
        drafted_S = outcome.drafted_S if outcome.drafted_S is not None else self._no_choice
        num_drafts = int(drafted_S.sum())
        num_accepted = 0
        step_s = self._plain.step_s(self._num_steps, outcome, num_drafts > 0, batch.num_prefill > 0, self._passed)
        if step_s is not None:
            self.cost.observe(num, batch.kv_tokens, num_drafts, step_s)
        if num_drafts:
            assert choice is not None, "drafts that were not chosen here"
            assert outcome.accepted_S is not None, "drafts without a verdict"
            self.beliefs.observe(choice.class_S, drafted_S, outcome.accepted_S)
            self.beliefs.lately[choice.proposer].seen_at = self._num_steps
            num_accepted = int(outcome.accepted_S.sum())
        asked, propose_s = None if choice is None else choice.proposer, outcome.propose_s
        if asked is not None:
            self._asked_steps = 1 + (self._asked_steps if self._num_steps - self._asked_at < PAUSE_STEPS else 0)
            self._asked_at = self._num_steps
            spent = outcome.propose_s, outcome.lookup_s
            propose_s = self.proposing[asked].trusted_s(num, drafted_S, *spent, TIME_TRUST, self._asked_steps == 1)
            self.proposing[asked].observe(num, drafted_S, *spent, self._asked_steps <= CATCH_UP_STEPS)
        self._settle(batch, outcome, decided, num_drafts, num_accepted, propose_s)

    def shadows(self, batch: Batch) -> int | None:
        """After `observe`, of the same batch: the number of the proposer whose drafts are to be replayed."""
        is_empty = batch.num_sequences == 0 or batch.room <= 0
        if self._shadowed is None or self._is_at_it or not self.budget.is_open or is_empty:
            return None
        could_pay = self._is_allowed(batch) and self.gains.at_best(batch, self._shadowed) > MIN_GAIN
        self._shadowing = max(batch.num_sequences, 1)
        return self._shadowed if could_pay else None

    def shadows_rest(self) -> bool:
        """After `choose`: whether what is known of sequences that draft nothing is to be learnt from their offers. Else
        a class of candidates that had no luck at first would never be drafted again, and never be seen."""
        if self._asked != self._shadowed or not self.is_on or self._num_steps < self._rest_at:
            return False
        self._rest_at = self._num_steps + REST_STEPS
        return True

    def foretold(self, candidates: Candidates, decided_S: np.ndarray, agreed_S: np.ndarray, is_rest: bool) -> None:
        """Of what was offered decided_S tokens were compared, and the first agreed_S came. is_rest: they are of
        sequences that drafted nothing, and say nothing of what others have to offer."""
        assert self._shadowed is not None
        class_S, _, deep_CK = self.beliefs.sorted(self._shadowed, candidates)
        decided_S = np.minimum(decided_S, self.max_drafts)
        self.beliefs.observe(class_S, decided_S, np.minimum(agreed_S, decided_S))
        if is_rest:
            return
        lately = self.beliefs.lately[self._shadowed]
        lately.remember(deep_CK, len(class_S), max(len(class_S) // min(self._shadowing, AS_A_STEP), 1))
        lately.seen_at = self._num_steps
        self._num_shadows += len(class_S)
        self._num_compared += len(class_S)
        if self._num_shadows >= self._shadows_a_look:
            self._observe_at = self._num_steps

    # -- on, off, probe

    def _decide(self, batch: Batch) -> bool:
        num = batch.num_sequences
        if num == 0 or batch.room <= 0 or self._num_steps < FIRST_PLAIN_STEPS or not self._is_allowed(batch):
            return False
        if self.is_on:
            if self._plain.is_due:
                self._plain.begin(self._num_steps, self._gain.now)
                self._is_time_to_compare = True
            return not self._plain.takes_one() and self._goes_on(batch)
        if self._trial.is_on:
            return self._goes_on_trying(batch)
        if self._num_steps >= self._look_at:
            return self._look(batch)
        if self._has_shrunk(num):
            self._most_sequences = num
            return self._goes_on_again(batch)
        return self._num_shadows >= self._shadows_a_look and self._goes_on_again(batch)

    @property
    def _is_at_it(self) -> bool:
        """Whether somebody drafts, step after step."""
        return self.is_on or self._trial.is_on

    @property
    def _shadows_a_look(self) -> int:
        return min(SHADOWS_A_LOOK * self._shadowing, MOST_SHADOWS_A_LOOK)

    def _has_shrunk(self, num_sequences: int) -> bool:
        """Whether there are a quarter fewer than there were since the last look: one that grows has less use for
        drafts."""
        self._most_sequences = max(self._most_sequences, num_sequences)
        return 4 * (self._most_sequences - num_sequences) > self._most_sequences

    def _is_allowed(self, batch: Batch) -> bool:
        if batch.num_queued == 0:
            return True
        more = min(max(batch.num_sequences, 1), batch.room)
        elasticity = self.cost.elasticity(batch.num_sequences, batch.kv_tokens, batch.num_prefill, more)
        return elasticity < FREE_ELASTICITY

    def _goes_on(self, batch: Batch) -> bool:
        """While on: whether drafts are affordable at all, and by whom; while they are not, on is as good as off."""
        if self._is_time_to_compare and len(self.proposing) > 1:
            self._is_time_to_compare = False
            self._compare(batch)
        self._asked = self._trying if self._trying is not None else self._at_work
        self._probing = self._trying is not None
        if self.budget.affordable_s > self.proposing[self._asked].lookup_s(batch.num_sequences):
            return True
        self._go_off()
        return False

    def _compare(self, batch: Batch) -> None:
        """Put the best proposer to work, and try one that may well be better."""
        gain_P = [self._expected_gain(batch, p) for p in range(len(self.proposing))]
        best = int(np.argmax(gain_P))
        if gain_P[best] > gain_P[self._at_work] + KEEP_GAIN:
            self._at_work = best
            self._gain.clear()
        hope_P = [self._hoped_gain(batch, p) for p in range(len(self.proposing))]
        hope_P[self._at_work] = 0.0
        promising = int(np.argmax(hope_P))
        is_stale = self.beliefs.is_stale(promising, self._num_steps)
        if hope_P[promising] > gain_P[self._at_work] + MIN_GAIN and is_stale:
            self._trying, self._tries = promising, 0

    def _look(self, batch: Batch) -> bool:
        """While off: go on, probe, or look again later."""
        self._most_sequences = batch.num_sequences
        if self._goes_on_again(batch):
            return True
        gain_P = [self._hoped_gain(batch, p) for p in range(len(self.proposing))]
        best = int(np.argmax(gain_P))
        if gain_P[best] > MIN_GAIN:
            self._asked, self._probing = best, True
            return True
        self._look_later()
        return False

    def _goes_on_again(self, batch: Batch) -> bool:
        """While off: go on where what is known says so."""
        self._num_shadows = 0
        self.beliefs.age(self._num_steps, self.is_on, self._shadowed)
        self.beliefs.renew()
        gain_P = [self._expected_gain(batch, p) for p in range(len(self.proposing))]
        best = int(np.argmax(gain_P))
        is_unseen = (
            best == self._shadowed and self.beliefs.lately[best].seen_at == 0 and batch.num_sequences >= AS_A_STEP
        )
        if gain_P[best] <= MIN_GAIN or is_unseen:  # many sequences' offers are compared soon
            return self._begins_trying(batch)
        self.is_on, self._at_work, self._asked, self._on_at = True, best, best, self._num_steps
        return True

    def _begins_trying(self, batch: Batch) -> bool:
        """While off: try the proposer whose offers were compared, where these leave hope."""
        p = self._shadowed
        if (
            p is None
            or self._num_compared < LOOKS_A_TRIAL * self._shadows_a_look
            or not self._trial.may_begin(self._num_steps)
        ):
            return False
        lately, hopeful = self.beliefs.lately[p], self.beliefs.hopeful(p, self._num_steps)
        if self.gains.expected(batch, p, lately.share_CK, lately.present, hopeful) <= MIN_GAIN:
            return False
        self._trial.begin(batch.num_sequences)
        self._num_compared = 0
        self.beliefs.acceptance.fade(p, FORETOLD_SHARE)
        self.beliefs.renew()
        return self._goes_on_trying(batch)

    def _goes_on_trying(self, batch: Batch) -> bool:
        assert self._shadowed is not None
        self._asked, self._probing = self._shadowed, True
        if self.budget.affordable_s > self.proposing[self._asked].lookup_s(batch.num_sequences):
            return True
        self._trial.ends(self._num_steps)
        self._look_later()
        return False

    def _has_tried(self, value_s: float, spent_s: float) -> None:
        """A step of a trial is known."""
        self._trial.observe(value_s, spent_s)
        if self._trial.is_on:
            return
        assert self._shadowed is not None
        if self._trial.ends(self._num_steps):
            self.is_on, self._at_work, self._on_at = True, self._shadowed, self._num_steps
            self._plain.ends()
        else:
            self._look_later()

    def _look_later(self) -> None:
        self._look_at = self._num_steps + max(self._look_steps, 2 * self._pause)
        self._look_steps = min(2 * self._look_steps, MAX_LOOK_STEPS)

    def _after_try(self, drafted: bool) -> None:
        """A probe asked for candidates: it is over when some were drafted, or after enough tries."""
        self._tries += 1
        if drafted or self._tries == PROBE_TRIES:
            self._tries, self._trying = 0, None
            if not self.is_on:
                self._look_later()

    def _keeps_on(self, batch: Batch, split: Split, lookup_s: float) -> bool:
        """Average this step's expected gain in; goes off when the average does not pay."""
        self._gain.add(split.worth_s, split.seconds + lookup_s, self.gains.lasting(batch))
        if self._gain.now >= KEEP_GAIN:
            return True
        self._go_off()
        return False

    def _go_off(self) -> None:
        self.is_on, self._num_compared = False, 0
        if self._num_steps - self._on_at > LASTING_STEPS:  # else what is known has promised too much
            self._look_steps = LOOK_STEPS
        self._plain.ends()
        self._gain.clear()
        self.beliefs.ends(self._num_steps)
        self._trying = None
        self._look_later()

    # -- expectations

    def _present_values(self) -> Values:
        tried = self._asked if self._trial.is_on else None
        return self.beliefs.present(self._num_steps, self.is_on, self._shadowed, tried)

    def _expected_gain(self, batch: Batch, proposer: int) -> float:
        """With the candidates that it had lately."""
        lately = self.beliefs.lately[proposer]
        return self.gains.expected(batch, proposer, lately.share_CK, lately.present, self._present_values())

    def _hoped_gain(self, batch: Batch, proposer: int) -> float:
        """With the candidates that it could have. Where offers are compared without drafts a probe can wait: what was
        granted is for the steps in which they say that drafts pay."""
        if proposer == self._shadowed and not self.is_on and not self.budget.has_earned:
            return 0.0
        lately = self.beliefs.lately[proposer]
        share_CK = np.maximum(lately.share_CK, lately.hoped_CK)
        return self.gains.expected(batch, proposer, share_CK, 1.0, self.beliefs.hopeful(proposer, self._num_steps))

    # -- accounts

    def _drafted_s(self, batch: Batch, measured_s: float, num_drafts: int, plain_s: float) -> float:
        """Seconds that a step with drafts is charged for, prompts apart: those it took, within `TIME_TRUST` of those
        expected. Beside prompts those expected: what these took of it is known too badly."""
        num = batch.num_sequences
        expected_s = self.cost.step_s(num, batch.kv_tokens, batch.num_prefill, num_drafts)
        if batch.num_prefill:
            return plain_s + expected_s - self.cost.step_s(num, batch.kv_tokens, batch.num_prefill)
        return min(max(measured_s, expected_s / TIME_TRUST), expected_s * TIME_TRUST)

    def _settle(
        self, batch: Batch, outcome: Outcome, decided: Decided, num_drafts: int, num_accepted: int, propose_s: float
    ) -> None:
        num, counts, b = batch.num_sequences, self._counts, bucket_of(batch.num_sequences)
        # Prompts apart, which are computed with drafts or without.
        plain_s = value_s = step_s = self.cost.step_s(num, batch.kv_tokens)
        if not self.budget.is_open:
            self.budget.open(plain_s)
        gained_s = -propose_s
        counts.on_steps[b] += self.is_on
        counts.spent_us[b] += round(propose_s * 1e6)
        if num_drafts:
            step_s = self._drafted_s(batch, outcome.step_s, num_drafts, plain_s)
            value_s = decided.worth_s * outcome.num_generated
            gained_s += value_s - step_s
            if decided.is_probe and gained_s > 0.0:  # it paid: look again at once
                self._look_at, self._look_steps = self._num_steps, LOOK_STEPS
            counts.probe_steps[b] += decided.is_probe
            counts.add_drafted(num, outcome.num_generated, num_drafts, num_accepted, step_s, value_s)
        else:
            counts.add_plain(num)
        if self._trial.is_on and decided.choice is not None and batch.num_prefill == 0:
            self._has_tried(value_s, step_s + propose_s)
        elapsed_s = outcome.step_s * (1 + self._passed) + propose_s  # those that passed took as long, about
        self._passed = 0
        self.budget.settle(elapsed_s, gained_s, plain_s)
        if not self.is_on:
            self._pause = self._attention.pause(elapsed_s, outcome.host_s, plain_s, self._trial.num_failures)
            self._observe_at = self._num_steps + self._pause
