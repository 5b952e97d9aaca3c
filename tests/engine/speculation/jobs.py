"""Jobs on a simulated clock: a formula gives the time of a step, a seed the accepted drafts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.engine.drafts.policy import AcceptanceCounts, Proposal, StepFacts, StepOutcome
from pipeline.engine.speculation.counts import SpeculationCounts
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts

MAX_DRAFTS = 6  # drafts of a sequence
Chance = Callable[[int, int], np.ndarray | float]
"""Map a step's number and the number of sequences to the probability that a draft after right ones is right."""


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: a minimum, and those added by drafting, by each token and by each prompt token.

    noise: relative, of each step.
    """

    step_s: float = 0.008
    drafting_s: float = 0.0
    token_s: float = 20e-6
    prompt_s: float = 0.0
    noise: float = 0.03

    def seconds(self, num_tokens: int, num_prompt: int, has_drafts: bool) -> float:
        return self.step_s + self.drafting_s * has_drafts + self.token_s * num_tokens + self.prompt_s * num_prompt


class Job:
    """Job of sequences with the same steps. policy: None for plain steps; "forced" drafts in every step."""

    def __init__(
        self,
        machine: Machine,
        chance: Chance,
        num: int = 8,
        policy: str | None = "auto",
        num_prompt: int = 0,
        seed: int = 0,
        in_flight: int = 0,
    ) -> None:
        self.machine, self.chance, self.num = machine, chance, num
        self.num_prompt, self.in_flight = num_prompt, in_flight
        self.rng, self.now_s, self.true_s, self.tokens = np.random.default_rng(seed), 0.0, 0.0, 0.0
        self.steps = self.drafted = 0
        self.forced = policy == "forced"
        self.policy = MeasuredDrafts(MAX_DRAFTS, lambda: round(1e9 * self.now_s)) if policy == "auto" else None
        self.waiting: list[tuple[StepOutcome, float]] = []
        for slot in range(num):
            if self.policy:
                self.policy.admitted(slot)

    def step(
        self, num: int | None = None, room: int = 10_000, num_prompt: int | None = None, stall_s: float = 0.0
    ) -> bool:
        """Return whether the step had drafts. stall_s: time of other work of the machine meanwhile."""
        num = self.num if num is None else num
        num_prompt = self.num_prompt * (self.steps % 3 == 0) if num_prompt is None else num_prompt
        facts, slot_S = StepFacts(num, num_prompt, room), np.arange(num)
        drafted_S = np.zeros(num, dtype=np.int64)
        if self.forced or (self.policy is not None and self.policy.select(facts)):
            proposal = Proposal(slot_S, np.full(num, MAX_DRAFTS), slot_S, np.zeros((num, 0), dtype=np.int64))
            drafted_S = proposal.count_S if self.policy is None else self.policy.lengths(facts, proposal)
        chance_S1 = np.broadcast_to(self.chance(self.steps, num), num)[:, None]
        right_SK = (self.rng.random((num, MAX_DRAFTS)) < chance_S1).cumprod(axis=1)
        accepted_S = np.minimum(right_SK.sum(axis=1), drafted_S)
        (some,) = drafted_S.nonzero()
        acceptance = AcceptanceCounts(slot_S[some], drafted_S[some], accepted_S[some]) if len(some) else None
        true_s = self.machine.seconds(num + int(drafted_S.sum()), num_prompt, len(some) > 0)
        elapsed_s = true_s * float(np.exp(self.machine.noise * self.rng.standard_normal())) + stall_s
        outcome = StepOutcome(facts, num + int(accepted_S.sum()), acceptance)
        self.waiting.append((outcome, elapsed_s))
        while len(self.waiting) > self.in_flight:
            observed, seconds = self.waiting.pop(0)
            self.now_s += seconds
            if self.policy is not None:
                self.policy.observe(observed)
        self.steps, self.drafted = self.steps + 1, self.drafted + (len(some) > 0)
        self.tokens, self.true_s = self.tokens + outcome.num_generated / num, self.true_s + true_s
        return len(some) > 0

    def share(self, num_steps: int, **options: int) -> float:
        """Return the share of these steps that had drafts."""
        return sum(self.step(**options) for _ in range(num_steps)) / num_steps

    @property
    def counts(self) -> SpeculationCounts:
        assert self.policy is not None
        return SpeculationCounts.from_flat(self.policy.counters())


def speed(machine: Machine, chance: Chance, policy: str | None, num_tokens: int = 1500, **options: int) -> float:
    """Return tokens a second of a job in which each sequence generates `num_tokens`."""
    job = Job(machine, chance, policy=policy, **options)
    while job.tokens < num_tokens:
        job.step()
    return job.tokens / job.true_s
