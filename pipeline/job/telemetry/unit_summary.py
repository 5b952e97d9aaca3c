"""What an engine actor tells the driver of a unit that ended."""

from dataclasses import dataclass, field

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import RowStats


@dataclass(frozen=True)
class UnitSummary(JsonRecord):
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
    sampled_rows: int = 0  # computed and kept for a later run; nothing was written
    failure_kind: str | None = None
    failure_message: str = ""
