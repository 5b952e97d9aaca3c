"""Tiles of the Triton kernels, tried on the card: which would be faster than the shipped ones, so that the tables in
`kernels/triton` can be set from one run. The engine itself tries nothing when it starts.

A tile that does not compile, takes more memory than there is, spills registers or computes something else than the
shipped one is left out, with the reason. The shipped tile and the fastest of a case are timed once more at the end, and
that counts: the fastest of many is partly luck.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import exp, log
from time import monotonic
from typing import Any

import torch

from pipeline.bench.gpu.kernels.checks import relative_error
from pipeline.bench.gpu.rates import Stopwatch
from pipeline.bench.gpu.rows import rows_of
from pipeline.bench.measure import table
from pipeline.kernels.triton.launch import Launch

WORTH_IT = 1.03  # times as fast: less is within what two runs differ by
OUT_OF_TIME = "out of time"

Tile = dict[str, int]
"""The sizes of a tile by the names of its table."""


@dataclass(frozen=True)
class TileSizes:
    """Work to try tiles on, as in `KernelCases`; tokens of int4 and of fp8 linears; rows that are sampled."""

    decoding: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, int], ...]
    int4_tokens: tuple[int, ...]
    fp8_tokens: tuple[int, ...]
    rows: tuple[int, ...]


FULL = TileSizes(((64, 1024), (256, 1024)), ((11, 735), (1, 8192)), (1, 16, 32, 64), (1, 64, 512, 8192), (64, 512))
SMOKE = TileSizes(((2, 70),), ((1, 33),), (1,), (1,), (1,))


@dataclass(frozen=True)
class TileCase:
    """A piece of work. table: where its tile is chosen; group: what the table goes by. launches(tile) compute `out`."""

    table: str
    group: str
    case: str
    shipped: Tile
    others: tuple[Tile, ...]
    launches: Callable[[Tile], Sequence[Launch]]
    out: torch.Tensor
    tolerance: float


@dataclass(frozen=True)
class TileTime:
    """skipped: why it has no time, else empty."""

    table: str
    group: str
    case: str
    tile: Tile
    is_shipped: bool
    seconds: float | None
    skipped: str = ""


@dataclass(frozen=True)
class Choice:
    """Of the tiles that were measured on all cases of a group, the one that takes the least time on them, each counted
    by the shipped tile's time there. gain: the shipped tile's time over its own (geometric mean)."""

    table: str
    group: str
    shipped: Tile
    best: Tile
    gain: float
    num_cases: int

    def to_text(self) -> str:
        about = f"{self.table}, {self.group} ({self.num_cases} cases): {_told(self.shipped)}"
        if self.gain < WORTH_IT:
            return f"{about} is as fast as any"
        return f"{about} -> {_told(self.best)}, {self.gain:.2f}x"


@dataclass(frozen=True)
class TileTimes:
    """left_out: why nothing was tried, else empty."""

    times: tuple[TileTime, ...] = ()
    left_out: str = ""

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "TileTimes":
        return cls(rows_of(TileTime, told["times"]), told["left_out"])

    @property
    def choices(self) -> list[Choice]:
        groups = dict.fromkeys((time.table, time.group) for time in self.times)
        found = []
        for group in groups:
            of = [time for time in self.times if (time.table, time.group) == group]
            if (choice := _choice(of)) is not None:
                found.append(choice)
        return found

    def lines(self) -> list[str]:
        """What each group says."""
        return [choice.to_text() for choice in self.choices]

    def to_json(self) -> dict[str, Any]:
        times = [asdict(time) for time in self.times]
        return {"left_out": self.left_out, "times": times, "choices": [asdict(choice) for choice in self.choices]}

    def to_text(self) -> str:
        if self.left_out:
            return f"Tiles were not tried: {self.left_out}."
        measured = sum(time.seconds is not None for time in self.times)
        lines = [
            f"Tiles: {measured} of {len(self.times)} measured. Of each table the shipped tile, and the best one for "
            f"all cases where that is {WORTH_IT - 1:.0%} faster or more:",
            *self.lines(),
        ]
        rows = []
        for case in dict.fromkeys((time.table, time.group, time.case) for time in self.times):
            of = [time for time in self.times if (time.table, time.group, time.case) == case]
            timed = [time for time in of if time.seconds is not None]
            shipped = next((time.seconds for time in timed if time.is_shipped), None)
            if shipped is None:
                rows.append((", ".join(case), None, None, None, f"the shipped tile has no time: {of[0].skipped}"))
                continue
            best = min(timed, key=lambda time: time.seconds or 0.0)
            assert best.seconds is not None
            times = shipped * 1e6, best.seconds * 1e6, shipped / best.seconds
            rows.append((", ".join(case), *times, _told(best.tile)))
        lines += table("case <58 | shipped us >11,.1f | best us >9,.1f | gain >5.2f | best <4", rows)
        reasons = Counter((time.table, time.skipped.split(":")[0]) for time in self.times if time.skipped)
        lines += [f"left out, {name}: {count} tiles, {why}" for (name, why), count in reasons.items()]
        return "\n".join(lines)


def tile_measurements(
    cases: Sequence[Callable[[], TileCase]], stopwatch: Stopwatch, budget_s: float
) -> Iterator[Callable[[], list[TileTime]]]:
    """Each case's measurements, which run when called. A case takes an equal share of what is left of `budget_s`, and
    one tile's compilation more at the most."""
    until = monotonic() + budget_s
    for left, build in zip(range(len(cases), 0, -1), cases):
        yield partial(_measured, build, stopwatch, until, left)


@torch.inference_mode()
def _measured(build: Callable[[], TileCase], stopwatch: Stopwatch, until: float, left: int) -> list[TileTime]:
    now = monotonic()
    stop = now + max(until - now, 0.0) / left
    case = build()
    shipped, expected = _tried(case, case.shipped, stopwatch, None), case.out.clone()
    found = [shipped]
    if shipped.seconds is None:
        return found
    for tile in case.others:
        if monotonic() > stop:
            found.append(_time_of(case, tile, None, OUT_OF_TIME))
        else:
            found.append(_tried(case, tile, stopwatch, expected))
    fastest = min(found, key=lambda each: float("inf") if each.seconds is None else each.seconds)
    if fastest is not shipped:
        again = {id(each): stopwatch.seconds(_call(case.launches(each.tile))) for each in (shipped, fastest)}
        found = [replace(each, seconds=again.get(id(each), each.seconds)) for each in found]
    return found


def _tried(case: TileCase, tile: Tile, stopwatch: Stopwatch, expected: torch.Tensor | None) -> TileTime:
    """Timed, or left out. expected: what the shipped tile computed; None for that tile itself, which may spill."""
    try:
        launches = case.launches(tile)
        case.out.fill_(float("nan") if case.out.is_floating_point() else -1)  # what is not written is found out
        spills = [getattr(launch.run(), "n_spills", 0) for launch in launches]
        stopwatch.wait()
        if expected is not None:
            if any(spills):
                return _time_of(case, tile, None, f"registers spilled: {max(spills)}")
            error = relative_error(case.out, expected.float())
            if error > case.tolerance:
                return _time_of(case, tile, None, f"another result: off by {error:.1e}")
        return _time_of(case, tile, stopwatch.seconds(_call(launches)))
    except Exception as error:  # whatever a compiler or a driver raises says that this tile cannot be had
        lines = str(error).strip().splitlines() or [""]
        return _time_of(case, tile, None, f"{type(error).__name__}: {lines[-1][:200]}")


def _call(launches: Sequence[Launch]) -> Callable[[], object]:
    return lambda: [launch.run() for launch in launches]


def _time_of(case: TileCase, tile: Tile, seconds: float | None, skipped: str = "") -> TileTime:
    return TileTime(case.table, case.group, case.case, tile, tile == case.shipped, seconds, skipped)


def _choice(times: Sequence[TileTime]) -> Choice | None:
    """None where the shipped tile was not measured on all cases."""
    cases = list(dict.fromkeys(time.case for time in times))
    shipped_s = {time.case: time.seconds for time in times if time.is_shipped and time.seconds is not None}
    if len(shipped_s) < len(cases):
        return None
    logs: dict[tuple[tuple[str, int], ...], list[float]] = {}
    for each in times:
        if each.seconds is not None:
            logs.setdefault(tuple(each.tile.items()), []).append(log(shipped_s[each.case] / each.seconds))
    gains = {tile: sum(of) / len(of) for tile, of in logs.items() if len(of) == len(cases)}
    shipped = next(time for time in times if time.is_shipped)
    best = max(gains, key=lambda tile: gains[tile], default=tuple(shipped.tile.items()))
    return Choice(shipped.table, shipped.group, shipped.tile, dict(best), exp(gains.get(best, 0.0)), len(cases))


def _told(tile: Tile) -> str:
    return ", ".join(f"{name} {size}" for name, size in tile.items())
