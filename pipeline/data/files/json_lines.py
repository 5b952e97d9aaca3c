"""JSON Lines: one object per line.

Planning finds the types of the keys (`json_types`). Lines are parsed with the json module because `pyarrow.json` turns
texts like "2026-01-31" into times, refuses a whole block for one bad line without its number, and cannot represent
values of mixed types.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from pipeline.data.files.footer import DamagedFile
from pipeline.data.files.json_types import MAX_KEYS, JsonTypes
from pipeline.data.files.scan_cache import scanned
from pipeline.data.files.source_file import Slice, SliceRead, SourceFile
from pipeline.data.files.text_blocks import BOM, BadRow, Row, read_blocks, scan
from pipeline.data.json_text import BadJson, parse_json


class JsonLines:
    """Syntax of JSON Lines."""

    header = ()

    def end(self, text: bytes) -> int:
        return text.rfind(b"\n") + 1

    def rows(self, block: bytes, first_line: int) -> Iterator[tuple[int, Row | BadRow]]:
        for number, line in enumerate(block.split(b"\n"), first_line + 1):
            if number == 1:
                line = line.removeprefix(BOM)
            if not line.strip():
                continue
            try:
                yield number, _parse_line(line)
            except BadRow as bad:
                yield number, bad


def plan(fs: Any, path: str, relative: str, size: int, name: str, keep_bad: bool) -> tuple[SourceFile, JsonTypes]:
    """Return the planning metadata of a file and the types of its keys. Raises DamagedFile."""

    def scan_types() -> tuple[SourceFile, JsonTypes]:
        types = JsonTypes()

        def add(number: int, row: Row) -> None:
            types.add(row)
            if len(types) > MAX_KEYS:
                raise DamagedFile(
                    name, f"more than {MAX_KEYS:,} different keys by line {number}; do its keys hold data?"
                )

        return scan(JsonLines(), fs, path, relative, size, name, keep_bad, add), types

    return scanned(fs, path, size, ("rows", keep_bad), scan_types)


def read_slices(
    fs: Any,
    root: str,
    shown: str,
    file: SourceFile,
    slices: list[Slice],
    schema: pa.Schema,
    row_of: Callable[[Row], Mapping[str, Any]] = lambda line: line,
) -> Iterator[SliceRead]:
    """Yield the columns of `schema` for each slice. row_of: converts a line's object to a row."""
    return read_blocks(JsonLines(), fs, root, shown, file, slices, schema, row_of)


def _parse_line(line: bytes) -> Row:
    """Parse the JSON object of a line. Raises BadRow."""
    try:
        row = parse_json(line.decode("utf-8"))
        if b"\\u" in line:  # a lone surrogate is not valid text
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise BadRow(f"byte {error.start + 1} is not UTF-8") from None
    except UnicodeEncodeError:
        raise BadRow("contains a lone surrogate (\\ud800 to \\udfff)") from None
    except BadJson as error:
        raise BadRow(str(error)) from None
    except RecursionError as error:
        raise BadRow(f"nested too deeply: {error}") from None
    if not isinstance(row, dict):
        hint = "; JSON Lines has one object per line, not an array" if isinstance(row, list) else ""
        raise BadRow(f'expected an object such as {{"text": "..."}}{hint}')
    return row
