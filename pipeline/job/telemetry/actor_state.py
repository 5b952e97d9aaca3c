"""State that an engine actor reports each second. Imports little, because the registry's process must start fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.report.record.run_record import ActorRecord


@dataclass(frozen=True)
class ActorState:
    """State of an actor: its record, and its open units."""

    record: ActorRecord
    open_rows_done: int = 0  # finished rows of open units, also those that an earlier run finished
    saved_rows: int = 0  # finished rows of units that a stop left open, saved for the next run
    at_rest: str = "startup"  # the phase of its time until the next report
    resolved: Mapping[str, str | int] = field(default_factory=dict)
    loading: str = ""  # what its engine is loading; empty once it is up
    waits_for: str = ""  # why its engine cannot work; empty if it can
    report_number: int = 0  # number of the report: of two states the later one counts, whichever arrives last
