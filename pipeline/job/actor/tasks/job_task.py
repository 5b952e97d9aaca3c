"""What a task is to a job: how it makes a request of a row, and which columns come of it.

`JobTask` is the only thing that the rest of the job knows of tasks. A job that generates has none.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from pipeline.engine.params import Completion
from pipeline.engine.tasks import Task
from pipeline.errors import RowError
from pipeline.tokenization.labels import Encodes


class RowRefused(Exception):
    """Why a row cannot be asked."""

    def __init__(self, code: RowError, message: str) -> None:
        super().__init__(message)
        self.code = code


# From the token ids of a row's prompt, and what `RowTexts` read of the row, to the token ids of the request and what is
# asked of it. Raises RowRefused.
Ask = Callable[[list[int], str | None], tuple[list[int], Task]]


class JobTask(Protocol):
    """Picklable: it goes to the actors."""

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """The result columns in the place of generated_text and finish_reason."""
        ...

    def asker(self, tokenizer: Encodes) -> Ask:
        """How this tokenizer's rows are asked. Thread-safe."""
        ...

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        """What `fields` hold of each completion, null where it has none: lists, or Arrow arrays. texts: what `RowTexts`
        read of each row."""
        ...
