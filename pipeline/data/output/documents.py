"""Rows of an output joined by input file, such as the pages of a document."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pipeline.data.output.result_columns import result_column, result_names
from pipeline.errors import OutputError

SEPARATOR = "\n\n"  # between the texts of two rows
FILE, TEXT = "source_file", "generated_text"


@dataclass
class _Document:
    file: str
    texts: list[str] = field(default_factory=list)
    num_rows: int = 0
    error_rows: list[int] = field(default_factory=list)  # their source_row


def document_schema(parts: pa.Schema) -> pa.Schema:
    """Return the columns of joined rows. parts: the output's schema. Raises OutputError if its rows are not texts."""
    names = result_names(parts)
    if TEXT not in names or not pa.types.is_string(parts.field(names[TEXT]).type) or "sample_index" in names:
        raise OutputError(
            "--by source_file: joins the texts of rows, and needs one completion for each (sampling.n: 1)"
        )
    columns = [(names[FILE], pa.string()), (names[TEXT], pa.string()), ("num_rows", pa.int64())]
    return pa.schema([*columns, ("error_rows", pa.list_(pa.int64()))])


def whole_documents(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield the rows of the documents that begin in the first `num_rows` rows, in the input's order. tables: all rows
    from there on, of which the first may continue a document that began before."""
    begun, count = False, 0
    for table in tables:
        starts = np.flatnonzero(result_column(table, "source_row").to_numpy() == 0)
        low = 0 if begun else int(starts[0]) if len(starts) else table.num_rows
        ends = starts[starts + count >= num_rows]
        high = int(ends[0]) if len(ends) else table.num_rows
        if high > low:
            begun = True
            yield table.slice(low, high - low)
        count += table.num_rows
        if len(ends) or (count >= num_rows and not begun):
            return


def joined(tables: Iterator[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield one row for each document. tables: whole documents. schema: of `document_schema`."""
    document = _Document("")
    for table in tables:
        whole: list[_Document] = []
        columns = [result_column(table, name).to_pylist() for name in (FILE, TEXT, "error", "source_row")]
        for file, text, error, row in zip(*columns, strict=True):
            if row == 0:
                whole += [document] if document.num_rows else []
                document = _Document(file)
            document.num_rows += 1
            document.texts += [text] if text else []
            document.error_rows += [row] if error is not None else []
        yield _table(whole, schema)
    if document.num_rows:
        yield _table([document], schema)


def _table(documents: list[_Document], schema: pa.Schema) -> pa.Table:
    rows = [(each.file, SEPARATOR.join(each.texts), each.num_rows, each.error_rows) for each in documents]
    return pa.table([pa.array([row[i] for row in rows], f.type) for i, f in enumerate(schema)], schema=schema)
