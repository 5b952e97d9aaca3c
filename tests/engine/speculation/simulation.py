"""Jobs on simulated machines: with the measuring policy, plain, and with every fixed number of drafts.

`python -m tests.engine.speculation.simulation` runs all machines, texts and batch sizes (540 jobs) on all cores and
prints the worst ones; with a number after it, as many times with other noise and luck.

The policy reads a clock that runs on with all that the job does: steps, look-ups, draft passes, replays, and what the
policy itself takes. Losses are counted on the same clock, but without its noise.
"""

import multiprocessing
import sys
from dataclasses import dataclass

import numpy as np

from pipeline.engine.drafts.policy import Offer, StepFacts, StepOutcome, Verdict
from pipeline.engine.drafts.replay import MOST_REPLAYED, MOST_TOKENS
from pipeline.engine.speculation.bandit import MeasuredDrafts
from tests.engine.speculation.machines import MACHINES, TEXTS, Machine, Situation, Text

MAX_DRAFTS = 8
FIXED = (1, 2, 3, 4, 6, 8)
PROMPT = 300  # tokens
STEP_TOKENS = 2048
PLAIN_HOST_S, DRAFTED_HOST_S, REPLAY_HOST_S = 2.1e-6, 22e-6, 21e-6  # of the policy, as host_time.py measures it
SHAPES = ((1, False), (4, False), (16, False), (64, False), (256, False), (32, True))  # sequences at once, has a tail


@dataclass(frozen=True)
class Run:
    """Simulated seconds of a job, its tokens and its steps."""

    seconds: float
    tokens: int
    steps: int
    drafted_steps: int


class Noise:
    """What a step takes on a shared machine: a few percent around its time, now and then several times as much, and a
    drift."""

    def __init__(self, seed: int, spread: float = 0.03, outliers: float = 0.02, drift: float = 0.1) -> None:
        self.rng, self.spread, self.outliers, self.drift = np.random.default_rng(seed), spread, outliers, drift
        self.phase, self.steps = float(self.rng.random()), 0

    def __call__(self, seconds: float) -> float:
        self.steps += 1
        factor = float(np.exp(self.spread * self.rng.standard_normal()))
        factor *= 1.0 + self.drift * float(np.sin(self.steps / 400 + 6.3 * self.phase))
        if self.rng.random() < self.outliers:
            factor *= 2.0 + 8.0 * float(self.rng.random())
        return seconds * factor


def job(batch: int, num_steps: int, has_tail: bool, seed: int = 0) -> np.ndarray:
    """Lengths of rows that keep `batch` sequences busy for about `num_steps` plain steps."""
    if not has_tail:
        return np.full(batch, num_steps)
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(num_steps / 6), 0.8, 4 * batch), 4, num_steps)
    return lengths.astype(np.int64)


class Simulation:
    """All rows, `max_batch` at a time. `policy`: "auto", or the drafts of every sequence in every step by the machine's
    first proposer."""

    def __init__(self, machine: Machine, text: Text, length_R: np.ndarray, policy: str | int, seed: int) -> None:
        self.machine, self.text, self.length_R = machine, text, length_R
        self.rng, self.replay_rng, self.noise = (
            np.random.default_rng(seed),
            np.random.default_rng(seed + 1),
            Noise(seed),
        )
        self.seconds = self.clock_s = 0.0  # without and with noise
        self.progress_R = np.zeros(len(length_R), dtype=np.int64)
        self.looked_R = np.zeros(len(length_R), dtype=np.int64)
        self.passes_at_R = np.zeros(len(length_R), dtype=np.int64)  # tokens that the draft model has computed
        self.row_S = np.zeros(0, dtype=np.int64)
        self.slot_of: dict[int, int] = {}
        self.drafted_before = False
        self.fixed = policy if isinstance(policy, int) else 0
        self.policy: MeasuredDrafts | None = None
        if policy == "auto":
            replays = [self.replay if pass_s is None else None for pass_s in machine.proposers]
            self.policy = MeasuredDrafts(replays, MAX_DRAFTS, clock=lambda: round(1e9 * self.clock_s))

    def run(self, max_batch: int) -> Run:
        waiting = list(range(len(self.length_R)))[::-1]
        steps = drafted_steps = 0
        slot_of = self.slot_of
        free = list(range(max_batch))[::-1]
        prompts: dict[int, int] = {}  # tokens of admitted rows that are not computed yet
        while waiting or len(self.row_S) or prompts:
            while waiting and free:
                row = waiting.pop()
                slot_of[row], prompts[row] = free.pop(), PROMPT if self.machine.prefill_s else 0
                if self.policy:
                    self.policy.admitted(slot_of[row])
            room, num_prefill = STEP_TOKENS - len(self.row_S), 0
            for row in list(prompts):
                part = min(prompts[row], room)
                room, num_prefill, prompts[row] = room - part, num_prefill + part, prompts[row] - part
                if not prompts[row]:
                    del prompts[row]
                    self.row_S = np.append(self.row_S, row)
            if len(self.row_S):
                drafted_steps += self.step(num_prefill, room, len(waiting))
            else:
                self.spend(self.machine.prefill_s * num_prefill)
            steps += 1
            ended_S = self.progress_R[self.row_S] >= self.length_R[self.row_S]
            for row in self.row_S[ended_S].tolist():
                free.append(slot_of.pop(row))
            self.row_S = self.row_S[~ended_S]
        assert (self.progress_R == self.length_R).all()
        return Run(self.seconds, int(self.length_R.sum()), steps, drafted_steps)

    def spend(self, seconds: float, is_noisy: bool = True) -> None:
        self.seconds += seconds
        self.clock_s += self.noise(seconds) if is_noisy else seconds

    def step(self, num_prefill: int, room: int, num_waiting: int) -> bool:
        row_S, machine, num = self.row_S, self.machine, len(self.row_S)
        facts = StepFacts(num, num_prefill, room, num_waiting)
        number = self.policy.select(facts) if self.policy else 0 if self.fixed and room else None
        drafted_S = accepted_S = np.zeros(num, dtype=np.int64)
        slot_S = np.array([self.slot_of[row] for row in row_S.tolist()])
        propose_s = 0.0
        if number is not None:
            pass_s = machine.proposers[number]
            accepts_SK = self.text.accepts(Situation(row_S, self.progress_R[row_S], self.drafted_before), MAX_DRAFTS)
            left_S = self.length_R[row_S] - self.progress_R[row_S] - 1
            available_S = np.where(self.rng.random(num) < self.text.available, np.minimum(left_S, MAX_DRAFTS), 0)
            if pass_s is None:
                propose_s += machine.lookup_s(num)
                self.looked_R[row_S] = self.progress_R[row_S]
            else:
                behind = int((PROMPT + self.progress_R[row_S] - self.passes_at_R[row_S]).clip(0).sum())
                propose_s += machine.prefill_s * machine.draft_share * min(behind, 512)
                self.passes_at_R[row_S] = PROMPT + self.progress_R[row_S] if behind <= 512 else 0
            offer = Offer(slot_S, available_S, np.zeros(num, dtype=np.int64), np.zeros((num, 0), dtype=np.int64))
            drafted_S = self.policy.depths(facts, offer) if self.policy else np.minimum(available_S, self.fixed)
            if int(drafted_S.sum()) > room:
                drafted_S = np.minimum(drafted_S, room // num)
            if pass_s is not None:
                propose_s += sum(pass_s(int((drafted_S > k).sum())) for k in range(int(drafted_S.max())))
            alike_SK = (self.rng.random((num, MAX_DRAFTS)) < accepts_SK).cumprod(axis=1)
            accepted_S = np.minimum(alike_SK.sum(axis=1), drafted_S)
        num_drafts, kv_tokens = int(drafted_S.sum()), int((PROMPT + self.progress_R[row_S]).sum())
        step_s = machine.step_s(num + num_drafts, num, kv_tokens, num_drafts > 0) + machine.prefill_s * num_prefill
        self.spend(step_s + propose_s)
        self.drafted_before = num_drafts > 0
        self.progress_R[row_S] += 1 + accepted_S
        if self.policy:
            self.spend(PLAIN_HOST_S if number is None else DRAFTED_HOST_S, is_noisy=False)
            (some,) = drafted_S.nonzero()
            verdict = Verdict(slot_S[some], drafted_S[some], accepted_S[some]) if len(some) else None
            self.policy.observe(StepOutcome(facts, num + int(accepted_S.sum()), verdict))
        return num_drafts > 0

    def replay(self) -> tuple[np.ndarray, np.ndarray]:
        """See `replay.replay`."""
        slots, found, calls = [], [], 0
        for row in np.sort(self.row_S)[:MOST_REPLAYED].tolist():
            at, own = max(int(self.looked_R[row]), int(self.progress_R[row]) - MOST_TOKENS), 0
            while at < self.progress_R[row]:
                accepts_K = self.text.accepts(Situation(np.array([row]), np.array([at]), True), MAX_DRAFTS)[0]
                count = MAX_DRAFTS if self.replay_rng.random() < self.text.available else 0
                agreed = min(int((self.replay_rng.random(MAX_DRAFTS) < accepts_K).cumprod().sum()), count)
                if at + agreed + 1 > self.progress_R[row]:
                    break
                found.append(agreed)
                slots.append(self.slot_of[row])
                at, own = at + agreed + 1, own + 1
            self.looked_R[row], calls = at, max(calls, own)
        self.spend(REPLAY_HOST_S + calls * self.machine.lookup_s(MOST_REPLAYED), is_noisy=False)
        return np.array(slots, dtype=np.int64), np.array(found, dtype=np.int64)


@dataclass(frozen=True)
class Comparison:
    """Times of one job: plain, by the policy once for each clock, and the best fixed number of drafts (or 0)."""

    name: str
    plain_s: float
    auto_s: tuple[float, ...]
    best_s: float
    best_fixed: int

    @property
    def loss(self) -> float:
        """With the worst clock."""
        return max(self.auto_s) / self.plain_s - 1.0

    @property
    def behind_best(self) -> float:
        """On average."""
        return float(np.mean(self.auto_s)) / self.best_s - 1.0

    def __str__(self) -> str:
        speeds = ", ".join(f"{self.plain_s / seconds:.3f}" for seconds in self.auto_s)
        return (
            f"{self.name}: {speeds}x plain, best fixed {self.best_fixed} "
            f"{self.plain_s / self.best_s:.3f}x, after it by {self.behind_best:+.1%}"
        )


def compare(
    machine: Machine, text: Text, batch: int, num_steps: int, has_tail: bool = False, clocks: int = 1
) -> Comparison:
    """`clocks`: runs of the policy, each with other noise and other luck of the text; the fixed numbers have the same
    luck."""
    length_R = job(batch, num_steps, has_tail)
    auto, times = [], dict.fromkeys((0, *FIXED), 0.0)
    for clock in range(clocks):
        seed = batch + 1000 * clock
        auto.append(Simulation(machine, text, length_R, "auto", seed).run(batch).seconds)
        for k in times:
            times[k] += Simulation(machine, text, length_R, k, seed).run(batch).seconds / clocks
    best = min(times, key=lambda k: times[k])
    name = f"{machine.name}, {text.name}, batch {batch}{', with tail' if has_tail else ''}"
    return Comparison(name, times[0], tuple(auto), times[best], best)


def _compared(job: tuple[int, int, int, bool, int]) -> Comparison:
    machine, text, batch, has_tail, clocks = job
    return compare(MACHINES[machine], TEXTS[text], batch, 1500, has_tail=has_tail, clocks=clocks)


def main(clocks: int) -> None:
    jobs = [(m, t, *shape, clocks) for m in range(len(MACHINES)) for t in range(len(TEXTS)) for shape in SHAPES]
    done = []
    with multiprocessing.Pool() as pool:
        for compared in pool.imap_unordered(_compared, jobs):
            done.append(compared)
    losses = [c.loss for c in done]
    print(f"{len(done)} jobs; against plain: mean {np.mean(losses):+.2%}, worst {max(losses):+.2%}")
    print(f"over 1% slower than plain {sum(loss > 0.01 for loss in losses)}, over 2% {sum(x > 0.02 for x in losses)}")
    print(f"mean loss of the slower ones {np.mean([max(x, 0) for x in losses]):.2%} over all jobs")
    gains = [
        (c.plain_s / np.mean(c.auto_s) - 1) / (c.plain_s / c.best_s - 1) for c in done if c.best_s < c.plain_s / 1.1
    ]
    behind = sum(c.behind_best > 0.05 for c in done)
    print(f"of the best fixed choice's gain, where it is over 10%: {np.mean(gains):.1%}; {behind} over 5% after it")
    done.sort(key=lambda c: -c.loss)
    print("\nworst against plain:", *done[:15], sep="\n")
    done.sort(key=lambda c: -c.behind_best)
    print("\nfurthest after the best fixed choice:", *done[:30], sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
