"""Jobs on simulated machines: with the controller, plain, and with every fixed number of drafts.

`python -m tests.engine.speculation.simulation` runs all machines, texts and batch sizes and prints the worst ones; with
a number behind it, as many times with other noise and luck.
"""

import multiprocessing
import sys
from dataclasses import dataclass

import numpy as np

from pipeline.engine.drafting import MOST_SHADOWED
from pipeline.engine.propose.draft_model import RECENT_TOKENS
from pipeline.engine.propose.replay import MOST_TOKENS, TELLING
from pipeline.engine.speculation.acceptance import DRAFT_MODEL, NGRAM
from pipeline.engine.speculation.controller import Controller
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.messages import Batch, Candidates, Outcome
from pipeline.engine.speculation.proposing import ProposingCost
from tests.engine.speculation.machines import MACHINES, TEXTS, Machine, Situation, Text

MAX_DRAFTS = 8
FIXED = (1, 2, 3, 4, 6, 8)
PROMPT = 300
LARGEST_BATCH = 256
HOST_S = 100e-6  # that the controller says a step took which it looks at while off; the run is not charged for it


@dataclass(frozen=True)
class Run:
    """Simulated seconds of a job, its tokens and its steps."""

    seconds: float
    tokens: int
    steps: int
    drafted_steps: int


class Noise:
    """What a clock says on a shared machine: a few percent around the truth, and now and then several times as much."""

    def __init__(self, seed: int, spread: float = 0.03, outliers: float = 0.02) -> None:
        self.rng, self.spread, self.outliers = np.random.default_rng(seed), spread, outliers

    def __call__(self, seconds: float) -> float:
        factor = float(np.exp(self.spread * self.rng.standard_normal()))
        if self.rng.random() < self.outliers:
            factor *= 2.0 + 8.0 * float(self.rng.random())
        return seconds * factor


def measured(machine: Machine, noise: Noise, max_tokens: int = 1024) -> StepCost:
    """The table that start-up would make of this machine."""
    now = 0.0

    def run_step(tokens: int, sequences: int, context: int) -> None:
        nonlocal now
        now += noise(machine.step_s(tokens, sequences, sequences * context, tokens > sequences))

    padded_to = machine.padded_to
    return StepCost.measure(run_step, max_tokens, (64, 1024), padded_to=padded_to, budget_s=1e9, clock=lambda: now)


def controller_for(machine: Machine, noise: Noise) -> Controller:
    cost = measured(machine, noise)
    if machine.pass_s is None:
        return Controller(cost, [NGRAM], [ProposingCost()], MAX_DRAFTS)
    counts = [1, 16, 256]
    proposing = ProposingCost(0.0, 0.0, counts, [machine.pass_s(count) for count in counts])
    return Controller(cost, [DRAFT_MODEL], [proposing], MAX_DRAFTS)


def job(batch: int, num_steps: int, has_tail: bool, seed: int = 0) -> np.ndarray:
    """Lengths of rows that keep `batch` sequences busy for about `num_steps` plain steps."""
    if not has_tail:
        return np.full(batch, num_steps)
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(num_steps / 6), 0.8, 4 * batch), 4, num_steps)
    return lengths.astype(np.int64)


class Shadow:
    """What rows that draft nothing were offered, until the tokens have come; see `ShadowOffers`."""

    def __init__(self, row_S: np.ndarray, progress_S: np.ndarray, count_S: np.ndarray, accepts_SK: np.ndarray, rng):
        self.row_S, self.known_S, self.count_S = row_S, progress_S, count_S
        self.match_S = np.where(accepts_SK[:, 0] > 0.5, 7, 3)
        self.agreed_S = (rng.random(accepts_SK.shape) < accepts_SK).cumprod(axis=1).sum(axis=1)

    def tell(self, controller: Controller, progress_R: np.ndarray, length_R: np.ndarray) -> bool:
        """Whether all tokens have come, and then tell the controller of them."""
        come_S = progress_R[self.row_S] - self.known_S
        has_ended_S = progress_R[self.row_S] >= length_R[self.row_S]
        if not (has_ended_S | (come_S >= self.count_S)).all():
            return False
        decided_S = np.minimum(come_S, self.count_S)
        candidates = Candidates(self.count_S, self.match_S)
        controller.foretold(candidates, decided_S, np.minimum(self.agreed_S, decided_S), is_rest=True)
        return True


def replayed(
    text: Text, row_S: np.ndarray, looked_R: np.ndarray, progress_R: np.ndarray, length_R: np.ndarray, rng
) -> tuple[np.ndarray, ...]:
    """Of each offer its count, match, tokens decided on and right ones: what `replay` gives for these rows, which were
    looked at up to looked_R tokens."""
    found: list[tuple[int, ...]] = []
    for row in row_S.tolist():
        at = max(int(looked_R[row]), int(progress_R[row]) - MOST_TOKENS)
        while at < progress_R[row]:
            accepts_K = text.accepts(Situation(np.array([row]), np.array([at]), True), MAX_DRAFTS)[0]
            most = min(int(length_R[row]) - at - 1, MAX_DRAFTS)
            count = most if rng.random() < text.available else 0
            agreed = int((rng.random(MAX_DRAFTS) < accepts_K).cumprod().sum())
            decided = min(count, int(progress_R[row]) - at)
            agreed = min(agreed, decided)
            is_cut = agreed == decided < count
            if not is_cut or decided >= TELLING:
                found.append((count, 7 if accepts_K[0] > 0.5 else 3, decided, agreed))
            if is_cut:
                break
            at += agreed + 1
        looked_R[row] = min(at, progress_R[row])
    return tuple(np.array(found, dtype=np.int64).reshape(-1, 4).T)


def simulate(
    machine: Machine,
    text: Text,
    length_R: np.ndarray,
    max_batch: int,
    policy: Controller | int,
    seed: int = 0,
    noise: Noise | None = None,
) -> Run:
    """Run all rows, `max_batch` at a time. `policy`: a controller, or the drafts of every sequence in every step.

    The controller sees noisy times; the run is charged the true ones, those of its own proposing too.
    """
    rng, shadow_rng = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    shadow: Shadow | None = None
    shadow_s, looked_R = 0.0, np.ones(len(length_R), dtype=np.int64)
    waiting = list(range(len(length_R)))[::-1]
    row_S = np.zeros(0, dtype=np.int64)
    progress_R = np.zeros(len(length_R), dtype=np.int64)
    seconds, steps, drafted_steps, drafted_before = 0.0, 0, 0, False
    grounds_R, grounds_at_R = np.zeros(len(length_R), dtype=np.int64), np.zeros(len(length_R), dtype=np.int64)
    while waiting or len(row_S):
        while waiting and len(row_S) < max_batch:
            row_S = np.append(row_S, waiting.pop())
        num, kv_tokens = len(row_S), int((PROMPT + progress_R[row_S]).sum())
        batch = Batch(num, kv_tokens, room=1 << 20, num_waiting=len(waiting), slot_S=row_S)
        left_S = length_R[row_S] - progress_R[row_S] - 1
        passes = isinstance(policy, Controller) and policy.passes(num)
        asked = (
            policy > 0
            if not isinstance(policy, Controller)
            else not passes and policy.wants_candidates(batch) is not None
        )
        drafted_S = accepted_S = np.zeros(num, dtype=np.int64)
        propose_s = 0.0
        if asked:
            looked_R[row_S] = progress_R[row_S]
            accepts_SK = text.accepts(Situation(row_S, progress_R[row_S], drafted_before), MAX_DRAFTS)
            available_S = np.where(rng.random(num) < text.available, np.minimum(left_S, MAX_DRAFTS), 0)
            if machine.pass_s is None:
                match_S = np.where(accepts_SK[:, 0] > 0.5, 7, 3)
            else:  # as the draft model's proposer says it
                match_S = np.where(progress_R[row_S] - grounds_at_R[row_S] <= RECENT_TOKENS, grounds_R[row_S], 0)
            if isinstance(policy, Controller):
                drafted_S = policy.choose(batch, Candidates(available_S, match_S)).length_S
                if shadow is None and policy.shadows_rest():
                    rest = np.flatnonzero((drafted_S == 0) & (available_S > 0))[:MOST_SHADOWED]
                    parts = (part[rest] for part in (row_S, progress_R[row_S], available_S, accepts_SK))
                    shadow = Shadow(*parts, shadow_rng) if len(rest) else None
            else:
                drafted_S = np.minimum(available_S, policy)
            assert (drafted_S <= available_S).all()
            alike_SK = (rng.random((num, MAX_DRAFTS)) < accepts_SK).cumprod(axis=1)
            accepted_S = np.minimum(alike_SK.sum(axis=1), drafted_S)
            propose_s = machine.lookup_s(num)
            if machine.pass_s is not None:
                propose_s += sum(machine.pass_s(int((drafted_S > k).sum())) for k in range(int(drafted_S.max())))
        some = drafted_S > 0
        grounds_R[row_S[some]], grounds_at_R[row_S[some]] = 1 + accepted_S[some], progress_R[row_S[some]]
        num_drafts = int(drafted_S.sum())
        step_s = machine.step_s(num + num_drafts, num, kv_tokens, num_drafts > 0)
        seconds += step_s + propose_s
        steps += 1
        drafted_before = num_drafts > 0
        drafted_steps += drafted_before
        progress_R[row_S] += 1 + accepted_S
        if isinstance(policy, Controller) and not passes:
            observed_s = noise(step_s) if noise else step_s
            proposed_s = noise(propose_s) if noise else propose_s
            generated = num + int(accepted_S.sum())
            if num_drafts:
                policy.observe(batch, Outcome(observed_s, generated, drafted_S, accepted_S, proposed_s))
            else:
                policy.observe(batch, Outcome(observed_s, generated, propose_s=proposed_s, host_s=HOST_S + shadow_s))
                shadow_s = 0.0
        row_S = row_S[progress_R[row_S] < length_R[row_S]]
        if isinstance(policy, Controller) and not passes:
            if shadow is not None and shadow.tell(policy, progress_R, length_R):
                shadow = None
            if policy.shadows(batch) is not None:
                asked_S = np.sort(row_S)[:MOST_SHADOWED]
                parts = replayed(text, asked_S, looked_R, progress_R, length_R, shadow_rng)
                shadow_s = machine.lookup_s(len(asked_S)) * max(len(parts[0]) / max(len(asked_S), 1), 1.0)
                seconds += shadow_s
                if len(parts[0]):
                    policy.foretold(Candidates(parts[0], parts[1]), parts[2], parts[3], is_rest=False)
    assert (progress_R == length_R).all()
    return Run(seconds, int(length_R.sum()), steps, drafted_steps)


@dataclass(frozen=True)
class Comparison:
    """Times of one job: plain, controlled once for each clock, and the best fixed number of drafts (0 among them)."""

    name: str
    plain_s: float
    controlled_s: tuple[float, ...]
    best_s: float
    best_fixed: int

    @property
    def loss(self) -> float:
        """With the worst clock."""
        return max(self.controlled_s) / self.plain_s - 1.0

    @property
    def behind_best(self) -> float:
        """On average: what a clock says in the first steps may make one run late."""
        return float(np.mean(self.controlled_s)) / self.best_s - 1.0

    def __str__(self) -> str:
        speeds = ", ".join(f"{self.plain_s / seconds:.3f}" for seconds in self.controlled_s)
        return (
            f"{self.name}: {speeds}x plain, best fixed {self.best_fixed} "
            f"{self.plain_s / self.best_s:.3f}x, behind it by {self.behind_best:+.1%}"
        )


def compare(
    machine: Machine,
    text: Text,
    batch: int,
    num_steps: int,
    has_tail: bool = False,
    fixed: tuple[int, ...] = FIXED,
    clocks: int = 2,
) -> Comparison:
    """`clocks`: runs with a controller, each with other noise in the times that it sees and other luck of the text; the
    fixed numbers have the same luck."""
    length_R = job(batch, num_steps, has_tail)
    controlled, times = [], dict.fromkeys((0, *fixed), 0.0)
    for clock in range(clocks):
        noise = Noise(seed=batch + 1000 * clock)
        controller = controller_for(machine, noise)
        controlled.append(simulate(machine, text, length_R, batch, controller, clock, noise).seconds)
        for k in times:
            times[k] += simulate(machine, text, length_R, batch, k, clock).seconds / clocks
    best = min(times, key=lambda k: times[k])
    name = f"{machine.name}, {text.name}, batch {batch}{', with tail' if has_tail else ''}"
    return Comparison(name, times[0], tuple(controlled), times[best], best)


def _compared(job: tuple[int, int, int, bool, int]) -> Comparison:
    machine, text, batch, has_tail, clocks = job
    return compare(MACHINES[machine], TEXTS[text], batch, 1500, has_tail=has_tail, clocks=clocks)


def main(clocks: int) -> None:
    jobs = [
        (machine, text, batch, has_tail, clocks)
        for machine in range(len(MACHINES))
        for text in range(len(TEXTS))
        for batch, has_tail in ((1, False), (4, False), (16, False), (64, False), (256, False), (32, True))
    ]
    done = []
    with multiprocessing.Pool() as pool:
        for compared in pool.imap_unordered(_compared, jobs):
            done.append(compared)
            print(compared, flush=True)
    lost, behind = sum(c.loss > 0.01 for c in done), sum(c.behind_best > 0.05 for c in done)
    print(f"\n{len(done)} jobs: over 1% slower than plain {lost}, over 5% behind the best fixed choice {behind}")
    done.sort(key=lambda c: -c.loss)
    print("\nworst against plain:", *done[:10], sep="\n")
    done.sort(key=lambda c: -c.behind_best)
    print("\nfurthest behind the best fixed choice:", *done[:25], sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
