"""Task classify: the classes of a checkpoint's sequence classification head."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pipeline.engine.params import Completion
from pipeline.engine.tasks import Classify, Task, VectorResult
from pipeline.job.actor.tasks.job_task import Ask
from pipeline.job.actor.tasks.label_columns import label_fields, label_values
from pipeline.tokenization.labels import Encodes

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class ClassifyTask:
    """labels: of the head, in its order. A head of one label gives `score`: of a reranker or a regression there is
    nothing to choose. Without an activation there are no probabilities, but logits."""

    labels: tuple[str, ...]
    activation: Activation

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        if len(self.labels) == 1:
            return (pa.field("score", pa.float64()),)
        if self.activation == "none":
            return label_fields("logit", "logits")
        return label_fields("probability", "probabilities", "logit")

    def asker(self, tokenizer: Encodes) -> Ask:
        def ask(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            return prompt, Classify()

        return ask

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        logits = [c.result.values.tolist() if isinstance(c.result, VectorResult) else None for c in done]
        if len(self.labels) == 1:
            return [[row and self._activated(row)[0] for row in logits]]
        return label_values([row and self._row(row) for row in logits])

    def _row(self, logits: list[float]) -> tuple[str, float, list[dict[str, Any]]]:
        best, values = int(np.argmax(logits)), self._activated(logits)
        if self.activation == "none":
            told = [{"label": label, "logit": logit} for label, logit in zip(self.labels, logits, strict=True)]
        else:
            each = zip(self.labels, values, logits, strict=True)
            told = [{"label": label, "probability": p, "logit": logit} for label, p, logit in each]
        return self.labels[best], values[best], told

    def _activated(self, logits: list[float]) -> list[float]:
        if self.activation == "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        if self.activation == "softmax":
            most = max(logits)
            weights = [math.exp(logit - most) for logit in logits]
            total = sum(weights)
            return [weight / total for weight in weights]
        return logits


def _sigmoid(x: float) -> float:
    """Without an overflow of exp."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
