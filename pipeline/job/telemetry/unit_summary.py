"""Summary of an ended unit that an engine actor sends to the driver."""

from dataclasses import dataclass, field

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import RowStats


@dataclass(frozen=True)
class UnitSummary(JsonRecord):
    """Result of a unit, sent to the driver as JSON. If `failure_kind` is not None, nothing was written: it names a
    class of `pipeline.errors`, or is empty for a bug, with the traceback as the message. `found`: the part existed
    before any work on the unit, and `totals` are those of that part."""

    window: int
    unit: int
    totals: PartTotals = field(default_factory=PartTotals)
    written: bool = False  # False: the part already existed
    row_stats: RowStats = field(default_factory=RowStats)
    write_us: int = 0
    renewed: PartTotals | None = None  # the recomputed share of `totals`; None: all
    found: bool = False
    sampled_rows: int = 0  # rows saved for a later run; no part was written
    failure_kind: str | None = None
    failure_message: str = ""
