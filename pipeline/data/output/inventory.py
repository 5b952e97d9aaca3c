"""The parts of a finished output as one listing shows them, without opening one: what `_SUCCESS` keeps of them, and
what is wrong once they are not that any more.

Finds parts that are missing, cut or replaced by others. Damage that leaves a part's size as it was is for
`pipeline verify --deep`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.data.output.parts import SUCCESS, PartName, PartStore


@dataclass(frozen=True)
class Inventory:
    """`digest` is of all names and sizes: parts whose sizes changed places are seen too."""

    parts: int
    rows: int  # as the names say
    parts_bytes: int
    parts_digest: str

    @classmethod
    def of(cls, store: PartStore) -> "Inventory":
        """From one listing of the output."""
        return cls.of_sizes(store.sizes())

    @classmethod
    def of_sizes(cls, sizes: Iterable[tuple[PartName, int]]) -> "Inventory":
        """In any order: the digest is a sum of each part's own, so that nothing is sorted or held."""
        parts = rows = parts_bytes = digest = 0
        for name, size in sizes:
            parts += 1
            rows += name.rows
            parts_bytes += size
            digest += int.from_bytes(hashlib.sha256(f"{name} {size}".encode()).digest()[:8], "big")
        return cls(parts, rows, parts_bytes, f"{digest % 2**64:016x}")

    def wrong(self, counts: Mapping[str, Any]) -> str | None:
        """Return why this is not what `counts` of `_SUCCESS` say; None where it is."""
        rows = counts["completed_rows"] + counts["error_rows"]
        if self.parts != counts["parts"]:
            return f"it holds {self.parts:,} parts, _SUCCESS counts {counts['parts']:,}"
        if self.rows != rows:
            return f"its parts hold {self.rows:,} rows, _SUCCESS counts {rows:,}"
        if self.parts_bytes != counts["parts_bytes"]:
            return f"its parts have {self.parts_bytes:,} bytes, _SUCCESS counts {counts['parts_bytes']:,}"
        if self.parts_digest != counts["parts_digest"]:
            return "its parts have other names and sizes than when _SUCCESS was written"
        return None


def read_counts(store: PartStore) -> dict[str, Any] | None:
    """What `_SUCCESS` holds; None where there is none, or one that another program wrote."""
    try:
        counts = json.loads(store.folder.read(SUCCESS) or b"null")
        whole = all(isinstance(counts[name], int) for name in ("parts", "completed_rows", "error_rows", "parts_bytes"))
        whole = whole and isinstance(counts["parts_digest"], str)
    except (ValueError, KeyError, TypeError):
        return None
    return counts if whole else None


def what_is_wrong(store: PartStore) -> str | None:
    """Why the output is not what its `_SUCCESS` says, in one line: two requests and no part opened. None where it
    is."""
    counts = read_counts(store)
    if counts is None:
        return "there is no _SUCCESS that says what it should hold"
    return Inventory.of(store).wrong(counts)
