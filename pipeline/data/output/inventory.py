"""Inventory of a finished output's parts from one listing, stored in `_SUCCESS` and compared later.

It detects missing, truncated and replaced parts without opening them. `pipeline verify --deep` detects damage that
keeps a part's size.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.data.output.parts import SUCCESS, PartName, PartStore
from pipeline.data.output.result_columns import WHEN
from pipeline.errors import OutputError

_OF_A_RUN = ("job", "fingerprint", "output_rows", "num_generated_tokens", "rows_checksum")


@dataclass(frozen=True)
class Inventory:
    """Counts of parts and rows, and a digest of all (name, size) pairs, which detects swapped sizes too."""

    parts: int
    rows: int  # by the names
    parts_bytes: int
    parts_digest: str

    @classmethod
    def from_store(cls, store: PartStore) -> "Inventory":
        """Return the inventory of an output, from one listing."""
        return cls.of_sizes(store.sizes())

    @classmethod
    def of_sizes(cls, sizes: Iterable[tuple[PartName, int]]) -> "Inventory":
        """Return the inventory of parts in any order. The digest sums the digests of the parts, in constant memory."""
        parts = rows = parts_bytes = digest = 0
        for name, size in sizes:
            parts += 1
            rows += name.rows
            parts_bytes += size
            digest += int.from_bytes(hashlib.sha256(f"{name} {size}".encode()).digest()[:8], "big")
        return cls(parts, rows, parts_bytes, f"{digest % 2**64:016x}")

    def wrong(self, counts: Mapping[str, Any]) -> str | None:
        """Return the difference from the `counts` of `_SUCCESS`; None if they agree."""
        rows = counted_rows(counts)
        if self.parts != counts["parts"]:
            return f"it has {self.parts:,} parts, but _SUCCESS counts {counts['parts']:,}"
        if self.rows != rows:
            return f"its parts have {self.rows:,} rows, but _SUCCESS counts {rows:,}"
        if self.parts_bytes != counts["parts_bytes"]:
            return f"its parts have {self.parts_bytes:,} bytes, but _SUCCESS counts {counts['parts_bytes']:,}"
        if self.parts_digest != counts["parts_digest"]:
            return "names or sizes of its parts have changed since _SUCCESS was written"
        return None


def counted_rows(counts: Mapping[str, Any]) -> int:
    """Return the number of input rows that `_SUCCESS` counts."""
    return counts["completed_rows"] + counts["error_rows"] + counts.get("dropped_rows", {}).get(WHEN, 0)


def read_counts(store: PartStore) -> dict[str, Any] | None:
    """Read `_SUCCESS`; None if it is missing or another program wrote it."""
    try:
        counts = json.loads(store.folder.read(SUCCESS) or b"null")
        whole = all(isinstance(counts[name], int) for name in ("parts", "completed_rows", "error_rows", "parts_bytes"))
        whole = whole and isinstance(counts["parts_digest"], str)
    except (ValueError, KeyError, TypeError):
        return None
    return counts if whole else None


def output_problem(store: PartStore) -> str | None:
    """Return the difference between an output and its `_SUCCESS` in one line, or None. Takes two requests and opens no
    part."""
    counts = read_counts(store)
    if counts is None:
        return "it has no _SUCCESS with its counts"
    return Inventory.from_store(store).wrong(counts)


def finished_counts(store: PartStore) -> dict[str, Any]:
    """Return the counts of `_SUCCESS`. Raises OutputError if the job is not finished, or its parts differ from them."""
    counts = read_counts(store)
    if counts is None or any(name not in counts for name in _OF_A_RUN):
        raise OutputError(
            f"{store.path}: no _SUCCESS that `pipeline run` wrote, so the job is not finished; finish it with "
            "`pipeline run` first"
        )
    if (damage := Inventory.from_store(store).wrong(counts)) is not None:
        raise OutputError(f"{store.path}: {damage}; `pipeline verify` lists the damage")
    return counts
