"""`--retry-failed` and `--redo`: compute only some rows of an output again.

A unit whose part has such rows is handed out again, but only these rows are computed. The part with their new results
replaces the old one under the same name, by one atomic replace. So the output contains each row exactly once at every
moment, and a killed run leaves a mix of old and new parts, each complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from pipeline.data.output.parts import StoredPart
from pipeline.data.output.result_columns import result_column, result_field, row_ids_of
from pipeline.data.output.retried import RetriedRows, RowId
from pipeline.data.units import Unit
from pipeline.errors import RowError

# failed: error rows. truncated: ended by max_tokens or the end of the context. invalid: no valid structured output.
Kind = Literal["failed", "truncated", "invalid"]


@dataclass(frozen=True)
class RowsAgain:
    """Rows to compute again. limits: those that differ from the job's, by key of the job file. Picklable."""

    kinds: tuple[Kind, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        """Return whether all error rows are included."""
        return "failed" in self.kinds

    def columns(self, schema: pa.Schema) -> list[str]:
        """Return the columns of a part that `row_ids` reads."""
        return [result_field(schema, name).name for name in ("finish_reason", "error", "source_file", "source_row")]

    def row_ids(self, part: StoredPart) -> set[RowId]:
        """Return the rows of a part, without those that were already computed under these limits."""
        errors = result_column(part.table, "error").to_pylist()
        found = [self.has_failed and error is not None for error in errors]
        if "invalid" in self.kinds:
            found = [is_found or error == RowError.GRAMMAR_ERROR for is_found, error in zip(found, errors)]
        if "truncated" in self.kinds:
            reasons = result_column(part.table, "finish_reason").to_pylist()
            found = [is_found or "length" in _each(reason) for is_found, reason in zip(found, reasons)]
        row_ids = {row_id for row_id, is_found in zip(row_ids_of(part.table), found, strict=True) if is_found}
        return row_ids if self.has_failed else row_ids - RetriedRows(part.metadata).computed_with(self.limits)

    def of_unit(self, unit: Unit, part: StoredPart) -> Unit:
        """Return these rows of the unit's part, as a unit of the same name. It may be empty."""
        wanted = self.row_ids(part)
        return unit.of_rows([i for i, row_id in enumerate(unit.row_ids()) if row_id in wanted])


NO_ROWS = RowsAgain()


def _each(reason: str | list[str] | None) -> list[str | None] | list[str]:
    """Return the finish reason of each sample of a row."""
    return reason if isinstance(reason, list) else [reason]


def patched(part: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the part with `rows` instead of its rows of the same origin; a row may have several samples."""
    new: dict[RowId, list[int]] = {}
    for i, row_id in enumerate(row_ids_of(rows), part.num_rows):
        new.setdefault(row_id, []).append(i)
    stacked = pa.concat_tables([part, pa.Table.from_arrays(rows.columns, schema=part.schema)])
    renewed = set(new)
    order = [
        j for i, row_id in enumerate(row_ids_of(part)) for j in (new.pop(row_id, []) if row_id in renewed else [i])
    ]
    return stacked.take(pa.array(order, pa.int64()))
