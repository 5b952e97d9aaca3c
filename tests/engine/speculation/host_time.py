"""What the policy itself takes of a step, in processor time: the simulation charges as much.

`python -m tests.engine.speculation.host_time` runs a policy through jobs as long as those of the grid, from their first
step, and the same loop without it. The least of several repetitions counts: other programs only add.
"""

import time
from collections.abc import Callable

import numpy as np

from pipeline.engine.drafts.policy import DraftPolicy, FixedDrafts, Offer, StepFacts, StepOutcome, Verdict
from pipeline.engine.speculation.bandit import MeasuredDrafts

STEPS, STEP_NS, MOST, REPETITIONS = 1500, 10_000_000, 8, 40
SIZES = (1, 8, 64)  # sequences at once


class Timed:
    """A loop of steps. has_policy: else one is asked that does nothing."""

    def __init__(self, num: int, accepted: int, has_policy: bool) -> None:
        self.now_ns = self.drafted = 0
        self.num, self.accepted = num, accepted
        policy: DraftPolicy = MeasuredDrafts([self.replay], MOST, self.clock)
        for slot in range(num):
            policy.admitted(slot)
        if not has_policy:
            policy = FixedDrafts(MOST)
        slot_S, count_S, accepted_S = np.arange(num), np.full(num, MOST), np.full(num, accepted)
        offer = Offer(slot_S, count_S, count_S, np.zeros((num, 0), dtype=np.int64))
        begun_s = time.process_time()
        for _ in range(STEPS):
            facts, verdict = StepFacts(num, 0, 1000, 1), None
            number = policy.select(facts)
            if number is not None and accepted:
                depth_S = policy.depths(facts, offer)
                verdict = Verdict(slot_S, depth_S, np.minimum(depth_S, accepted_S))
                self.drafted += 1
            self.now_ns += STEP_NS
            policy.observe(StepOutcome(facts, num if verdict is None else num * (1 + accepted), verdict))
        self.took_s = time.process_time() - begun_s

    def clock(self) -> int:
        time.perf_counter_ns()  # what reading it takes is the policy's
        return self.now_ns

    def replay(self) -> tuple[np.ndarray, np.ndarray]:
        self.now_ns += 1000 * STEP_NS  # so that there is hardly another one
        return np.arange(8) % self.num, np.full(8, self.accepted)


def step_us(num: int, accepted: int) -> tuple[float, float]:
    """Microseconds of a step, and the share of the steps that drafted. accepted: of each sequence's drafts."""
    runs = [[Timed(num, accepted, has_policy) for has_policy in (True, False)] for _ in range(REPETITIONS)]
    with_it, without = (min(run.took_s for run in each) for each in zip(*runs))
    return 1e6 * (with_it - without) / STEPS, runs[0][0].drafted / STEPS


def least_us(call: Callable[[], object]) -> float:
    took_s = []
    for _ in range(REPETITIONS):
        begun_s = time.process_time()
        for _ in range(STEPS):
            call()
        took_s.append(time.process_time() - begun_s)
    return 1e6 * min(took_s) / STEPS


def replay_us() -> float:
    """Microseconds that a replay takes beside its look-ups."""
    policy = MeasuredDrafts([lambda: (np.arange(12) % 8, np.arange(12) % MOST)], MOST, lambda: 0)
    for slot in range(8):
        policy.admitted(slot)
    return least_us(lambda: (policy._replay(0), policy._yields(0)))


if __name__ == "__main__":
    print(f"a replay: {replay_us():.1f} us")
    for accepted in (0, 4):
        for num in SIZES:
            us, share = step_us(num, accepted)
            print(f"{num} at once, {share:.0%} of the steps drafted: {us:.2f} us a step")
