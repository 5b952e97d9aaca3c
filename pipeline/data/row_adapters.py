"""The adapter of each row."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.errors import RowError


@dataclass(frozen=True)
class RowAdapters:
    """Adapter of each row: names[0], or the name in `column`, which must be among `names`; null: the base model."""

    names: tuple[str, ...]
    column: str | None = None

    def read(self, values: Iterable[object], errors: list[str | None], messages: list[str | None]) -> list[str | None]:
        """Return each row's adapter. values: of the column. A row with another value becomes an error row (changes
        `errors` and `messages` in place)."""
        if self.column is None:
            return [self.names[0] for _ in errors]
        adapters: list[str | None] = []
        for i, value in enumerate(values):
            is_known = isinstance(value, str) and value in self.names
            if not is_known and value is not None and errors[i] is None:
                known = ", ".join(self.names)
                errors[i] = str(RowError.UNKNOWN_ADAPTER)
                messages[i] = (
                    f"model.adapter: column {self.column!r} holds {value!r:.80}, expected null or one of {known}"
                )
            adapters.append(value if isinstance(value, str) and is_known else None)
        return adapters
