"""How likely a model finds texts, and how far its distributions are from a reference's.

Models are compared by the hidden states that `HiddenStates` requests read: the logits of a large vocabulary never lie
in memory for a whole text. Sums are in float64: divergences of 1e-6 are differences of numbers of about 10.

Shape suffixes: R rows of logits (one after each token of a piece of text), V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.engine.forward.runner import Runner

_AT_ONCE = 64  # rows that lie in float64 at a time


def logits_in_pieces(runner: Runner, states_NH: np.ndarray, max_rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The first row of each piece of at most `max_rows` rows, and its logits (R, V) in float32."""
    for first in range(0, len(states_NH), max_rows):
        yield first, runner.logits(torch.from_numpy(states_NH[first : first + max_rows])).float()


@dataclass
class Likelihood:
    """Negative log-likelihood of the tokens of texts, each given all those before it."""

    nats: float = 0.0
    num_tokens: int = 0

    def add(self, logits_RV: torch.Tensor, next_ids: list[int]) -> None:
        """`next_ids[r]` is the token that logits_RV[r] predict. There may be more rows than ids: nothing follows the
        last token of a text."""
        for at in range(0, len(next_ids), _AT_ONCE):
            target_R = torch.tensor(next_ids[at : at + _AT_ONCE], device=logits_RV.device)
            log_RV = torch.log_softmax(logits_RV[at : at + len(target_R)].double(), dim=-1)
            self.nats -= float(log_RV.gather(1, target_R[:, None]).sum())
        self.num_tokens += len(next_ids)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean over all tokens of all texts; None without any."""
        return math.exp(min(self.nats / self.num_tokens, 700.0)) if self.num_tokens else None


@dataclass
class Divergence:
    """KL(reference || model) = sum over the vocabulary of p_ref (log p_ref - log p_model), in nats, at each position,
    and how often both find the same token likeliest."""

    nats: list[np.ndarray] = field(default_factory=list)
    num_same_top: int = 0

    def add(self, logits_RV: torch.Tensor, reference_RV: torch.Tensor) -> None:
        for at in range(0, len(logits_RV), _AT_ONCE):
            log_RV = torch.log_softmax(logits_RV[at : at + _AT_ONCE].double(), dim=-1)
            log_ref_RV = torch.log_softmax(reference_RV[at : at + _AT_ONCE].to(log_RV.device).double(), dim=-1)
            # a token without any likelihood in the reference adds nothing, and 0 * inf is no number
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
        """Of a hundred positions, one has more."""
        return float(np.quantile(np.concatenate(self.nats).astype(np.float64), 0.99))

    @property
    def top1(self) -> float:
        """The share of positions at which both find the same token likeliest."""
        return self.num_same_top / self.num_positions
