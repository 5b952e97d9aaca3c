"""The columns of the tasks that tell labels: the best one, its number, and all of them in their order."""

from collections.abc import Sequence

import pyarrow as pa


def label_fields(number: str, numbers: str, *others: str) -> tuple[pa.Field, ...]:
    """label, label_<number> and label_<numbers>, a list of structs with `label`, `number` and the `others`."""
    each = [pa.field("label", pa.string()), *(pa.field(name, pa.float64()) for name in (number, *others))]
    return (
        pa.field("label", pa.string()),
        pa.field(f"label_{number}", pa.float64()),
        pa.field(f"label_{numbers}", pa.list_(pa.struct(each))),
    )


def label_values(rows: Sequence[tuple[object, ...] | None]) -> list[list[object]]:
    """These columns of the rows' values in their order; null where a row has none."""
    return [[row and row[column] for row in rows] for column in range(3)]
