"""`--retry-failed`: recompute only the error rows of an output.

A unit whose part has error rows is handed out again, but only these rows are computed. The part with their new results
replaces the old one under the same name, by one atomic replace. So the output contains each row exactly once at every
moment, and a killed run leaves a mix of old and new parts, each complete.
"""

import pyarrow as pa

from pipeline.data.output.result_columns import result_column, row_ids_of
from pipeline.data.units import Unit


def failed_rows(unit: Unit, part: pa.Table) -> Unit:
    """Return the unit's rows that are error rows in its part, as a unit of the same name. It may be empty."""
    errors = result_column(part, "error").to_pylist()
    bad = {row_id for row_id, error in zip(row_ids_of(part), errors) if error is not None}
    rows = [i for i, row_id in enumerate(unit.row_ids()) if row_id in bad]
    return unit.of_rows(rows)


def patched(part: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the part with `rows` instead of its error rows of the same origin; one error row may become several
    samples."""
    new: dict[tuple[str, int], list[int]] = {}
    for i, row_id in enumerate(row_ids_of(rows), part.num_rows):
        new.setdefault(row_id, []).append(i)
    stacked = pa.concat_tables([part, pa.Table.from_arrays(rows.columns, schema=part.schema)])
    order = [j for i, row_id in enumerate(row_ids_of(part)) for j in new.get(row_id, [i])]
    return stacked.take(pa.array(order, pa.int64()))
