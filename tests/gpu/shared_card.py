"""Ranks that share one card, to run tensor parallelism without a second one: `python -m tests.gpu.shared_card`, with
the fds of `pipeline.engine.rank_process`.

NCCL refuses two ranks on one card. Small sums go through symmetric memory as on several cards, everything else through
gloo and the host.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed

from pipeline.engine import rank_process
from pipeline.kernels.ranks import OneShotSum, ProcessRanks

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
dist: Any = torch.distributed


class SharedCardRanks(ProcessRanks):
    def __init__(self, rank: int, size: int, store: str, device: torch.device, lost: Any) -> None:
        super().__init__(rank, size, store, torch.device("cpu"), lost)
        self.device = device
        self._one_shot = OneShotSum(rank, size, dist.FileStore(f"{store}-symmetric", size), store, device)
        self.num_one_shot = 0

    def sum(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self._is_alone or not x_TH.numel():
            return x_TH
        assert self._one_shot is not None
        if self._one_shot.supports(x_TH):
            self.num_one_shot += 1
            return super().sum(x_TH)
        return x_TH.copy_(super().sum(x_TH.float().cpu()))

    def gather_logits(self, logits_RL: torch.Tensor, vocab_size: int) -> torch.Tensor:
        if self._is_alone:
            return super().gather_logits(logits_RL, vocab_size)
        return super().gather_logits(logits_RL.float().cpu(), vocab_size).to(logits_RL.device, logits_RL.dtype)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().broadcast(x.cpu()))

    def least(self, value: int) -> int:
        device, self.device = self.device, torch.device("cpu")
        try:
            return super().least(value)
        finally:
            self.device = device


if __name__ == "__main__":
    rank_process.ProcessRanks = SharedCardRanks  # type: ignore[misc]
    rank_process.main(*map(int, sys.argv[1:]))
