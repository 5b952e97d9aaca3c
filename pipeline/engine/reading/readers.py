"""Readers: they accumulate log-probabilities or hidden states of one sequence over the steps that compute them.

A reader needs the hidden states at positions first <= p < stop. They arrive in order, in one piece per step; after a
preemption they arrive again from `first` on and replace the earlier ones. step_reading.py owns the step's tensors;
readers keep plain arrays.
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
    """Reader of the log-probabilities of tokens token_P, each given the tokens up to position_P (ascending).

    top: None returns only their sum, 0 each of them, n also the n most likely tokens at each position.
    """

    num_after = 0

    def __init__(self, position_P: np.ndarray, token_P: np.ndarray, top: int | None = None) -> None:
        assert len(position_P), "a reader needs at least one token"
        self.position_P, self.token_P, self._top = position_P, token_P, top
        self.num_top = top or 0
        self.first, self.stop = int(position_P[0]), int(position_P[-1]) + 1
        self.logprob_P = np.zeros(len(position_P), dtype=np.float64)
        self.top_P: list[tuple[tuple[int, float], ...]] = [()] * len(position_P)

    @classmethod
    def of_tokens(cls, token_ids: Sequence[int] | np.ndarray, task: Score) -> "LogprobReader":
        """Build a reader of the tokens of a text from position `task.first` on."""
        position_P = np.arange(task.first - 1, len(token_ids) - 1)
        return cls(position_P, np.array(token_ids[task.first :], dtype=np.int64), task.top)

    def wanted(self, start: int, stop: int) -> slice:
        """Return which of its tokens the hidden states at positions start <= p < stop cover."""
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
    """Reader that pools the hidden states of one sequence to one vector; see `Embed` and `Classify`.

    A mean is summed in float64, so that where steps split the text changes only its last digit.
    """

    num_after = 0

    def __init__(self, task: Embed | Classify, num_tokens: int, class_head_CH: np.ndarray | None) -> None:
        """class_head_CH: the model's, for `Classify`."""
        self._task, self._class_head_CH = task, class_head_CH
        self.is_mean = task.pooling == "mean"
        self.first = num_tokens - 1 if task.pooling == "last" else 0
        self.stop = 1 if task.pooling == "cls" else num_tokens
        self._sum_H: np.ndarray | None = None

    def put(self, start: int, sum_H: np.ndarray) -> None:
        """Add the sum of the hidden states of one step, which start at position `start`."""
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
    """Reader of the hidden states of one sequence's tokens from position `first` on."""

    num_after = 0

    def __init__(self, first: int, num_tokens: int) -> None:
        self.first, self.stop = first, num_tokens
        self._pieces: list[np.ndarray] = []

    def put(self, start: int, states_NH: np.ndarray) -> None:
        """Add the hidden states of one step, which start at position `start`."""
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
