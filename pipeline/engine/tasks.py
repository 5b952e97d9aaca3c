"""What a request can ask of the model beside a completion, and what comes back: plain frozen dataclasses, no torch.

A completion is generated; these are read off the known tokens of the request, each computed once. `SamplingParams` say
nothing to them.
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
    """Of one token: its id, its log-probability and the best n alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Score:
    """How likely the request's own tokens are from position `first` on, each after all tokens before it (natural
    logarithm of the raw distribution). top: None tells the sum alone; 0 each token's, n also those of the n best.

    Nothing is known of what comes before a text's first token: `first` is at least 1.
    """

    first: int = 1
    top: int | None = None

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ConfigError(f"first = {self.first}: expected at least 1; nothing stands before a text's first token")
        if self.top is not None and not 0 <= self.top <= 100:
            raise ConfigError(f"top = {self.top}: expected 0 to 100, or none")


@dataclass(frozen=True)
class Choice:
    """How likely each label is to follow the prompt. labels: the token ids of each, at least one, no two the same.

    Where one label is the beginning of another, give each its end too (an EOS), or the longer can never win.
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
    """The prompt as a vector: the model's last hidden states, after its last norm, of the last token, of the first
    (`cls`), or the mean over all. dimensions: only the first so many (Matryoshka). normalize: to length 1."""

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        _check_pooling(self.pooling)
        if self.dimensions is not None and self.dimensions < 1:
            raise ConfigError(f"dimensions = {self.dimensions}: expected at least 1, or none")


@dataclass(frozen=True)
class Classify:
    """The scores of a sequence classification head (`score.weight` of `...ForSequenceClassification` checkpoints) over
    the prompt, as the head gives them (logits). pooling: as with `Embed`; such heads are trained on the last token."""

    pooling: Pooling = "last"

    def __post_init__(self) -> None:
        _check_pooling(self.pooling)


def _check_pooling(pooling: str) -> None:
    if pooling not in POOLINGS:
        raise ConfigError(f"pooling = {pooling!r}: expected one of {', '.join(POOLINGS)}")


@dataclass(frozen=True)
class HiddenStates:
    """The model's last hidden states, after its last norm, of the request's tokens from position `first` on: what its
    logits are made of, for comparisons of models.

    Such requests are served before others, and their time is `EngineStats.quality_us`; they count as no row's work.
    """

    first: int = 0


Task = Score | Choice | Embed | Classify | HiddenStates


@dataclass(frozen=True)
class ScoreResult:
    """logprob: the sum over `num_tokens` tokens. tokens: each of them, where `Score.top` asked."""

    logprob: float
    num_tokens: int
    tokens: tuple[TokenLogprobs, ...] | None = None

    @property
    def perplexity(self) -> float:
        """exp(-logprob / num_tokens); inf where it is larger than a float can say."""
        mean = -self.logprob / max(self.num_tokens, 1)
        return math.exp(mean) if mean < 709.0 else math.inf


@dataclass(frozen=True)
class ChoiceResult:
    """logprobs: of each label, the sum over its tokens, in the order of `Choice.labels`."""

    logprobs: tuple[float, ...]

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Of each label when one of them must follow: they add up to 1."""
        best = max(self.logprobs)
        weights = [math.exp(logprob - best) for logprob in self.logprobs]
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    @property
    def best(self) -> int:
        """Which label is likeliest; the first of equals."""
        return self.logprobs.index(max(self.logprobs))


@dataclass(frozen=True, eq=False)
class VectorResult:
    """values: float32, of an embedding as long as the model's hidden size or `Embed.dimensions`, of a classification
    one for each label of the head."""

    values: np.ndarray


@dataclass(frozen=True, eq=False)
class StatesResult:
    """states_NH: float32, of each token a row."""

    states_NH: np.ndarray


TaskResult = ScoreResult | ChoiceResult | VectorResult | StatesResult
