"""Read a few prompts from a flag, a text or JSON Lines file (also .gz and .zst), or standard input.

They become a table like a window of a job's input, so that the job's code can process them.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.columns import did_you_mean
from pipeline.data.files.footer import decoding
from pipeline.data.files.formats import JSON_LINES, format_by_name
from pipeline.data.files.text_blocks import compression_of
from pipeline.data.prompt_template import in_template
from pipeline.data.prompts import template_columns
from pipeline.errors import ConfigError, InputError
from pipeline.stores.filesystem import is_url

MAX_BYTES = 64 * 2**20
STDIN = "-"
_PROMPT_KEYS = ("prompt", "text", "messages")
_MAX_SHOWN = 5  # malformed lines listed in one message


@dataclass(frozen=True)
class Prompts:
    """Rows with their own columns followed by `source_file` and `source_row`, and the job key that makes prompts."""

    table: pa.Table
    key: Mapping[str, tuple[str, str]]  # key of a job file, like `prompt.column` -> its value and the flag it came from

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    @property
    def columns(self) -> "TableColumns":
        """Return the rows' own columns."""
        own = list(range(self.table.num_columns - 2))
        return TableColumns(self.table.select(own).schema)


@dataclass(frozen=True)
class TableColumns:
    """Columns of in-memory rows, with the interface of a job's input."""

    schema: pa.Schema
    requests: None = None

    @property
    def every_column(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a missing column."""
        for name in names:
            if name not in self.schema.names:
                raise ConfigError(f"the input has no column {name!r}{did_you_mean(name, self.schema.names)}")


def is_dataset(path: str) -> bool:
    """Return whether an input needs a job: a folder, a glob, a url, or a file of another format than JSON Lines."""
    local, known = Path(path), format_by_name(path)
    if is_url(path):
        return True
    if path == STDIN or local.suffix == ".txt" or (known is JSON_LINES and not any(c in path for c in "*?[")):
        return False
    if local.is_dir() or known is not None:
        return True
    if local.is_file():
        with open(local, "rb") as file:
            return file.read(4) == b"PAR1"
    return any(c in path for c in "*?[")


def read_prompts(path: str | None, template: str | None, limit: int | None = None) -> Prompts:
    """Read prompts from a file or standard input, or use `template` alone. Raises InputError, ConfigError."""
    if path is None and template is not None and not _names_columns(template):
        return Prompts(_table("--prompt", [(0, {"prompt": template})]), {"prompt.column": ("prompt", "--prompt")})
    if path is None and sys.stdin.isatty():
        raise ConfigError(
            "no prompts: pass --prompt TEXT or --input FILE, or pipe prompts in, one per line"
            if template is None
            else "--prompt refers to columns: pass --input FILE, or pipe rows in, one per line"
        )
    name, raw = _read(path or STDIN)
    rows = _objects(name, raw) if _is_json_lines(name, raw) else _lines(raw)
    if not rows:
        raise InputError(f"{name}: contains no prompts")
    table = _table(name, rows[:limit])
    names = table.schema.names[:-2]
    return Prompts(
        table, _default_key(name, names) if template is None else {"prompt.template": (template, "--prompt")}
    )


def _names_columns(template: str) -> bool:
    try:
        return bool(template_columns(template))
    except ConfigError:
        return False


def _default_key(name: str, names: list[str]) -> dict[str, tuple[str, str]]:
    found = next((key for key in _PROMPT_KEYS if key in names), None)
    if found is None:
        existing, first = ", ".join(names), in_template(names[0]) if names else "text"
        raise ConfigError(
            f"{name}: no column prompt, text or messages among {existing}; pass a template, such as "
            f'--prompt "Summarize: {{{first}}}"'
        )
    return {"prompt.messages" if found == "messages" else "prompt.column": (found, name)}


def _read(path: str) -> tuple[str, bytes]:
    name = "stdin" if path == STDIN else path
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(os.path.expanduser(path), "rb") as file:
                raw = _decompressed(name, file)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except OSError as error:
        raise InputError(f"{name}: cannot read it: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"{name}: more than {MAX_BYTES >> 20} MiB of prompts; run a job on the file instead: pipeline run JOB.yaml"
        )
    return name, raw.removeprefix(b"\xef\xbb\xbf")


def _decompressed(name: str, file: Any) -> bytes:
    """Return a file's decompressed content, up to MAX_BYTES + 1 bytes."""
    compression = compression_of(name)
    if compression is None:
        return file.read(MAX_BYTES + 1)
    with decoding(name):
        return pa.CompressedInputStream(pa.PythonFile(file, "r"), compression).read(MAX_BYTES + 1)


def _is_json_lines(name: str, raw: bytes) -> bool:
    """Decide by the file's name, or for standard input by whether every line looks like an object."""
    if name != "stdin":
        return JSON_LINES.has_name(name)
    lines = [line.lstrip() for line in raw.split(b"\n") if line.strip()]
    return bool(lines) and all(line[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines)


def _lines(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Return one prompt per line, skipping blank lines."""
    lines = (line.removesuffix(b"\r") for line in raw.split(b"\n"))
    return [(i, {"text": line.decode("utf-8", "surrogateescape")}) for i, line in enumerate(lines) if line.strip()]


def _objects(name: str, raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    rows, wrong = [], []
    for i, line in enumerate(raw.split(b"\n")):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong.append(f"{name}:{i + 1}: not JSON: {error}")
            continue
        if isinstance(value, dict) and value:
            rows.append((i, value))
        else:
            wrong.append(f'{name}:{i + 1}: expected an object such as {{"prompt": "..."}}')
    if wrong:
        more = f"\nand {len(wrong) - _MAX_SHOWN} more lines" if len(wrong) > _MAX_SHOWN else ""
        raise InputError("\n".join(wrong[:_MAX_SHOWN]) + more)
    return rows


def _table(name: str, rows: list[tuple[int, dict[str, Any]]]) -> pa.Table:
    """Build a table like `data.source.read_window`: the rows' own columns, then the file and row of each."""
    names = list(dict.fromkeys(key for _, row in rows for key in row))
    columns = [_column([row.get(key) for _, row in rows]) for key in names]
    origin = [pa.array([name] * len(rows)), pa.array([i for i, _ in rows], pa.int64())]
    return pa.Table.from_arrays([*columns, *origin], names=[*names, "source_file", "source_row"])


def _column(values: list[Any]) -> pa.Array:
    """Return values with their Arrow type, or as JSON text if they have several types or none that Arrow supports."""
    if not all(value is None or isinstance(value, str) for value in values):
        with suppress(pa.ArrowException, UnicodeEncodeError, OverflowError):
            column = pa.array(values)
            pq.write_table(pa.table({"x": column[:0]}), pa.BufferOutputStream())  # Parquet has no empty struct
            return column
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    # invalid UTF-8 and lone surrogates of JSON are kept, so that the row's error reports them
    column = pa.array([None if t is None else _bytes(t) for t in texts], pa.binary())
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return column


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
