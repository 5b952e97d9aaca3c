"""The controller of speculative decoding: in each step, whether to draft and how much. No torch.

    wants_candidates -> (proposers are asked) -> choose -> (the step is computed) -> observe

On or off: it goes on when the expected gain in tokens per second, drafting and all, is over `MIN_GAIN`, and off when it
falls below `KEEP_GAIN`. While off nobody is asked for candidates; what share of the sequences had how many is
remembered, so a batch that shrinks in a job's tail switches it on without a trial. Probes are single drafted steps
while off, made where what is not known could still make drafting pay. `LossBudget` bounds what all of it can lose.

While prompts wait for room in a step, drafts would take their place; then it is off unless tokens cost next to nothing
there.

Several proposers: each alone, or for each sequence the one that promises more; the best of these per step.

S: sequences that decode, P: proposers, C: classes (`Acceptance`), K: draft positions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.speculation.acceptance import Acceptance, AcceptanceCounts, ProposerPrior, count_deep
from pipeline.engine.speculation.budget import LossBudget
from pipeline.engine.speculation.choice import Split, Values, best_split, deal
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.proposing import ProposingCost
from pipeline.engine.speculation.record import SpeculationCounts, bucket_of

MIN_GAIN = 0.05  # expected gain that switches it on
KEEP_GAIN = 0.02  # and below which it goes off
FIRST_PLAIN_STEPS = 2  # at the start: how start-up's table deviates from the work shows in them
GAIN_STEPS = 16  # steps over which the gain is averaged while on
LOOK_STEPS = 16  # while off: steps until the next look at whether to go on or to probe, doubled by each look
MAX_LOOK_STEPS = 128  # that finds nothing, up to this
PROBE_TRIES = 4  # steps in a row in which a probe asks for candidates before it gives up for now
CHECK_STEPS = 100  # drafted steps in a row before a plain one refreshes what plain steps cost
DEVIATIONS = 1.5  # above the estimate: the acceptance that a probe hopes for
REFRESH_STEPS = 4  # drafted steps after which what drafts are worth is reckoned anew
SHARE_STEPS = 32  # steps over which the shares of candidates are remembered
FREE_ELASTICITY = 0.2  # below it tokens cost next to nothing
TIME_TRUST = 1.25  # a step's time counts for the budget at most by this factor above or below what is expected
MAX_CURVES = 64  # cost curves kept
CONTEXT_STEPS = 8  # curves of contexts nearer than 1/8 of a power of two are one


@dataclass(frozen=True)
class Batch:
    """What a step computes before drafts. `kv_tokens`: tokens that the decoding sequences have in the KV cache, in all.

    num_prefill: prompt tokens in this step. num_queued: prompt tokens that wait for room in a step (not for a slot or
    for blocks: what cannot be computed now is not in the way). room: tokens that the step can take besides.
    """

    num_sequences: int
    kv_tokens: int
    room: int
    num_prefill: int = 0
    num_queued: int = 0


@dataclass(frozen=True)
class Candidates:
    """Of one proposer: draft tokens that it has (or could draft) for each sequence, at most what the sequence may still
    generate after its next token, and the length of the match behind them (0 where it knows none)."""

    available_S: np.ndarray
    match_length_S: np.ndarray


@dataclass(frozen=True)
class Choice:
    """Sequence s drafts length_S[s] tokens of proposer proposer_S[s]; aligned with the candidates."""

    length_S: np.ndarray
    proposer_S: np.ndarray
    class_S: np.ndarray
    is_probe: bool


@dataclass(frozen=True)
class Outcome:
    """What became of a step. `num_generated`: tokens appended to decoding sequences (accepted ones behind a stop are
    not). propose_s: seconds that each proposer took, () when none was asked, and lookup_s those of them before anything
    was chosen (asked for only where a proposer has passes; () is none). drafted_S may be less than was chosen."""

    step_s: float
    num_generated: int
    drafted_S: np.ndarray | None = None
    accepted_S: np.ndarray | None = None
    propose_s: tuple[float, ...] = ()
    lookup_s: tuple[float, ...] = ()


@dataclass
class _Option:
    """Proposers that draft together, and how many candidates they had lately."""

    proposers: tuple[int, ...]
    hoped_CK: np.ndarray  # shares as they could be at best
    share_CK: np.ndarray  # of the sequences in such a step: those in class c with a candidate at k
    present: float = 1.0  # share of the steps in which anybody had a candidate
    num_seen: int = 0
    num_present: int = 0

    def remember(self, deep_CK: np.ndarray, num_sequences: int) -> None:
        is_present = bool(deep_CK.any())
        self.num_seen = min(self.num_seen + 1, SHARE_STEPS)
        self.present += (is_present - self.present) / self.num_seen
        if is_present:
            self.num_present = min(self.num_present + 1, SHARE_STEPS)
            self.share_CK = self.share_CK + (deep_CK / num_sequences - self.share_CK) / self.num_present


class Controller:
    """One for an engine. Each step calls `wants_candidates`, `choose` if it said so, and `observe`, in this order, with
    the same batch. Not safe for several threads."""

    def __init__(
        self, cost: StepCost, proposers: Sequence[ProposerPrior], proposing: Sequence[ProposingCost], max_drafts: int
    ) -> None:
        assert len(proposers) == len(proposing) >= 1
        self.cost, self.proposing, self.max_drafts = cost, tuple(proposing), max_drafts
        self.acceptance = Acceptance(proposers, max_drafts)
        self.budget = LossBudget()
        self.is_on = False  # what is believed at the start decides in the first step
        self._counts = SpeculationCounts()
        together = [tuple(range(len(proposers)))] if len(proposers) > 1 else []
        self._options = [self._option(members) for members in [(p,) for p in range(len(proposers))] + together]
        self._no_choice = np.zeros(0, dtype=np.int64)
        self._choice: Choice | None = None
        self._probing = False
        self._num_steps = 0
        self._forgotten_at = 0
        self._look_at = 0  # step of the next look while off
        self._look_steps = LOOK_STEPS
        self._looked_sequences = 0
        self._tries = 0
        self._steps_since_plain = 0
        self._value_s = self._spent_s = 0.0  # running means while on: plain time of what is expected, and its own time
        self._values = Values(self.acceptance.probability(), self.acceptance.proposer_C)
        self._observed = 0  # drafted steps since
        self._curves: dict[tuple[int, int, int, int], np.ndarray] = {}
        self._curves_version = -1

    @property
    def counts(self) -> SpeculationCounts:
        """Totals so far, by batch size."""
        return self._counts.copy()

    @property
    def acceptance_counts(self) -> AcceptanceCounts:
        """Totals so far, by proposer, match length and position."""
        return self.acceptance.counts

    # -- before a step

    def wants_candidates(self, batch: Batch) -> bool:
        """Whether to ask the proposers in this step; about 1 us while off. False: a plain step, without `choose`."""
        self._choice, self._probing = None, False
        return self._decide(batch)

    def choose(self, batch: Batch, candidates: Sequence[Candidates]) -> Choice:
        """How many tokens each sequence drafts; `candidates` of each proposer, in their order."""
        assert len(candidates) == len(self.proposing)
        values = self._present_values() if not self._probing else self._hopeful_values()
        num, lookup_s = batch.num_sequences, self._lookup_s(batch.num_sequences)
        available_PS = [np.minimum(of.available_S, self.max_drafts) for of in candidates]
        class_PS = [self.acceptance.class_of(p, of.match_length_S) for p, of in enumerate(candidates)]
        best: tuple[Split, np.ndarray, np.ndarray, np.ndarray] | None = None
        for option in self._options:
            first = option.proposers[0]
            if len(option.proposers) == 1:
                proposer_S, class_S, available_S = np.full(num, first), class_PS[first], available_PS[first]
            else:  # for each sequence the one that promises more tokens
                worth_PS = values.worth_CK1[np.stack(class_PS), np.stack(available_PS)]
                proposer_S = worth_PS.argmax(axis=0)
                class_S, available_S = np.choose(proposer_S, class_PS), np.choose(proposer_S, available_PS)
            deep_CK = count_deep(class_S, available_S, self.acceptance.num_classes, self.max_drafts)
            option.remember(deep_CK, num)
            split = self._split(batch, deep_CK, values, lookup_s)
            if best is None or split.tokens_per_s > best[0].tokens_per_s:
                best = split, proposer_S, class_S, available_S
        assert best is not None
        split, proposer_S, class_S, available_S = best
        if self._probing:
            self._after_try(split.num_drafts > 0)
        elif not self._keeps_on(num, split, lookup_s):
            split = replace(split, num_drafts=0)
        if split.num_drafts:
            length_S = deal(split, class_S, available_S, self._num_steps)
        else:
            length_S = np.zeros_like(available_S)
        self._choice = Choice(length_S, proposer_S, class_S, self._probing)
        return self._choice

    # -- after a step

    def observe(self, batch: Batch, outcome: Outcome) -> None:
        """Learn from the step that `batch` described, drafted or not."""
        self._num_steps += 1
        choice, num = self._choice, batch.num_sequences
        if num == 0:
            return
        drafted_S = outcome.drafted_S if outcome.drafted_S is not None else self._no_choice
        num_drafts = int(drafted_S.sum())
        num_accepted = 0
        if batch.num_prefill == 0:
            self.cost.observe(num, batch.kv_tokens, num_drafts, outcome.step_s)
        if num_drafts:
            assert choice is not None, "drafts that were not chosen here"
            assert outcome.accepted_S is not None, "drafts without a verdict"
            self.acceptance.observe(choice.class_S, drafted_S, outcome.accepted_S)
            self._observed += 1
            num_accepted = int(outcome.accepted_S.sum())
        lookup_s = outcome.lookup_s or (0.0,) * len(outcome.propose_s)
        for p, (cost, seconds, looking_s) in enumerate(zip(self.proposing, outcome.propose_s, lookup_s)):
            own_S = drafted_S[choice.proposer_S == p] if num_drafts and choice is not None else self._no_choice
            cost.observe(num, own_S, seconds, looking_s)
        self._settle(batch, outcome, num_drafts, num_accepted)

    # -- on, off, probe

    def _decide(self, batch: Batch) -> bool:
        num = batch.num_sequences
        if num == 0 or batch.room <= 0 or self._num_steps < FIRST_PLAIN_STEPS or not self._is_allowed(batch):
            return False
        if not self.budget.is_open:
            self.budget.open(self._plain_s(batch))
        if self.is_on:
            return self._steps_since_plain < CHECK_STEPS and self._can_afford(batch)
        if self._num_steps < self._look_at and 4 * abs(num - self._looked_sequences) <= self._looked_sequences:
            return False
        return self._look(batch)

    def _is_allowed(self, batch: Batch) -> bool:
        if batch.num_queued == 0:
            return True
        more = min(max(batch.num_sequences, 1), batch.room)
        elasticity = self.cost.elasticity(batch.num_sequences, batch.kv_tokens, batch.num_prefill, more)
        return elasticity < FREE_ELASTICITY

    def _can_afford(self, batch: Batch) -> bool:
        """Whether the budget allows any drafts at all; while it does not, on is as good as off."""
        if self.budget.affordable_s > self._lookup_s(batch.num_sequences):
            return True
        self._go_off()
        return False

    def _look(self, batch: Batch) -> bool:
        """While off: go on, probe, or look again later."""
        self._forget()
        self._looked_sequences = batch.num_sequences
        if self._expected_gain(batch, self._present_values(), hopeful=False) > MIN_GAIN:
            self.is_on = True
            self._look_steps = LOOK_STEPS
            return True
        if self._expected_gain(batch, self._hopeful_values(), hopeful=True) > MIN_GAIN:
            self._probing = True
            return True
        self._look_later()
        return False

    def _look_later(self) -> None:
        self._look_at = self._num_steps + self._look_steps
        self._look_steps = min(2 * self._look_steps, MAX_LOOK_STEPS)

    def _after_try(self, drafted: bool) -> None:
        """A probe asked for candidates: it is over when some were drafted, or after enough tries."""
        self._tries += 1
        if drafted or self._tries == PROBE_TRIES:
            self._tries = 0
            self._look_later()

    def _keeps_on(self, num_sequences: int, split: Split, lookup_s: float) -> bool:
        """Average this step's expected gain in; goes off when the average does not pay."""
        value_s = split.expected_tokens / num_sequences * split.plain_s
        spent_s = split.seconds + lookup_s
        if not self._spent_s:  # the first step since it went on
            self._value_s, self._spent_s = (1.0 + MIN_GAIN) * spent_s, spent_s
        self._value_s += (value_s - self._value_s) / GAIN_STEPS
        self._spent_s += (spent_s - self._spent_s) / GAIN_STEPS
        if self._value_s >= (1.0 + KEEP_GAIN) * self._spent_s:
            return True
        self._go_off()
        return False

    def _go_off(self) -> None:
        self.is_on = False
        self._value_s = self._spent_s = 0.0
        self._forgotten_at = self._num_steps
        self._look_later()

    def _forget(self) -> None:
        """Only while off: while on, what is seen replaces what was seen."""
        self.acceptance.forget(self._num_steps - self._forgotten_at)
        self._forgotten_at = self._num_steps
        self._observed = REFRESH_STEPS

    # -- expectations

    def _present_values(self) -> Values:
        """Of the acceptance as it is estimated; reckoned in each step as long as little was seen."""
        if self._observed >= min(REFRESH_STEPS, 1 + self._num_steps // 16):
            self._observed = 0
            self._values = Values(self.acceptance.probability(), self.acceptance.proposer_C)
        return self._values

    def _hopeful_values(self) -> Values:
        return Values(self.acceptance.upper(DEVIATIONS), self.acceptance.proposer_C)

    def _expected_gain(self, batch: Batch, values: Values, hopeful: bool) -> float:
        """Gain over plain steps of the best option that the budget allows, with the candidates that there were lately
        or, hopeful, with those that there could be."""
        num, lookup_s = batch.num_sequences, self._lookup_s(batch.num_sequences)
        best = 0.0
        for option in self._options:
            share_CK = np.maximum(option.share_CK, option.hoped_CK) if hopeful else option.share_CK
            present = 1.0 if hopeful else option.present
            split = self._split(batch, share_CK * num, values, lookup_s)
            if split.num_drafts:
                more_s = (split.expected_tokens / num - 1.0) * split.plain_s
                spent_s = split.plain_s + present * (split.seconds - split.plain_s) + lookup_s
                best = max(best, (split.plain_s + present * more_s) / spent_s - 1.0)
        return best

    def _split(self, batch: Batch, deep_CK: np.ndarray, values: Values, lookup_s: float) -> Split:
        extra_s = self.budget.affordable_s - lookup_s
        num, curve_s_D = batch.num_sequences, self._curve(batch)
        return best_split(num, deep_CK, values, curve_s_D, self.proposing, extra_s, lookup_s)

    def _curve(self, batch: Batch) -> np.ndarray:
        """Seconds by number of drafts, at the present speed. Near contexts share a curve."""
        num = batch.num_sequences
        if self._curves_version != self.cost.version or len(self._curves) >= MAX_CURVES:
            self._curves.clear()
            self._curves_version = self.cost.version
        context = max(batch.kv_tokens / num, 1.0)
        nearest = round(CONTEXT_STEPS * math.log2(context))
        most = min(num * self.max_drafts, batch.room)
        key = (num, nearest, batch.num_prefill, most)
        curve_s_D = self._curves.get(key)
        if curve_s_D is None:
            kv_tokens = int(num * 2.0 ** (nearest / CONTEXT_STEPS))
            curve_s_D = self._curves[key] = self.cost.curve_s(num, kv_tokens, batch.num_prefill, most)
        return curve_s_D * self.cost.speed

    def _plain_s(self, batch: Batch) -> float:
        return self.cost.step_s(batch.num_sequences, batch.kv_tokens, batch.num_prefill)

    def _lookup_s(self, num_sequences: int) -> float:
        return sum(cost.lookup_s(num_sequences) for cost in self.proposing)

    def _option(self, proposers: tuple[int, ...]) -> _Option:
        """Before any was asked: everybody has all candidates, of the middle bucket of the last proposer."""
        share_CK = np.zeros((self.acceptance.num_classes, self.max_drafts))
        own = np.flatnonzero(self.acceptance.proposer_C == proposers[-1])
        share_CK[own[len(own) // 2]] = 1.0
        return _Option(proposers, share_CK, share_CK)

    # -- accounts

    def _settle(self, batch: Batch, outcome: Outcome, num_drafts: int, num_accepted: int) -> None:
        num, counts, b = batch.num_sequences, self._counts, bucket_of(batch.num_sequences)
        plain_s = self._plain_s(batch)
        if not self.budget.is_open:
            self.budget.open(plain_s)
        propose_s = sum(outcome.propose_s)
        gained_s = -propose_s
        counts.on_steps[b] += self.is_on
        counts.spent_us[b] += round(propose_s * 1e6)
        if num_drafts:
            expected_s = self.cost.step_s(num, batch.kv_tokens, batch.num_prefill, num_drafts)
            step_s = min(max(outcome.step_s, expected_s / TIME_TRUST), expected_s * TIME_TRUST)
            value_s = plain_s * outcome.num_generated / num
            gained_s += value_s - step_s
            if self._probing and gained_s > 0.0:  # it paid: look again at once
                self._look_at, self._look_steps = self._num_steps, LOOK_STEPS
            self._steps_since_plain += 1
            counts.drafted_steps[b] += 1
            counts.probe_steps[b] += self._probing
            counts.drafted_sequences[b] += num
            counts.drafted_step_tokens[b] += outcome.num_generated
            counts.draft_tokens[b] += num_drafts
            counts.accepted_tokens[b] += num_accepted
            counts.spent_us[b] += round(step_s * 1e6)
            counts.plain_us[b] += round(value_s * 1e6)
        else:
            self._steps_since_plain = 0
            counts.plain_steps[b] += 1
            counts.plain_sequences[b] += num
        self.budget.settle(outcome.step_s + propose_s, gained_s, plain_s)
