"""An actor's time, split into the phases of `report/record/run_record.py` (PHASES) without overlaps or gaps.

Pure bookkeeping in whole microseconds. Clock values are arguments, so the sum of the phases is exactly the time from
birth to the last covered moment. The engine's counters (`EngineStats`: STEP_TIMES) are the weights that divide its busy
time.
"""

from collections.abc import Mapping
from typing import Literal

from pipeline.report.record.run_record import no_phases, split_exactly

# Phases of busy time and their counters. decode comes first, because it gets busy time without any counted work.
WORK = {
    "decode": ("decode_us",),
    "prefill": ("prefill_us",),
    "wasted": ("drafts_us", "preempted_us", "retried_us"),
    "quality": ("quality_us",),
}


class Timeline:
    """Timeline of [birth_us, covered_us). Invariant: sum(phases(covered_us)) == covered_us - birth_us."""

    def __init__(self, birth_us: int) -> None:
        self.birth_us = birth_us
        self.covered_us = birth_us
        self._phases = no_phases()
        self._open: Literal["startup", "load"] | None = "startup"  # lasts until `enter`
        self._busy_us = 0
        self._work_us = dict.fromkeys(WORK, 0)
        self._restarted = False
        self._restart_us = 0
        self.crashed_us = 0  # part of `wasted`: added by `lost`
        self.tail_us = 0  # part of `idle`: since the engine last computed

    def enter(self, phase: Literal["startup", "load"] | None, now_us: int) -> None:
        """Begin `phase`; None: the engine is up and reports with `progress`."""
        now_us = max(now_us, self.covered_us)
        if self._open is not None:
            self._phases[self._open] += now_us - self.covered_us
            self._restart_us += now_us - self.covered_us if self._restarted else 0
            self.covered_us = now_us
        else:
            self._add_idle(now_us)
        if phase is not None:
            self.tail_us = 0
        self._open = phase
        self._busy_us = 0  # a new engine process counts from zero
        self._work_us = dict.fromkeys(WORK, 0)

    def progress(self, now_us: int, busy_us: int, idle_us: int, stats: Mapping[str, int]) -> None:
        """Add a report of the engine. busy_us and stats are sums since it was ready; idle_us is the idle time since its
        last step."""
        assert self._open is None
        span = max(0, now_us - self.covered_us)
        busy = min(max(0, busy_us - self._busy_us), span)
        self._busy_us = busy_us
        if busy:
            work = {phase: sum(stats.get(name, 0) for name in names) for phase, names in WORK.items()}
            weights = [max(0, work[phase] - self._work_us[phase]) for phase in WORK]
            for phase, us in zip(WORK, split_exactly(busy, weights), strict=True):
                self._phases[phase] += us
            self._work_us = work
            self._phases["idle"] += span - busy
            self.tail_us = min(idle_us, span - busy)
            self.covered_us += span
        else:
            self._add_idle(self.covered_us + span)

    def lost(self, now_us: int, had_rows: bool) -> None:
        """Record the end of the engine's process. With rows inside, the time since its last report counts as wasted."""
        if self._open is None and had_rows:
            span = max(0, now_us - self.covered_us)
            self._phases["wasted"] += span
            self.crashed_us += span
            self.covered_us += span
        self.enter("startup", now_us)
        self._restarted = True

    def restart_us(self, now_us: int) -> int:
        """Return the start-up and load time of engine processes after the first."""
        now = max(0, now_us - self.covered_us) if self._restarted and self._open is not None else 0
        return self._restart_us + now

    @property
    def at_rest(self) -> str:
        """Phase of the time until the next report."""
        return self._open or "idle"

    def phases(self, now_us: int) -> dict[str, int]:
        """Return the phases so far. An open phase (start-up, load) extends to now; other phases end at the last
        report."""
        phases = dict(self._phases)
        if self._open is not None:
            phases[self._open] += max(0, now_us - self.covered_us)
        return phases

    def _add_idle(self, until_us: int) -> None:
        """Count the time up to `until_us` as idle."""
        self._phases["idle"] += until_us - self.covered_us
        self.tail_us += until_us - self.covered_us
        self.covered_us = until_us
