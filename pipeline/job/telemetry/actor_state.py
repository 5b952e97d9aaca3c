"""What an engine actor tells of itself each second. Imports little, as the ledger's process must start fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.report.record.run_record import ActorRecord


@dataclass(frozen=True)
class ActorState:
    """What an actor tells of itself: its record, and what is open."""

    record: ActorRecord
    open_rows_done: int = 0  # rows of open units that the engine has finished
    at_rest: str = "startup"  # the phase its time goes to if it says nothing more
    resolved: Mapping[str, str | int] = field(default_factory=dict)
    loading: str = ""  # what its engine does before it is up; empty once it is
    told: int = 0  # how often it had told before: of two states the later one, whichever arrives last
