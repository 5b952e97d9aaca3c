"""Machine time and cost of a job by the values of an output column: source file, customer, finish reason.

Rows share steps, so a single row has no time of its own: time is divided by tokens, like the cost
(`account.shares_us`). Lost work, including that of error rows, is divided with the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.output.result_columns import is_first_sample, result_column
from pipeline.formatting import duration, money, percent, printable, table
from pipeline.report.account import shares_us
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import LengthBucket
from pipeline.report.run_report import RunReport

NULL = "(null)"
_GENERATED = "num_generated_tokens"
_TOKENS = ("num_input_tokens", "num_cached_tokens", _GENERATED)
_MAX_SHOWN = 60  # max characters of a value in the table
COUNTED = ("error", *_TOKENS)  # result columns that are needed in addition to the column


@dataclass(frozen=True)
class Group(JsonRecord):
    """Output rows with one value of the column. completed: rows without an error and their tokens; if samples are rows,
    prompt tokens count for the first sample only."""

    value: str
    rows: int
    completed: LengthBucket
    machine_us: int = 0
    usd: float | None = None

    def plus(self, other: "Group") -> "Group":
        return replace(self, rows=self.rows + other.rows, completed=self.completed + other.completed)


@dataclass(frozen=True)
class ByColumn(JsonRecord):
    """Groups with the most machine time, and the sum of all others, if any."""

    column: str
    machine_us: int
    groups: tuple[Group, ...]
    others: Group | None = None

    def to_text(self, width: int | None = None) -> str:
        head = [self.column, "rows", "errors", "tokens in", "from cache", "tokens out", "machine time", "share", "USD"]
        rows = [
            [
                _shown(group.value),
                f"{group.rows:,}",
                f"{group.rows - group.completed.rows:,}",
                f"{group.completed.input_tokens:,}",
                f"{group.completed.cached_tokens:,}",
                f"{group.completed.generated_tokens:,}",
                duration(group.machine_us / 1e6),
                percent(group.machine_us / self.machine_us if self.machine_us else 0.0),
                money(group.usd),
            ]
            for group in (*self.groups, *([self.others] if self.others is not None else []))
        ]
        return table(rows, head=head, sides="<>", width=width)


def by_column(report: RunReport, column: str, parts: Iterable[pa.Table], max_groups: int) -> ByColumn:
    """Divide machine time and cost by the values of `column`. parts: tables with `column` and COUNTED. max_groups:
    limit of the groups listed by value."""
    found: dict[str, Group] = {}
    for part in parts:
        for new in _groups(column, part):
            old = found.get(new.value)
            found[new.value] = new if old is None else old.plus(new)
    groups = list(found.values())
    times = shares_us([group.completed for group in groups], report.machine_us, report.phases_us)
    total = report.cost.total_usd
    priced = [
        replace(group, machine_us=us, usd=None if total is None else total * us / max(1, report.machine_us))
        for group, us in zip(groups, times, strict=True)
    ]
    priced.sort(key=lambda group: (-group.machine_us, group.value))
    rest = priced[max_groups:]
    others = None
    if rest:
        others = Group(
            f"({len(rest):,} others)",
            sum(group.rows for group in rest),
            sum((group.completed for group in rest), LengthBucket()),
            sum(group.machine_us for group in rest),
            None if total is None else sum(group.usd or 0.0 for group in rest),
        )
    return ByColumn(column, report.machine_us, tuple(priced[:max_groups]), others)


def _groups(column: str, table: pa.Table) -> Iterable[Group]:
    error = result_column(table, "error")
    completed = pc.call_function("cast", [pc.call_function("is_null", [error])], pc.CastOptions.safe(pa.int64()))
    columns: dict[str, Any] = {"value": table.column(column), "completed": completed}
    prompts = pc.call_function("multiply", [completed, is_first_sample(table).cast(pa.int64())])
    for name in _TOKENS:  # of completed rows only
        tokens = pc.call_function("coalesce", [result_column(table, name), pa.scalar(0, pa.int32())])
        columns[name] = pc.call_function("multiply", [tokens, completed if name == _GENERATED else prompts])
    sums = [(name, "sum") for name in ("completed", *_TOKENS)]
    grouped = pa.table(columns).group_by("value").aggregate([*sums, ("completed", "count")])
    values = (_text(value) for chunk in grouped["value"].chunks for value in chunk)
    for value, row in zip(values, grouped.drop_columns(["value"]).to_pylist(), strict=True):
        tokens = [row[f"{name}_sum"] for name in ("completed", *_TOKENS)]
        yield Group(value, row["completed_count"], LengthBucket(*tokens))


def _text(value: pa.Scalar) -> str:
    """Return a value as text, including text that is not UTF-8 and dates outside Python's range."""
    try:
        plain = value.as_py()
    except UnicodeDecodeError:
        plain = value.cast(pa.binary()).as_py()
    except (ValueError, OverflowError):
        plain = value.cast(pa.string()).as_py()
    if isinstance(plain, bytes):
        return plain.decode(errors="replace")
    return NULL if plain is None else str(plain)


def _shown(value: str) -> str:
    text = printable(value[: _MAX_SHOWN + 1])
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
