"""`--retry-failed`: the error rows of an output computed again, and nothing else.

A unit whose part holds error rows is handed out once more. Of its rows only those are computed; the part with their
new results replaces the old one whole, under the same name, by one atomic replace. So the output holds each row
once at every moment, and a run that is killed in between leaves units of the old and of the new kind, both whole.
"""

import pyarrow as pa

from pipeline.data.output.result_columns import places_of, result_column
from pipeline.data.units import Unit


def failed_rows(unit: Unit, part: pa.Table) -> Unit:
    """The rows of the unit that are error rows in its part, as a unit of the same name; maybe none."""
    errors = result_column(part, "error").to_pylist()
    bad = {place for place, error in zip(places_of(part), errors) if error is not None}
    rows = [i for i, place in enumerate(unit.places()) if place in bad]
    return unit.of_rows(rows)


def patched(part: pa.Table, rows: pa.Table) -> pa.Table:
    """The part with `rows` in the place of its error rows of the same origin; several, where samples stand as rows."""
    new: dict[tuple[str, int], list[int]] = {}
    for i, place in enumerate(places_of(rows), part.num_rows):
        new.setdefault(place, []).append(i)
    both = pa.concat_tables([part, pa.Table.from_arrays(rows.columns, schema=part.schema)])
    order = [j for i, place in enumerate(places_of(part)) for j in new.get(place, [i])]
    return both.take(pa.array(order, pa.int64()))
