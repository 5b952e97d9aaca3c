"""CSV and TSV: a header line with the columns' names, then rows of text.

Every column is text, as written: "0012" stays "0012", and an empty field is an empty text. The csv module parses rows,
strictly, with quotes as in RFC 4180; lines end with a line feed, optionally after a carriage return. Text outside
quotes is not trimmed, and blank lines are skipped.
"""

import csv
import io
import posixpath
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipeline.data.files.footer import DamagedFile
from pipeline.data.files.scan_cache import scanned
from pipeline.data.files.source_file import Slice, SliceRead, SourceFile
from pipeline.data.files.text_blocks import BOM, MAX_ROW_BYTES, BadRow, Row, read_blocks, scan, uncompressed
from pipeline.errors import InputError
from pipeline.formatting import counted


class CsvRows:
    """Syntax of one file. `header` is known after its first block."""

    def __init__(self, relative: str, name: str, header: tuple[str, ...] = ()) -> None:
        self._delimiter = "\t" if uncompressed(relative).endswith(".tsv") else ","
        self._name, self.header = name, header

    def end(self, text: bytes) -> int:
        lines = text.rfind(b"\n") + 1
        if b'"' not in text:
            return lines
        opened, end = io.StringIO(text[:lines].decode("latin-1"), newline="\n"), 0
        reader = self._reader(opened)
        while True:
            try:
                next(reader)
            except StopIteration:
                return end
            except csv.Error:
                if opened.tell() == lines:  # the row may continue after `text`
                    return end
            end = opened.tell()

    def rows(self, block: bytes, first_line: int) -> Iterator[tuple[int, Row | BadRow]]:
        rows = self._fields(block if first_line else block.removeprefix(BOM), first_line)
        if first_line == 0:
            self.header = self._checked_header(*next(rows, (1, [])))
        for number, fields in rows:
            if isinstance(fields, BadRow):
                yield number, fields
            elif len(fields) != len(self.header):
                expected = f"expected {counted(len(self.header), 'field')}, as in the header, but got {len(fields)}"
                has_semicolons = self._delimiter == "," and len(self.header) == 1 and ";" in self.header[0]
                yield number, BadRow(f"{expected}; a .csv has commas between fields" if has_semicolons else expected)
            else:
                yield number, dict(zip(self.header, fields))

    def _fields(self, block: bytes, first_line: int) -> Iterator[tuple[int, list[str] | BadRow]]:
        reader = self._reader(io.StringIO(block.decode("utf-8", "surrogateescape"), newline="\n"))
        while True:
            number = first_line + reader.line_num + 1
            try:
                fields = next(reader)
                "".join(fields).encode()
            except StopIteration:
                return
            except csv.Error:
                yield number, BadRow("has a quote that is not closed, or text after one, or a lone carriage return")
            except UnicodeEncodeError:
                yield number, BadRow("is not UTF-8")
            else:
                if fields:
                    yield number, fields

    def _reader(self, text: io.StringIO) -> Any:
        csv.field_size_limit(MAX_ROW_BYTES)  # of the process; its default is 128 KiB
        return csv.reader(text, delimiter=self._delimiter, strict=True)

    def _checked_header(self, number: int, names: list[str] | BadRow) -> tuple[str, ...]:
        if isinstance(names, BadRow):
            raise DamagedFile(f"{self._name}:{number}", f"the header {names}")
        line = f"{self._name}:{number}: the header"
        if "" in names:
            raise InputError(f"{line} has no name for column {names.index('') + 1}; name it (pandas: index=False)")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"{line} has more than one column {twice!r}; rename one of them")
        return tuple(names)


def plan(fs: Any, path: str, relative: str, size: int, name: str, keep_bad: bool) -> tuple[SourceFile, pa.Schema]:
    """Return the planning metadata of a file and its columns. Raises DamagedFile, and InputError for a header with
    empty or equal names."""
    file = scanned(
        fs, path, size, ("rows", keep_bad),
        lambda: scan(CsvRows(relative, name), fs, path, relative, size, name, keep_bad),
    )  # fmt: skip
    assert file.blocks is not None
    if not file.blocks.header:
        raise DamagedFile(name, "empty, without a header line that names the columns")
    return file, pa.schema([(column, pa.string()) for column in file.blocks.header])


def read_slices(
    fs: Any, root: str, shown: str, file: SourceFile, slices: list[Slice], schema: pa.Schema
) -> Iterator[SliceRead]:
    """Yield the columns of `schema` for each slice."""
    assert file.blocks is not None
    syntax = CsvRows(file.relative, posixpath.join(shown, file.relative), file.blocks.header)
    return read_blocks(syntax, fs, root, shown, file, slices, schema)
