"""What an engine actor tells the driver of a unit that ended."""

import json
from dataclasses import asdict, dataclass, field

from pipeline.data.output.records import PartTotals
from pipeline.report.rows import RowStats


@dataclass(frozen=True)
class UnitSummary:
    """What became of a unit; travels to the driver as JSON. With `failure_kind` not None nothing was written:
    it names a class of `pipeline.errors`, or is empty for a defect, whose traceback is then the message.
    `found`: its part was there before any work for it, and `totals` are of that."""

    window: int
    unit: int
    totals: PartTotals = field(default_factory=PartTotals)
    written: bool = False  # False: the part was there already
    row_stats: RowStats = field(default_factory=RowStats)
    write_us: int = 0
    renewed: PartTotals | None = None  # of `totals` what was computed now; None: all
    found: bool = False
    failure_kind: str | None = None
    failure_message: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "UnitSummary":
        raw = json.loads(text)
        totals = PartTotals(**raw["totals"])
        renewed = PartTotals(**raw["renewed"]) if raw["renewed"] is not None else None
        return cls(**{**raw, "totals": totals, "renewed": renewed, "row_stats": RowStats.from_json(raw["row_stats"])})
