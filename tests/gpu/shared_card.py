"""Ranks that share one card, to run tensor parallelism without a second one: `python -m tests.gpu.shared_card`, with
the fds of `pipeline.engine.rank_process`.

NCCL refuses two ranks on one card. Small sums, those of captured steps, go through symmetric memory; everything else
goes through gloo and the host.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed

from pipeline.engine import rank_process
from pipeline.kernels.ranks import ProcessRanks

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
dist: Any = torch.distributed
MAX_BYTES = 1 << 20  # of a sum through symmetric memory


class SymmetricSum:
    """Sum of a small tensor by one kernel that can be captured: every rank reads the tensors of all others."""

    def __init__(self, rank: int, size: int, store: str, device: torch.device) -> None:
        from torch._C import _distributed_c10d  # an unstable interface of torch

        c10d: Any = _distributed_c10d
        self._name = store
        self._group = c10d.ProcessGroup(dist.FileStore(f"{store}-symmetric", size), rank, size)
        c10d._register_process_group(store, self._group)
        self._buffer = c10d._SymmetricMemory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device)
        self._memory = c10d._SymmetricMemory.rendezvous(self._buffer, store)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        own.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._name)


class SharedCardRanks(ProcessRanks):
    def __init__(self, rank: int, size: int, store: str, device: torch.device, lost: Any) -> None:
        super().__init__(rank, size, store, torch.device("cpu"), lost)
        self.device = device
        self._symmetric_sum = SymmetricSum(rank, size, store, device)
        self.num_symmetric_sums = 0

    def sum(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self._is_alone or not x_TH.numel():
            return x_TH
        if x_TH.nbytes <= MAX_BYTES and x_TH.nbytes % 16 == 0:
            self.num_exchanged += 1
            self.num_symmetric_sums += 1
            return self._symmetric_sum(x_TH)
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
