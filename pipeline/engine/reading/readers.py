"""Who keeps what is read of one sequence's tokens, over the steps that compute them.

A reader wants the hidden states at the positions first <= p < stop. They come in order, in as many pieces as steps
compute them; after a preemption they come again from `first` on, and count anew. The tensors are the step's
(step_reading.py); a reader keeps plain arrays.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.engine.tasks import (
    ChoiceResult,
    Classify,
    Embed,
    Score,
    ScoreResult,
    StatesResult,
    TokenLogprobs,
    VectorResult,
)


class LogprobReader:
    """The log-probabilities of tokens token_P, each after the tokens up to position_P; positions ascend.

    top: None tells their sum alone; 0 each of them, n also the n likeliest tokens in its place.
    """

    num_after = 0

    def __init__(self, position_P: np.ndarray, token_P: np.ndarray, top: int | None = None) -> None:
        assert len(position_P), "somebody wants something"
        self.position_P, self.token_P, self._top = position_P, token_P, top
        self.num_top = top or 0
        self.first, self.stop = int(position_P[0]), int(position_P[-1]) + 1
        self.logprob_P = np.zeros(len(position_P), dtype=np.float64)
        self.top_P: list[tuple[tuple[int, float], ...]] = [()] * len(position_P)

    @classmethod
    def of_tokens(cls, token_ids: Sequence[int] | np.ndarray, task: Score) -> "LogprobReader":
        """Of the tokens of a text from position `task.first` on."""
        position_P = np.arange(task.first - 1, len(token_ids) - 1)
        return cls(position_P, np.array(token_ids[task.first :], dtype=np.int64), task.top)

    def wanted(self, start: int, stop: int) -> slice:
        """Which of its tokens are told by the hidden states at the positions start <= p < stop."""
        return slice(*np.searchsorted(self.position_P, (start, stop)).tolist())

    def put(
        self, wanted: slice, logprob_P: np.ndarray, top_P: Sequence[tuple[tuple[int, float], ...]] | None = None
    ) -> None:
        self.logprob_P[wanted] = logprob_P
        if top_P is not None:
            self.top_P[wanted] = top_P

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.logprob_P).all())

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        return None

    def result(self) -> ScoreResult | ChoiceResult:
        tokens = None
        if self._top is not None:
            each = zip(self.token_P.tolist(), self.logprob_P.tolist(), self.top_P)
            tokens = tuple(TokenLogprobs(token, logprob, top) for token, logprob, top in each)
        return ScoreResult(float(self.logprob_P.sum()), len(self.logprob_P), tokens)


class PoolingReader:
    """The hidden states of one sequence as one vector; see `Embed` and `Classify`.

    A mean is summed in float64, so that it does not depend on where steps cut the text but in the last place.
    """

    num_after = 0

    def __init__(self, task: Embed | Classify, num_tokens: int, class_head_CH: np.ndarray | None) -> None:
        """class_head_CH: of the model, for `Classify`."""
        self._task, self._class_head_CH = task, class_head_CH
        self.is_mean = task.pooling == "mean"
        self.first = num_tokens - 1 if task.pooling == "last" else 0
        self.stop = 1 if task.pooling == "cls" else num_tokens
        self._sum_H: np.ndarray | None = None

    def put(self, start: int, sum_H: np.ndarray) -> None:
        """The sum of the hidden states at the positions from `start` on that one step computed."""
        before_H = None if start <= self.first else self._sum_H
        self._sum_H = sum_H.astype(np.float64) if before_H is None else before_H + sum_H

    @property
    def is_finite(self) -> bool:
        assert self._sum_H is not None
        return bool(np.isfinite(self._sum_H).all())

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        return None

    def result(self) -> VectorResult:
        assert self._sum_H is not None
        pooled_H = (self._sum_H / (self.stop - self.first)).astype(np.float32)
        if isinstance(self._task, Classify):
            assert self._class_head_CH is not None
            return VectorResult(self._class_head_CH @ pooled_H)
        pooled_H = pooled_H[: self._task.dimensions]
        if self._task.normalize:
            pooled_H = pooled_H / max(float(np.linalg.norm(pooled_H)), 1e-12)  # as torch.nn.functional.normalize
        return VectorResult(pooled_H)


class StatesReader:
    """The hidden states of one sequence's tokens from position `first` on."""

    num_after = 0

    def __init__(self, first: int, num_tokens: int) -> None:
        self.first, self.stop = first, num_tokens
        self._pieces: list[np.ndarray] = []

    def put(self, start: int, states_NH: np.ndarray) -> None:
        """The hidden states at the positions from `start` on that one step computed."""
        if start <= self.first:
            self._pieces.clear()
        self._pieces.append(states_NH)

    @property
    def is_finite(self) -> bool:
        return all(bool(np.isfinite(states_NH).all()) for states_NH in self._pieces)

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        return None

    def result(self) -> StatesResult:
        return StatesResult(np.concatenate(self._pieces))
