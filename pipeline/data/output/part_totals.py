"""Row and token totals of parts with a checksum of their rows, stored in each part's footer and in `_SUCCESS`."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.output.result_columns import DROPPED_FIELD, WHEN, is_first_sample, result_column, result_names
from pipeline.data.row_checksum import MODULUS, rows_checksum

_ROW_ID = ("source_file", "source_row")


@dataclass(frozen=True)
class PartTotals:
    """Rows and tokens of one part, or of several.

    `rows` counts input rows. If samples are rows, the output has `further_samples` more rows, those after each row's
    first sample, and `output_rows` counts all. `num_input_tokens` to `num_generated_tokens` count completed rows;
    `num_cached_tokens` of the prompt tokens came from shared KV blocks, and the others were computed.
    `num_error_input_tokens` counts the prompt tokens of error rows, which an engine refused or failed. `rows_checksum`
    identifies the input rows (`data/row_checksum.py`); totals that were not read from parts do not have it.
    `dropped_rows` counts output rows.
    """

    rows: int = 0
    units: int = 0
    error_rows: Mapping[str, int] = field(default_factory=dict)  # by RowError code
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_error_input_tokens: int = 0
    further_samples: int = 0
    rows_checksum: int = 0
    dropped_rows: Mapping[str, int] = field(default_factory=dict)  # by value of dropped_by

    @property
    def num_completed_rows(self) -> int:
        """Rows with results."""
        return self.rows - self.num_error_rows - self.num_uncomputed_rows

    @property
    def num_uncomputed_rows(self) -> int:
        """Rows that do not meet `input.when`."""
        return self.dropped_rows.get(WHEN, 0)

    @property
    def output_rows(self) -> int:
        return self.rows + self.further_samples

    @property
    def num_error_rows(self) -> int:
        return sum(self.error_rows.values())

    @property
    def checksum_hex(self) -> str:
        """`rows_checksum` as it is stored in JSON."""
        return f"{self.rows_checksum:016x}"

    @property
    def num_computed_tokens(self) -> int:
        """Tokens computed for completed rows: prompt tokens that were not cached, and generated tokens."""
        return self.num_input_tokens - self.num_cached_tokens + self.num_generated_tokens

    def __add__(self, other: "PartTotals") -> "PartTotals":
        errors = Counter(self.error_rows) + Counter(other.error_rows)
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        checksum = (self.rows_checksum + other.rows_checksum) % MODULUS
        dropped = Counter(self.dropped_rows) + Counter(other.dropped_rows)
        return PartTotals(
            error_rows=dict(sorted(errors.items())),
            rows_checksum=checksum,
            dropped_rows=dict(sorted(dropped.items())),
            **sums,
        )

    def __sub__(self, other: "PartTotals") -> "PartTotals":
        """Subtract the counts of `other`, clamped at 0, and its rows."""
        errors = Counter(self.error_rows) - Counter(other.error_rows)
        rest = {name: max(0, getattr(self, name) - getattr(other, name)) for name in _COUNTS}
        checksum = (self.rows_checksum - other.rows_checksum) % MODULUS
        dropped = Counter(self.dropped_rows) - Counter(other.dropped_rows)
        return PartTotals(
            error_rows=dict(sorted(errors.items())),
            rows_checksum=checksum,
            dropped_rows=dict(sorted(dropped.items())),
            **rest,
        )

    @classmethod
    def of_table(cls, table: pa.Table) -> "PartTotals":
        """Return the totals of one unit's output rows."""
        error, first = result_column(table, "error"), is_first_sample(table)
        errors = Counter(code for code in error.filter(first).to_pylist() if code is not None)
        completed = pc.call_function("is_null", [error])
        prompts = pc.call_function("and", [completed, first])  # a prompt counts once, however many samples it has
        failed = pc.call_function("invert", [completed])
        num_rows = pc.call_function("sum", [first]).as_py() or 0
        dropped_by = result_names(table.schema).get(DROPPED_FIELD.name)
        dropped = Counter([] if dropped_by is None else table.column(dropped_by).drop_null().to_pylist())

        def total(name: str, which: pa.ChunkedArray) -> int:
            return pc.call_function("sum", [result_column(table, name).filter(which)]).as_py() or 0

        return cls(
            rows=num_rows,
            units=1,
            error_rows=dict(sorted(errors.items())),
            num_input_tokens=total("num_input_tokens", prompts),
            num_cached_tokens=total("num_cached_tokens", prompts),
            num_generated_tokens=total("num_generated_tokens", completed),
            num_error_input_tokens=total("num_input_tokens", failed),
            further_samples=table.num_rows - num_rows,
            rows_checksum=rows_checksum(*(result_column(table, name).filter(first) for name in _ROW_ID)),
            dropped_rows=dict(sorted(dropped.items())),
        )

    def to_json(self) -> str:
        counts = {name: getattr(self, name) for name in _COUNTS}
        dropped = {"dropped_rows": dict(self.dropped_rows)} if self.dropped_rows else {}
        return json.dumps(counts | {"error_rows": dict(self.error_rows), "rows_checksum": self.checksum_hex} | dropped)

    @classmethod
    def from_json(cls, text: str | bytes) -> "PartTotals":
        found = json.loads(text)
        return cls(**{**found, "rows_checksum": int(found["rows_checksum"], 16)})


_COUNTS = tuple(f.name for f in fields(PartTotals) if f.name not in ("error_rows", "rows_checksum", "dropped_rows"))
