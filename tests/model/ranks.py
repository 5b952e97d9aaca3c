"""Ranks as threads of one process, which exchange tensors through a list."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from pipeline.kernels.ranks import Exchange, OneRank
from pipeline.weights.packed import DenseWeight, LinearWeight

T = TypeVar("T")


class ThreadRanks(OneRank):
    """One rank. `sent` are its exchanges so far."""

    def __init__(self, rank: int, meeting: threading.Barrier, parts: list[torch.Tensor]) -> None:
        self.rank, self.size = rank, meeting.parties
        self._meeting, self._parts = meeting, parts
        self.sent: list[Exchange] = []

    def sum(self, x_TH: torch.Tensor) -> torch.Tensor:
        if x_TH.numel():
            self.sent.append(Exchange("sum", *x_TH.shape))
            x_TH.copy_(torch.stack(self._all(x_TH)).sum(dim=0))
        return x_TH

    def embed(self, token_ids_T: torch.Tensor, embedding: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(embedding, DenseWeight)
        embedding_LH = embedding.weight_NK
        local_T = token_ids_T - self.rank * len(embedding_LH)
        here_T = (local_T >= 0) & (local_T < len(embedding_LH))
        x_TH = torch.zeros(len(token_ids_T), embedding_LH.shape[1], dtype=dtype)
        x_TH[here_T] = embedding_LH[local_T[here_T]].to(dtype)
        return self.sum(x_TH)

    def gather_logits(self, logits_RL: torch.Tensor, vocab_size: int) -> torch.Tensor:
        self.sent.append(Exchange("gather", *logits_RL.shape))
        return torch.cat(self._all(logits_RL), dim=1)[:, :vocab_size]

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = x.clone()
        self._meeting.wait()
        found = list(self._parts)
        self._meeting.wait()
        return found


def on_ranks(size: int, work: Callable[[ThreadRanks], T]) -> list[T]:
    """Run `work` on each rank at the same time, and return the results in the order of the ranks."""
    meeting, parts = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def on_rank(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, meeting, parts))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on_rank, range(size)))
