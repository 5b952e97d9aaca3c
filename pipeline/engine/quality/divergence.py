"""Likelihood of texts under a model, and divergence of its distributions from a reference's.

Models are compared by the hidden states of `HiddenStates` requests: the logits of a large vocabulary are never in
memory for a whole text. Sums are in float64: divergences of 1e-6 are differences of numbers of about 10.

Shape suffixes: R rows of logits (one after each token of a piece of text), V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.engine.forward.runner import Runner

_CHUNK_ROWS = 64  # rows in float64 at a time


def logits_in_pieces(runner: Runner, states_NH: np.ndarray, max_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index of the first row of each piece of up to `max_rows` rows, and its logits (R, V) in float32."""
    for first in range(0, len(states_NH), max_rows):
        yield first, runner.logits(torch.from_numpy(states_NH[first : first + max_rows])).float()


@dataclass
class Likelihood:
    """Negative log-likelihood of the tokens of texts, each given all tokens before it."""

    nats: float = 0.0
    num_tokens: int = 0

    def add(self, logits_RV: torch.Tensor, next_ids: list[int]) -> None:
        """Add tokens: `next_ids[r]` follows row logits_RV[r]. There may be more rows than ids, because nothing follows
        the last token of a text."""
        for begin in range(0, len(next_ids), _CHUNK_ROWS):
            target_R = torch.tensor(next_ids[begin : begin + _CHUNK_ROWS], device=logits_RV.device)
            log_RV = torch.log_softmax(logits_RV[begin : begin + len(target_R)].double(), dim=-1)
            self.nats -= float(log_RV.gather(1, target_R[:, None]).sum())
        self.num_tokens += len(next_ids)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean over all tokens of all texts; None without tokens."""
        return math.exp(min(self.nats / self.num_tokens, 700.0)) if self.num_tokens else None


@dataclass
class Divergence:
    """KL(reference || model) = sum over the vocabulary of p_ref (log p_ref - log p_model), in nats, at each position,
    and the number of positions with the same most likely token."""

    nats: list[np.ndarray] = field(default_factory=list)
    num_same_top: int = 0

    def add(self, logits_RV: torch.Tensor, reference_RV: torch.Tensor) -> None:
        for begin in range(0, len(logits_RV), _CHUNK_ROWS):
            log_RV = torch.log_softmax(logits_RV[begin : begin + _CHUNK_ROWS].double(), dim=-1)
            log_ref_RV = torch.log_softmax(reference_RV[begin : begin + _CHUNK_ROWS].to(log_RV.device).double(), dim=-1)
            # a token with probability 0 in the reference adds nothing, and 0 * inf would be NaN
            nats_RV = torch.where(log_ref_RV.isinf(), 0.0, log_ref_RV.exp() * (log_ref_RV - log_RV))
            self.nats.append(nats_RV.sum(-1).float().cpu().numpy())
            self.num_same_top += int((log_RV.argmax(-1) == log_ref_RV.argmax(-1)).sum())

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.nats))

    @property
    def mean(self) -> float:
        return float(np.concatenate(self.nats).mean(dtype=np.float64))

    @property
    def p99(self) -> float:
        """99th percentile over positions."""
        return float(np.quantile(np.concatenate(self.nats).astype(np.float64), 0.99))

    @property
    def top1(self) -> float:
        """Share of positions at which both models have the same most likely token."""
        return self.num_same_top / self.num_positions
