"""Finished units to commit, for `test_parts` and for the processes it starts (which do not import pytest)."""

import pyarrow as pa

from pipeline.data.output.parts import PartName
from pipeline.data.output.result_columns import output_schema

FP = "0123abcd"


def result(rows: int, seed: int = 0, errors: int = 0) -> pa.Table:
    schema = output_schema(pa.schema([("id", pa.int64())]), {})
    bad = [i < errors for i in range(rows)]
    columns = {
        "id": list(range(rows)),
        "generated_text": [None if b else f"{seed} {i * 7919 % 10007}" for i, b in enumerate(bad)],
        "error": ["null_prompt" if b else None for b in bad],
        "num_input_tokens": [0 if b else 10 for b in bad],
        "num_cached_tokens": [0 if b else 4 for b in bad],
        "num_generated_tokens": [0 if b else 3 for b in bad],
    }
    return pa.table([pa.array(columns.get(f.name, [None] * rows), f.type) for f in schema], schema=schema)


def name(unit: int = 0, rows: int = 50, **changes) -> PartName:
    return PartName(**{"fingerprint8": FP, "window": 1, "unit": unit, "num_units": 40, "rows": rows, **changes})
