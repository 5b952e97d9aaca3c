"""Where a handful of prompts comes from: a flag, a text or JSON Lines file (.gz and .zst too), standard input. As a
table, as a window of a job's input is one, so that all the rest is the job's.
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
from pipeline.data.files.json_lines import compression_of, is_json_lines
from pipeline.data.prompt_template import in_template
from pipeline.data.prompts import template_columns
from pipeline.data.source import open_source
from pipeline.errors import ConfigError, InputError
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import shown_url

MAX_BYTES = 64 * 2**20
STDIN = "-"
_PROMPT_KEYS = ("prompt", "text", "messages")
_MAX_SHOWN = 5  # malformed lines in one message


@dataclass(frozen=True)
class Prompts:
    """Rows as read: their own columns, then `source_file` and `source_row`, and the key a prompt is made of."""

    table: pa.Table
    key: Mapping[str, tuple[str, str]]  # of a job file: `prompt.column` to its value and the flag it came from

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    @property
    def columns(self) -> "TableColumns":
        """The rows' own columns."""
        own = list(range(self.table.num_columns - 2))
        return TableColumns(self.table.select(own).schema)


@dataclass(frozen=True)
class TableColumns:
    """Columns of rows that are in memory, as a job's input has them."""

    schema: pa.Schema
    requests: None = None

    @property
    def every_column(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise ConfigError for one that is not there."""
        for name in names:
            if name not in self.schema.names:
                raise ConfigError(f"the input has no column {name!r}{did_you_mean(name, self.schema.names)}")


def is_dataset(place: str) -> bool:
    """Whether an input is a job's: a folder, a glob, a url, or a Parquet file."""
    path = Path(place)
    if is_url(place):
        return True
    if place == STDIN or path.suffix == ".txt" or (is_json_lines(place) and not any(c in place for c in "*?[")):
        return False
    if path.is_dir() or path.suffix in (".parquet", ".pq"):
        return True
    if path.is_file():
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1"
    return any(c in place for c in "*?[")


def prompt_of_dataset(path: str, template: str | None) -> dict[str, tuple[str, str]]:
    """The key that makes a job's prompts: the template, else the column that is called like one."""
    if template is not None:
        return {"prompt.template": (template, "--prompt")}
    return _default_key(shown_url(path), open_source(path).schema.names)


def read_prompts(place: str | None, template: str | None, limit: int | None = None) -> Prompts:
    """The prompts of a file, of standard input, or of `template` alone. Raises InputError, ConfigError."""
    if place is None and template is not None and not _names_columns(template):
        return Prompts(_table("--prompt", [(0, {"prompt": template})]), {"prompt.column": ("prompt", "--prompt")})
    if place is None and sys.stdin.isatty():
        raise ConfigError(
            "no prompts: give --prompt TEXT, --input FILE, or pipe them in, one a line"
            if template is None
            else "--prompt names columns: give --input FILE, or pipe rows in, one a line"
        )
    name, raw = _read(place or STDIN)
    rows = _objects(name, raw) if _is_json_lines(name, raw) else _lines(raw)
    if not rows:
        raise InputError(f"{name}: holds no prompts")
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
        there, first = ", ".join(names), in_template(names[0]) if names else "text"
        raise ConfigError(
            f"{name}: no prompt, text or messages among its columns ({there}); say what to send: "
            f'--prompt "Summarize: {{{first}}}"'
        )
    return {"prompt.messages" if found == "messages" else "prompt.column": (found, name)}


def _read(place: str) -> tuple[str, bytes]:
    name = "stdin" if place == STDIN else place
    try:
        if place == STDIN:
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with open(os.path.expanduser(place), "rb") as file:
                raw = _decompressed(name, file)
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"{name}: more than {MAX_BYTES >> 20} MiB of prompts: run a job on the file: pipeline run JOB.yaml"
        )
    return name, raw.removeprefix(b"\xef\xbb\xbf")


def _decompressed(name: str, file: Any) -> bytes:
    """What is in a file, one byte more than MAX_BYTES at most."""
    compression = compression_of(name)
    if compression is None:
        return file.read(MAX_BYTES + 1)
    with decoding(name):
        return pa.CompressedInputStream(pa.PythonFile(file, "r"), compression).read(MAX_BYTES + 1)


def _is_json_lines(name: str, raw: bytes) -> bool:
    """By the file's name; of standard input, when every line begins like an object."""
    if name != "stdin":
        return is_json_lines(name)
    lines = [line.lstrip() for line in raw.split(b"\n") if line.strip()]
    return bool(lines) and all(line[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines)


def _lines(raw: bytes) -> list[tuple[int, dict[str, Any]]]:
    """A prompt a line; blank lines hold none."""
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
    """As `data.source.read_window` gives it: the rows' own columns, then where each comes from."""
    names = list(dict.fromkeys(key for _, row in rows for key in row))
    columns = [_column([row.get(key) for _, row in rows]) for key in names]
    where = [pa.array([name] * len(rows)), pa.array([i for i, _ in rows], pa.int64())]
    return pa.Table.from_arrays([*columns, *where], names=[*names, "source_file", "source_row"])


def _column(values: list[Any]) -> pa.Array:
    """Values of one type as Arrow has it; of several, or beyond Arrow's, the text they are in JSON."""
    if not all(value is None or isinstance(value, str) for value in values):
        with suppress(pa.ArrowException, UnicodeEncodeError, OverflowError):
            column = pa.array(values)
            pq.write_table(pa.table({"x": column[:0]}), pa.BufferOutputStream())  # Parquet has no empty struct
            return column
    texts = [v if v is None or isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values]
    # bytes that were no UTF-8, and half surrogate pairs of JSON, stay what they are: the row's error says so
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
