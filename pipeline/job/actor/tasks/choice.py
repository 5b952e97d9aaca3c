"""Task choice: which of some labels follows the prompt, and how likely each is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.engine.params import Completion
from pipeline.engine.tasks import Choice, ChoiceResult, Task
from pipeline.errors import ConfigError, RowError
from pipeline.job.actor.tasks.job_task import Ask, RowRefused
from pipeline.job.actor.tasks.label_columns import label_fields, label_values
from pipeline.tokenization.labels import Encodes, encode_labels


@dataclass(frozen=True)
class ChoiceTask:
    """labels: of all rows; None where each row brings its own."""

    labels: tuple[str, ...] | None

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return label_fields("probability", "probabilities", "logprob")

    def asker(self, tokenizer: Encodes) -> Ask:
        def ask(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            try:
                return prompt, Choice(tuple(encode_labels(tokenizer, prompt, self._of(own))))
            except ConfigError as refused:
                raise RowRefused(RowError.INVALID_LABELS, f"task.{refused}") from None

        return ask

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        return label_values([self._row(c.result, own) for c, own in zip(done, texts, strict=True)])

    def _row(self, result: object, own: str | None) -> tuple[str, float, list[dict[str, Any]]] | None:
        if not isinstance(result, ChoiceResult):
            return None
        labels, probabilities = self._of(own), result.probabilities
        each = zip(labels, probabilities, result.logprobs, strict=True)
        told = [{"label": label, "probability": p, "logprob": logprob} for label, p, logprob in each]
        return labels[result.best], probabilities[result.best], told

    def _of(self, own: str | None) -> tuple[str, ...]:
        return self.labels if self.labels is not None else tuple(json.loads(own or "[]"))
