"""Rows of a part that were computed again under other limits than their job's, recorded in the part's footer.

`pipeline.retried` holds a JSON list of {"limits": {"engine.max_model_len": 8192}, "rows": [[source_file, source_row],
...]}. A row is in the entry of its last computation, or in none if that used the job's own limits. Most parts lack the
key.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

KEY = "pipeline.retried"
RowId = tuple[str, int]  # source_file and source_row
Limits = Mapping[str, Any]  # dotted keys of the job file


class RetriedRows:
    """Retried rows of one or several parts, with the limits of their last computation."""

    def __init__(self, notes: Mapping[str, str] | None = None) -> None:
        """Read a part's metadata. Raises ValueError, KeyError or TypeError if the entry is damaged."""
        self._limits: dict[RowId, str] = {}
        self.add_notes(notes or {})

    def add_notes(self, notes: Mapping[str, str]) -> None:
        """Add the retried rows of another part's metadata."""
        for entry in json.loads(notes.get(KEY, "[]")):
            self.add(((file, int(row)) for file, row in entry["rows"]), entry["limits"])

    def add(self, row_ids: Iterable[RowId], limits: Limits) -> None:
        """Record that these rows were computed with `limits`; empty means the job's own, and removes the rows."""
        text = json.dumps(dict(limits), sort_keys=True)
        for row_id in row_ids:
            if limits:
                self._limits[row_id] = text
            else:
                self._limits.pop(row_id, None)

    @property
    def row_ids(self) -> set[RowId]:
        return set(self._limits)

    def computed_with(self, limits: Limits) -> set[RowId]:
        """Return the rows whose last computation had these limits."""
        text = json.dumps(dict(limits), sort_keys=True)
        return {row_id for row_id, own in self._limits.items() if own == text}

    def restricted_to(self, row_ids: Iterable[RowId]) -> "RetriedRows":
        """Return the retried rows among `row_ids`."""
        some = RetriedRows()
        some._limits = {row_id: self._limits[row_id] for row_id in row_ids if row_id in self._limits}
        return some

    def in_notes(self, notes: Mapping[str, str]) -> dict[str, str]:
        """Return a part's metadata with its retried rows replaced by these."""
        other = {name: text for name, text in notes.items() if name != KEY}
        entries = [
            {
                "limits": json.loads(limits),
                "rows": [list(p) for p, text in sorted(self._limits.items()) if text == limits],
            }
            for limits in sorted(set(self._limits.values()))
        ]
        return {**other, KEY: json.dumps(entries)} if entries else other
