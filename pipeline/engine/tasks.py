"""Tasks of a request other than a completion, and their results: plain frozen dataclasses, no torch.

A completion is generated; task results are computed from the known tokens of the request, each in one pass.
`SamplingParams` do not apply to them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import ConfigError

Pooling = Literal["last", "mean", "cls"]
POOLINGS: tuple[Pooling, ...] = ("last", "mean", "cls")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one token, with its id and the n best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Score:
    """Log-probability of the request's own tokens from position `first` on, each given all tokens before it (natural
    logarithm of the raw distribution). top: None returns only the sum, 0 each token's, n also those of the n best.

    A text's first token has no context, so `first` is at least 1.
    """

    first: int = 1
    top: int | None = None

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ConfigError(f"first = {self.first}: expected at least 1; a text's first token has no context")
        if self.top is not None and not 0 <= self.top <= 100:
            raise ConfigError(f"top = {self.top}: expected 0 to 100, or none")


@dataclass(frozen=True)
class Choice:
    """Log-probability of each label after the prompt. labels: the token ids of each, at least one, all different.

    If one label is a prefix of another, end each with an EOS, or the longer one can never win.
    """

    labels: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(tuple(label) for label in self.labels))
        if not self.labels or not all(self.labels):
            raise ConfigError("labels: expected at least one, and at least one token in each")
        if len(set(self.labels)) < len(self.labels):
            raise ConfigError("labels: two of them have the same tokens")


@dataclass(frozen=True)
class Embed:
    """Vector of the prompt: the model's last hidden states, after its final norm, of the last token, of the first
    (`cls`), or their mean. dimensions: keep only this many leading values (Matryoshka). normalize: to length 1."""

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        _check_pooling(self.pooling)
        if self.dimensions is not None and self.dimensions < 1:
            raise ConfigError(f"dimensions = {self.dimensions}: expected at least 1, or none")


@dataclass(frozen=True)
class Classify:
    """Logits of a sequence classification head (`score.weight` of `...ForSequenceClassification` checkpoints) over the
    prompt. pooling: as in `Embed`; such heads are trained on the last token."""

    pooling: Pooling = "last"

    def __post_init__(self) -> None:
        _check_pooling(self.pooling)


def _check_pooling(pooling: str) -> None:
    if pooling not in POOLINGS:
        raise ConfigError(f"pooling = {pooling!r}: expected one of {', '.join(POOLINGS)}")


@dataclass(frozen=True)
class HiddenStates:
    """The model's last hidden states, after its final norm, of the request's tokens from position `first` on: the
    input of its logits, for comparisons of models.

    Such requests are served before others, and their time counts as `EngineStats.quality_us`, not as any row's work.
    """

    first: int = 0


Task = Score | Choice | Embed | Classify | HiddenStates


@dataclass(frozen=True)
class ScoreResult:
    """logprob: the sum over `num_tokens` tokens. tokens: each of them, if `Score.top` is set."""

    logprob: float
    num_tokens: int
    tokens: tuple[TokenLogprobs, ...] | None = None

    @property
    def perplexity(self) -> float:
        """Return exp(-logprob / num_tokens); inf if it overflows a float."""
        mean = -self.logprob / max(self.num_tokens, 1)
        return math.exp(mean) if mean < 709.0 else math.inf


@dataclass(frozen=True)
class ChoiceResult:
    """logprobs: for each label the sum over its tokens, in the order of `Choice.labels`."""

    logprobs: tuple[float, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Probability of each label given that one of them follows; they sum to 1."""
        best = max(self.logprobs)
        weights = [math.exp(logprob - best) for logprob in self.logprobs]
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    @property
    def best(self) -> int:
        """Index of the most likely label; the first of equals."""
        return self.logprobs.index(max(self.logprobs))


@dataclass(frozen=True, eq=False)
class VectorResult:
    """values: float32; of an embedding the model's hidden size or `Embed.dimensions` values, of a classification one
    for each label of the head."""

    values: np.ndarray


@dataclass(frozen=True, eq=False)
class StatesResult:
    """states_NH: float32, one row per token."""

    states_NH: np.ndarray


TaskResult = ScoreResult | ChoiceResult | VectorResult | StatesResult
