"""Which rows of a part were computed again under other limits than their job's: a note in the footer of the part.

`pipeline.retried` holds a JSON list of {"limits": {"engine.max_model_len": 8192}, "rows": [[source_file, source_row],
...]}. A row is in one entry at most, that of its last computation; one that was computed under the job's own limits is
in none. Most parts have no such note.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

KEY = "pipeline.retried"
Place = tuple[str, int]  # source_file and source_row
Limits = Mapping[str, Any]  # dotted keys of the job file


class RetriedRows:
    """The rows of one or several parts, by the limits they were computed under."""

    def __init__(self, notes: Mapping[str, str] | None = None) -> None:
        """`notes`: a part's metadata. Raises ValueError, KeyError or TypeError where the note is damaged."""
        self._limits: dict[Place, str] = {}
        self.take(notes or {})

    def take(self, notes: Mapping[str, str]) -> None:
        """Take the rows of another part in."""
        for entry in json.loads(notes.get(KEY, "[]")):
            self.add(((file, int(row)) for file, row in entry["rows"]), entry["limits"])

    def add(self, places: Iterable[Place], limits: Limits) -> None:
        """These rows were computed now; with no `limits` under the job's own."""
        text = json.dumps(dict(limits), sort_keys=True)
        for place in places:
            if limits:
                self._limits[place] = text
            else:
                self._limits.pop(place, None)

    @property
    def places(self) -> set[Place]:
        return set(self._limits)

    def of(self, places: Iterable[Place]) -> "RetriedRows":
        """Those that are among these rows."""
        some = RetriedRows()
        some._limits = {place: self._limits[place] for place in places if place in self._limits}
        return some

    def in_notes(self, notes: Mapping[str, str]) -> dict[str, str]:
        """A part's metadata with these rows in the place of those it had."""
        other = {name: text for name, text in notes.items() if name != KEY}
        entries = [
            {
                "limits": json.loads(limits),
                "rows": [list(p) for p, text in sorted(self._limits.items()) if text == limits],
            }
            for limits in sorted(set(self._limits.values()))
        ]
        return {**other, KEY: json.dumps(entries)} if entries else other
