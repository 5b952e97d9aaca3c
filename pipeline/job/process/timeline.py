"""An actor's time, cut into the phases of `report/record/run_record.py` (PHASES) that do not overlap and leave no gap.

Pure bookkeeping in whole microseconds: clock values come in as arguments, so the sum of the phases equals the
time from birth to the last covered moment exactly. What the engine did inside its busy time is told by its
own counters (`EngineStats`: STEP_TIMES), which weigh how the busy time is divided. Parts are written by other threads,
beside the engine's work: only idle time in which one was being written is the phase `write`.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal

from pipeline.report.record.run_record import no_phases, split_exactly

# Phases of busy time. decode first: it takes busy time in which the engine counted nothing
WORK = ("decode", "prefill", "drafts", "preempted", "retried", "quality")
KEPT = 256  # stretches of writing, and of waiting: a unit is told of as written long before so many have begun

Stretch = tuple[int, int]
"""From one moment up to another, in microseconds."""


class Timeline:
    """Covers [birth_us, covered_us). Invariant: sum(phases(covered_us)) == covered_us - birth_us."""

    def __init__(self, birth_us: int) -> None:
        self.birth_us = birth_us
        self.covered_us = birth_us
        self._phases = no_phases()
        self._open: Literal["startup", "load"] | None = "startup"  # a phase that lasts until told otherwise
        self._idle_from_us: int | None = None  # up to covered_us: a tail if no step follows, else waiting
        self._waited: deque[Stretch] = deque(maxlen=KEPT)  # stretches that were settled
        self._writing: list[Stretch] = []  # in order, without overlap
        self._has_stepped = False
        self._busy_us = 0
        self._work_us = dict.fromkeys(WORK, 0)
        self._restarted = False
        self._restart_us = 0
        self.died_us = 0  # of `retried`: what `lost` put there

    def enter(self, phase: Literal["startup", "load"] | None, now_us: int) -> None:
        """From now on the actor is in `phase`; None: its engine is up and reports by `progress`."""
        now_us = max(now_us, self.covered_us)
        if self._open is not None:
            self._phases[self._open] += now_us - self.covered_us
            self._restart_us += now_us - self.covered_us if self._restarted else 0
            self.covered_us = now_us
        else:
            self._rest(now_us)
        if phase is not None:
            self._settle_rest()
        self._open = phase
        self._busy_us = 0  # a new engine process counts from zero
        self._work_us = dict.fromkeys(WORK, 0)

    def progress(self, now_us: int, busy_us: int, idle_us: int, stats: Mapping[str, int]) -> None:
        """The engine's report: busy_us and stats are sums since it was ready, idle_us its last idle
        stretch."""
        assert self._open is None
        span = max(0, now_us - self.covered_us)
        busy = min(max(0, busy_us - self._busy_us), span)
        self._busy_us = busy_us
        if not busy:
            return self._rest(self.covered_us + span)
        rest = min(idle_us, span - busy)
        self._settle_rest()
        self._phases["waiting"] += span - busy - rest
        self._has_stepped = True
        work = {phase: stats.get(f"{phase}_us", 0) for phase in WORK}
        weights = [max(0, work[phase] - self._work_us[phase]) for phase in WORK]
        for phase, us in zip(WORK, split_exactly(busy, weights), strict=True):
            self._phases[phase] += us
        self._work_us = work
        self.covered_us += span - rest
        self._rest(self.covered_us + rest)

    def wrote(self, began_us: int, ended_us: int) -> None:
        """A part was written from one moment to another."""
        new = _without((began_us, ended_us), self._writing)
        for stretch in self._waited:
            us = _overlap_us(stretch, new)
            self._phases["waiting"] -= us
            self._phases["write"] += us
        self._writing = sorted([*self._writing, *new])[-KEPT:]

    def lost(self, now_us: int, had_rows: bool) -> None:
        """The engine's process ended. With rows in it, the time since its last report is work to do again."""
        if self._open is None and had_rows:
            span = max(0, now_us - self.covered_us)
            self._settle_rest()
            self._phases["retried"] += span
            self.died_us += span
            self.covered_us += span
        self.enter("startup", now_us)
        self._restarted = True

    def restart_us(self, now_us: int) -> int:
        """Of start-up and load: the time of engine processes after the first."""
        now = max(0, now_us - self.covered_us) if self._restarted and self._open is not None else 0
        return self._restart_us + now

    @property
    def at_rest(self) -> str:
        """The phase that time goes to while nothing more is heard."""
        return self._open or ("tail" if self._has_stepped else "waiting")

    def phases(self, now_us: int) -> dict[str, int]:
        """Phases so far. A phase that is open (start-up, load) reaches up to now; otherwise they end with
        what the engine last reported, and an idle stretch at the end is the tail."""
        phases = dict(self._phases)
        if self._open is not None:
            phases[self._open] += max(0, now_us - self.covered_us)
        idle_us, write_us = self._idle()
        phases["write"] += write_us
        phases[self.at_rest] += idle_us - write_us
        return phases

    def _rest(self, until_us: int) -> None:
        """Nothing was computed up to then."""
        if until_us > self.covered_us and self._idle_from_us is None:
            self._idle_from_us = self.covered_us
        self.covered_us = until_us

    def _idle(self) -> tuple[int, int]:
        """How long the idle stretch at the end is, and for how much of it a part was being written."""
        if self._idle_from_us is None:
            return 0, 0
        stretch = self._idle_from_us, self.covered_us
        return stretch[1] - stretch[0], _overlap_us(stretch, self._writing)

    def _settle_rest(self) -> None:
        idle_us, write_us = self._idle()
        if self._idle_from_us is not None:
            self._phases["write"] += write_us
            self._phases["waiting"] += idle_us - write_us
            self._waited.append((self._idle_from_us, self.covered_us))
            self._idle_from_us = None


def _overlap_us(stretch: Stretch, others: Iterable[Stretch]) -> int:
    """others: without overlap among themselves."""
    return sum(max(0, min(stretch[1], end) - max(stretch[0], start)) for start, end in others)


def _without(stretch: Stretch, others: Iterable[Stretch]) -> list[Stretch]:
    """What of it lies outside of all others, which come in order and without overlap."""
    start, end = stretch
    left = []
    for begin, stop in others:
        if begin >= end:
            break
        if begin > start:
            left.append((start, begin))
        start = max(start, stop)
    return [*left, (start, end)] if start < end else left
