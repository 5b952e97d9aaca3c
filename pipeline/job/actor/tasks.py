"""Tasks that replace completions: their requests, result columns and plain values.

The rest of the job knows tasks only through `JobTask`. A job that generates text has none.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import pyarrow as pa

from pipeline.data.output.result_columns import LOGPROBS_FIELD
from pipeline.engine.completion import Completion
from pipeline.engine.tasks import (
    Choice,
    ChoiceResult,
    Classify,
    Embed,
    Score,
    ScoreResult,
    Task,
    TaskResult,
    TokenLogprobs,
    VectorResult,
)
from pipeline.errors import ConfigError, RowError
from pipeline.tokenization.labels import encode_labels

if TYPE_CHECKING:
    from pipeline.tokenization.tokenizer import Tokenizer

Activation = Literal["softmax", "sigmoid", "none"]  # on the logits of a classification head


class RowRefused(Exception):
    """A row cannot be sent to the engine."""

    def __init__(self, code: RowError, message: str) -> None:
        super().__init__(message)
        self.code = code


# (token ids of a row's prompt, the row's text of `RowTexts`) -> (token ids of the request, task). Raises RowRefused.
MakeRequest = Callable[[list[int], str | None], tuple[list[int], Task]]


class JobTask(Protocol):
    """Task of a job. Picklable, since it is sent to the actors."""

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """Result columns that replace generated_text and finish_reason."""
        ...

    def asker(self, tokenizer: "Tokenizer") -> MakeRequest:
        """Return the function that makes requests of a row with this tokenizer. Thread-safe."""
        ...

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        """Return the values of `fields` for each completion, null for failed rows: lists or Arrow arrays. texts: each
        row's text of `RowTexts`."""
        ...


@dataclass(frozen=True)
class ChoiceTask:
    """Task choice: which of several labels follows the prompt, and the probability of each. labels: for all rows; None
    if each row has its own."""

    labels: tuple[str, ...] | None

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return _label_fields("probability", "probabilities", "logprob")

    def asker(self, tokenizer: "Tokenizer") -> MakeRequest:
        def make_request(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            try:
                return prompt, Choice(tuple(encode_labels(tokenizer, prompt, self._of(own))))
            except ConfigError as refused:
                raise RowRefused(RowError.INVALID_LABELS, f"task.{refused}") from None

        return make_request

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        return _label_values([self._row(c.result, own) for c, own in zip(done, texts, strict=True)])

    def _row(self, result: object, own: str | None) -> tuple[str, float, list[dict[str, Any]]] | None:
        if not isinstance(result, ChoiceResult):
            return None
        labels, probabilities = self._of(own), result.probabilities
        each = zip(labels, probabilities, result.logprobs, strict=True)
        label_values = [{"label": label, "probability": p, "logprob": logprob} for label, p, logprob in each]
        return labels[result.best], probabilities[result.best], label_values

    def _of(self, own: str | None) -> tuple[str, ...]:
        return self.labels if self.labels is not None else tuple(json.loads(own or "[]"))


@dataclass(frozen=True)
class ScoreTask:
    """Task score: the probability of a text. of_completion: score the row's completion after its prompt; else the
    prompt from its second token on. top: see `Score`."""

    of_completion: bool
    top: int | None = None

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        sums = (
            pa.field("logprob", pa.float64()),
            pa.field("num_scored_tokens", pa.int32()),
            pa.field("perplexity", pa.float64()),
        )
        return sums if self.top is None else (*sums, pa.field("token_logprobs", LOGPROBS_FIELD.type))

    def asker(self, tokenizer: "Tokenizer") -> MakeRequest:
        def make_request(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            if not self.of_completion:
                if len(prompt) < 2:
                    reason = f"the text has {len(prompt)} tokens; a text is scored from its second token on"
                    raise RowRefused(RowError.EMPTY_PROMPT, reason)
                return prompt, Score(1, self.top)
            completion = tokenizer.continuation(prompt, own or "")
            if not completion:
                raise RowRefused(RowError.INVALID_COMPLETION, "task.completion: the text has no tokens")
            if not prompt:
                raise RowRefused(RowError.EMPTY_PROMPT, "the prompt has no tokens")
            return [*prompt, *completion], Score(len(prompt), self.top)

        return make_request

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        found = [c.result if isinstance(c.result, ScoreResult) else None for c in done]
        sums = [
            [result and result.logprob for result in found],
            [result and result.num_tokens for result in found],
            [result and result.perplexity for result in found],
        ]
        return sums if self.top is None else [*sums, [plain_logprobs(result and result.tokens) for result in found]]


@dataclass(frozen=True)
class EmbedTask:
    """Task embed: each row's prompt as a vector. length: of each vector."""

    embed: Embed
    length: int

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return (pa.field("embedding", pa.list_(pa.float32(), self.length)),)

    def asker(self, tokenizer: "Tokenizer") -> MakeRequest:
        def make_request(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            return prompt, self.embed

        return make_request

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        """Return one Arrow array: Python numbers would take many times the memory."""
        values = np.zeros((len(done), self.length), dtype=np.float32)
        is_null = np.ones(len(done), dtype=bool)
        for row, completion in enumerate(done):
            if isinstance(completion.result, VectorResult):
                values[row], is_null[row] = completion.result.values, False
        numbers = pa.array(values.reshape(-1))
        return [pa.FixedSizeListArray.from_arrays(numbers, self.length, mask=pa.array(is_null))]


@dataclass(frozen=True)
class ClassifyTask:
    """Task classify: the classes of a checkpoint's sequence classification head. labels: in the order of the head. A
    head with one label, such as a reranker or a regression, yields `score`. Without an activation, logits replace
    probabilities."""

    labels: tuple[str, ...]
    activation: Activation

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        if len(self.labels) == 1:
            return (pa.field("score", pa.float64()),)
        if self.activation == "none":
            return _label_fields("logit", "logits")
        return _label_fields("probability", "probabilities", "logit")

    def asker(self, tokenizer: "Tokenizer") -> MakeRequest:
        def make_request(prompt: list[int], own: str | None) -> tuple[list[int], Task]:
            return prompt, Classify()

        return make_request

    def columns(self, done: Sequence[Completion], texts: Sequence[str | None]) -> list[Any]:
        logits = [c.result.values.tolist() if isinstance(c.result, VectorResult) else None for c in done]
        if len(self.labels) == 1:
            return [[row and self._activated(row)[0] for row in logits]]
        return _label_values([row and self._row(row) for row in logits])

    def _row(self, logits: list[float]) -> tuple[str, float, list[dict[str, Any]]]:
        best, values = int(np.argmax(logits)), self._activated(logits)
        if self.activation == "none":
            label_values = [{"label": label, "logit": logit} for label, logit in zip(self.labels, logits, strict=True)]
        else:
            each = zip(self.labels, values, logits, strict=True)
            label_values = [{"label": label, "probability": p, "logit": logit} for label, p, logit in each]
        return self.labels[best], values[best], label_values

    def _activated(self, logits: list[float]) -> list[float]:
        if self.activation == "sigmoid":
            return [_sigmoid(logit) for logit in logits]
        if self.activation == "softmax":
            max_logit = max(logits)
            weights = [math.exp(logit - max_logit) for logit in logits]
            total = sum(weights)
            return [weight / total for weight in weights]
        return logits


def _sigmoid(x: float) -> float:
    """Return the sigmoid without an overflow of exp."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _label_fields(number: str, numbers: str, *others: str) -> tuple[pa.Field, ...]:
    """Return label, label_<number> and label_<numbers>, a list of structs with `label`, `number` and the `others`."""
    each = [pa.field("label", pa.string()), *(pa.field(name, pa.float64()) for name in (number, *others))]
    return (
        pa.field("label", pa.string()),
        pa.field(f"label_{number}", pa.float64()),
        pa.field(f"label_{numbers}", pa.list_(pa.struct(each))),
    )


def _label_values(rows: Sequence[tuple[object, ...] | None]) -> list[list[object]]:
    """Return the three columns of the rows' values, null for rows without values."""
    return [[row and row[column] for row in rows] for column in range(3)]


def to_plain(result: TaskResult | None) -> dict[str, Any] | None:
    """Convert a result for JSON. float32 numbers become decimals that convert back exactly."""
    match result:
        case None:
            return None
        case ScoreResult():
            return {"score": asdict(result)}
        case ChoiceResult():
            return {"choice": asdict(result)}
        case VectorResult():
            return {"vector": result.values.tolist()}


def of_plain(raw: dict[str, Any] | None) -> TaskResult | None:
    """Restore a result of `to_plain` after a round trip through JSON."""
    match raw:
        case None:
            return None
        case {"score": {"logprob": logprob, "num_tokens": num_tokens, "tokens": tokens}}:
            return ScoreResult(logprob, num_tokens, None if tokens is None else tuple(map(token_logprobs, tokens)))
        case {"choice": {"logprobs": logprobs}}:
            return ChoiceResult(tuple(logprobs))
        case {"vector": values}:
            return VectorResult(np.array(values, dtype=np.float32))
    raise ValueError(f"not a task result: {', '.join(raw)}")


def plain_logprobs(tokens: Sequence[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    """Convert to the format of the column `logprobs`."""
    if tokens is None:
        return None
    return [
        {"token_id": t.token_id, "logprob": t.logprob, "top": [{"token_id": i, "logprob": p} for i, p in t.top]}
        for t in tokens
    ]


def token_logprobs(raw: dict[str, Any]) -> TokenLogprobs:
    return TokenLogprobs(raw["token_id"], raw["logprob"], tuple((i, p) for i, p in raw["top"]))
