"""An actor's time, cut into the phases of `report/run_record.py` (PHASES) that do not overlap and leave no gap.

Pure bookkeeping in whole microseconds: clock values come in as arguments, so the sum of the phases equals the
time from birth to the last covered moment exactly. What the engine did inside its busy time is told by its
own counters (`prefill_us`, `decode_us`, `repeated_us`), which weigh how the busy time is divided.
"""

from collections.abc import Mapping
from typing import Literal

from pipeline.report.run_record import no_phases, split_exactly

WORK = ("decode", "prefill", "repeated")  # decode first: it takes busy time in which the engine counted nothing


class Timeline:
    """Covers [birth_us, covered_us). Invariant: sum(phases(covered_us)) == covered_us - birth_us."""

    def __init__(self, birth_us: int) -> None:
        self.birth_us = birth_us
        self.covered_us = birth_us
        self._phases = no_phases()
        self._open: Literal["startup", "load"] | None = "startup"  # a phase that lasts until told otherwise
        self._rest_us = 0  # the idle stretch up to covered_us: a tail if no step follows, else waiting
        self._has_stepped = False
        self._busy_us = 0
        self._work_us = dict.fromkeys(WORK, 0)
        self._restarted = False
        self._restart_us = 0
        self.died_us = 0  # of `repeated`: what `lost` put there

    def enter(self, phase: Literal["startup", "load"] | None, now_us: int) -> None:
        """From now on the actor is in `phase`; None: its engine is up and reports by `progress`."""
        now_us = max(now_us, self.covered_us)
        if self._open is not None:
            self._phases[self._open] += now_us - self.covered_us
            self._restart_us += now_us - self.covered_us if self._restarted else 0
        else:
            self._rest_us += now_us - self.covered_us
        self.covered_us = now_us
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
        if busy:
            rest = min(idle_us, span - busy)
            self._settle_rest()
            self._phases["waiting"] += span - busy - rest
            self._rest_us = rest
            self._has_stepped = True
            work = {phase: stats[f"{phase}_us"] for phase in WORK}
            weights = [max(0, work[phase] - self._work_us[phase]) for phase in WORK]
            for phase, us in zip(WORK, split_exactly(busy, weights), strict=True):
                self._phases[phase] += us
            self._work_us = work
        else:
            self._rest_us += span
        self._busy_us = busy_us
        self.covered_us += span

    def lost(self, now_us: int, had_rows: bool) -> None:
        """The engine's process ended. With rows in it, the time since its last report is work to do again."""
        if self._open is None and had_rows:
            span = max(0, now_us - self.covered_us)
            self._settle_rest()
            self._phases["repeated"] += span
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
        if self._rest_us:
            phases[self.at_rest] += self._rest_us
        return phases

    def _settle_rest(self) -> None:
        self._phases["waiting"] += self._rest_us
        self._rest_us = 0
