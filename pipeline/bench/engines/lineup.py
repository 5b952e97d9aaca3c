"""The contenders of `bench engine` in turn: a trial, then the counted rounds, tokens compared after each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipeline.bench.engines.agreement import Agreement, NextLogits, compare
from pipeline.bench.engines.contender import Ran, StaticBatches
from pipeline.bench.measure import Spread, alternating, ratio
from pipeline.bench.request_sets import BenchRequest

NEAR_BEST = 0.9  # static batch sizes whose trial came this near to the best one's are all run in the rounds
TRIAL = 0  # the number of the round before the counted ones

Sets = Mapping[str, Sequence[BenchRequest]]
"""`set N` and `one N`, a single request, of each round N."""

Run = Callable[[str], Ran]
"""Name of a set -> what became of it."""


@dataclass(frozen=True)
class Speed:
    """Of one contender: wanted tokens a second of the whole set and of one request alone, over the rounds.

    faster and single_faster: how many times as fast this engine was, round by round. cpu_ratio: how many times as much
    processor time as this engine the set took; other programs on the machine disturb it less. None for another process.
    agreement: its tokens with this engine's.
    """

    name: str
    tokens_per_s: Spread
    single_tokens_per_s: Spread
    faster: Spread | None
    single_faster: Spread | None
    cpu_ratio: Spread | None
    agreement: Agreement | None


class Lineup:
    """The contenders and what became of every set that each has run."""

    def __init__(self, sets: Sets, ours: str, run: Run, strict: bool, say: Callable[[str], None]) -> None:
        """`ours` is the one that the others are compared with. strict: the tokens of static batches must be its own,
        or part from them at near-ties.
        """
        self.sets, self.ours, self.strict, self.say = sets, ours, strict, say
        self.runs = {ours: run}
        self.trials: dict[int, float] = {}
        self._statics: list[StaticBatches] = []
        self._next_logits: NextLogits | None = None
        self._results: dict[str, dict[str, Ran]] = {}
        self._agreement: dict[str, Agreement] = {}

    def add(self, name: str, run: Run) -> None:
        self.runs[name] = run

    def add_statics(self, statics: list[StaticBatches], next_logits: NextLogits) -> None:
        """Static batches of several sizes, of which the best will count."""
        self._statics, self._next_logits = statics, next_logits
        for static in statics:
            self.add(static.name, lambda name, static=static: static.run(self.sets[name]))

    def trial(self) -> None:
        """A round that does not count: it warms all up, compares tokens and finds the static batch sizes worth it."""
        for name in self.runs:
            self._run(name, "set", TRIAL)
        self._compare(TRIAL)
        self.trials = {s.batch_size: self._results[s.name][f"set {TRIAL}"].tokens_per_s for s in self._statics}
        for static in self._statics:
            if self.trials[static.batch_size] < NEAR_BEST * max(self.trials.values()):
                del self.runs[static.name]

    def round(self, number: int) -> None:
        for name in alternating(list(self.runs), number)[-1]:
            self._run(name, "set", number)
            self._run(name, "one", number)
        self._compare(number)

    def ran(self, name: str, kind: str) -> list[Ran]:
        """Of the counted rounds, in their order."""
        return [ran for key, ran in self._results[name].items() if key.startswith(kind) and key != f"set {TRIAL}"]

    def speeds(self) -> tuple[Speed, ...]:
        """This engine first; of the static batches only the best."""
        static = [static.name for static in self._statics if static.name in self.runs]
        best = max(static, key=lambda name: median(ran.tokens_per_s for ran in self.ran(name, "set")), default=None)
        names = [name for name in self.runs if name not in static or name == best]
        return tuple(self._speed(name) for name in names)

    def _speed(self, name: str) -> Speed:
        def speeds(of: str, kind: str) -> list[float]:
            return [ran.tokens_per_s for ran in self.ran(of, kind)]

        other = name != self.ours
        return Speed(
            name,
            Spread.of(speeds(name, "set")),
            Spread.of(speeds(name, "one")),
            ratio(speeds(self.ours, "set"), speeds(name, "set")) if other else None,
            ratio(speeds(self.ours, "one"), speeds(name, "one")) if other else None,
            self._cpu_ratio(name) if other else None,
            self._agreement[name] if other else None,
        )

    def _cpu_ratio(self, name: str) -> Spread | None:
        """Processor time a token, theirs over this engine's."""

        def tokens_per_cpu_s(of: str) -> list[float]:
            return [ran.tokens_per_s * ran.wall_s / ran.cpu_s for ran in self.ran(of, "set") if ran.cpu_s is not None]

        theirs = tokens_per_cpu_s(name)
        return ratio(tokens_per_cpu_s(self.ours), theirs) if theirs else None

    def _run(self, name: str, kind: str, number: int) -> None:
        when = "trial" if number == TRIAL else f"round {number}"
        self.say(f"{when}, {'all requests' if kind == 'set' else 'one request'}: {name}")
        key = f"{kind} {number}"
        self._results.setdefault(name, {})[key] = self.runs[name](key)

    def _compare(self, number: int) -> None:
        """Raises PipelineError where the work was not the same."""
        static_names = {static.name for static in self._statics}
        for name in self.runs:
            if name == self.ours:
                continue
            next_logits = self._next_logits if self.strict and name in static_names else None
            for key in (f"set {number}", f"one {number}"):
                if key in self._results[name]:
                    mine, other = self._results[self.ours][key].token_ids, self._results[name][key].token_ids
                    found = compare(self.sets[key], mine, other, next_logits)
                    self._agreement[name] = self._agreement.get(name, Agreement()) + found
