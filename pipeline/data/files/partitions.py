"""Partition columns in folder names, in Hive's style: `date=2024-01-01/site=7/x.parquet`.

Names and values are URL-decoded, and `__HIVE_DEFAULT_PARTITION__` is null. A column is int64 if all its values, over
all files, are integers in canonical form, else string.
"""

import posixpath
import re
from collections.abc import Iterable
from urllib.parse import unquote

import pyarrow as pa

from pipeline.errors import InputError

NULL = "__HIVE_DEFAULT_PARTITION__"

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")


def partition_values(relative: str) -> dict[str, str | None]:
    """Return the column values in the folder names of a file, in order. Raises InputError if a name is repeated or not
    UTF-8."""
    found: dict[str, str | None] = {}
    for folder in posixpath.dirname(relative).split("/"):
        raw, equals, value = folder.partition("=")
        if not raw or not equals:
            continue
        try:
            name, text = unquote(raw, errors="strict"), unquote(value, errors="strict")
        except UnicodeDecodeError as e:
            raise InputError(
                f"{relative}: the folder name {folder!r} is not UTF-8 after URL-decoding; rename it"
            ) from e
        if name in found:
            raise InputError(f"{relative}: the column {name!r} occurs twice in the path; rename one of the folders")
        found[name] = None if text == NULL else text
    return found


def partition_columns(relatives: Iterable[str]) -> tuple[list[pa.Field], dict[str, str]]:
    """Return the columns in the paths of files, and column -> first file whose path lacks it."""
    values: dict[str, set[str | None]] = {}
    folders: dict[str, str] = {}  # folder -> its first file
    for relative in relatives:
        folders.setdefault(posixpath.dirname(relative), relative)
    found = [(relative, partition_values(relative)) for relative in folders.values()]
    for _, own in found:
        for name, value in own.items():
            values.setdefault(name, set()).add(value)
    missing = {name: relative for name in values for relative, own in reversed(found) if name not in own}
    return [pa.field(name, _type(some)) for name, some in values.items()], missing


def partition_array(relative: str, field: pa.Field, count: int) -> pa.Array:
    """Return the partition column of a file as an array of `count` equal values."""
    value = partition_values(relative)[field.name]
    integer = value is not None and pa.types.is_int64(field.type)
    return pa.repeat(pa.scalar(int(value) if integer and value is not None else value, field.type), count)


def _type(values: set[str | None]) -> pa.DataType:
    known = [v for v in values if v is not None]
    if known and all(_INTEGER.fullmatch(v) and -(2**63) <= int(v) < 2**63 for v in known):
        return pa.int64()
    return pa.string()
