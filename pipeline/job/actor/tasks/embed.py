"""Task embed: each row's prompt as a vector."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.engine.params import Completion
from pipeline.engine.tasks import Embed, Task, VectorResult
from pipeline.job.actor.tasks.job_task import Ask
from pipeline.tokenization.labels import Encodes


@dataclass(frozen=True)
class EmbedTask:
    """length: of the vectors."""

    embed: Embed
    length: int

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return (pa.field("embedding", pa.list_(pa.float32(), self.length)),)

    def asker(self, tokenizer: Encodes) -> Ask:
        def ask(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            return prompt, self.embed

        return ask

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        """One Arrow array: numbers as Python objects would take many times their memory."""
        values = np.zeros((len(done), self.length), dtype=np.float32)
        is_null = np.ones(len(done), dtype=bool)
        for row, completion in enumerate(done):
            if isinstance(completion.result, VectorResult):
                values[row], is_null[row] = completion.result.values, False
        numbers = pa.array(values.reshape(-1))
        return [pa.FixedSizeListArray.from_arrays(numbers, self.length, mask=pa.array(is_null))]
