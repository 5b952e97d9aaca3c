"""Ranks: the processes that compute each step together, each with a share of the weights (tensor parallelism).

The layers of every rank compute partial sums, which `sum` adds up over all ranks. `OneRank` does nothing, and
`ProcessRanks` exchanges tensors through torch.distributed: gloo on CPUs, NCCL on GPUs. Rank 0, the leader, also
schedules and samples. All ranks must call the same methods with the same shapes in the same order.

Suffixes: T tokens, R rows of logits, H hidden, V vocabulary, L vocabulary of one rank.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed

from pipeline.weights.packed import LinearWeight, select_outputs

dist: Any = torch.distributed  # process groups of its own: its global one belongs to the caller's program
MEETING = timedelta(seconds=60)  # for all ranks to connect
EXCHANGE = timedelta(days=1)  # the process that notices that a rank is lost ends those that wait for it


class Exchange(NamedTuple):
    """One call that exchanges a tensor (rows, width): a sum over all ranks, or each rank's share gathered on the
    leader."""

    kind: Literal["sum", "gather"]
    rows: int
    width: int


class OneRank:
    """The only rank of an engine on one device."""

    rank, size = 0, 1

    def sum(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. May overwrite its input."""
        return x_TH

    def embed(self, token_ids_T: torch.Tensor, embedding: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
        """Look up embeddings (T, H), of which each rank has its share of the vocabulary."""
        return select_outputs(embedding, token_ids_T).dequantize(dtype)

    def gather_logits(self, logits_RL: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return the logits (R, V) on the leader; other ranks get an unspecified tensor."""
        return logits_RL

    def least(self, value: int) -> int:
        """Return the smallest value over all ranks."""
        return value

    def leader_first(self, work: Callable[[], None]) -> None:
        """Run `work` on the leader, then on the other ranks. Within it, nothing is exchanged."""
        work()


ONE_RANK = OneRank()


class ProcessRanks(OneRank):
    """A rank of several processes on one machine. An error of `lost` is final for all of them."""

    def __init__(
        self, rank: int, size: int, store: str, device: torch.device, lost: Callable[[Exception], Exception]
    ) -> None:
        """store: path of a file that all ranks share and that does not exist before. lost: returns the error to raise
        when an exchange fails."""
        self.rank, self.size, self._lost = rank, size, lost
        self.device = device
        self.num_exchanged = 0  # since `begin_step`
        self._is_alone = False
        files = dist.FileStore(store, size)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = EXCHANGE
            self._group = dist.ProcessGroupNCCL(files, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # all ranks are on this machine
            options._timeout = MEETING
            self._group = dist.ProcessGroupGloo(files, rank, size, options)

    def begin_step(self) -> None:
        self.num_exchanged = 0

    def sum(self, x_TH: torch.Tensor) -> torch.Tensor:
        if not self._is_alone and x_TH.numel():
            self.num_exchanged += 1
            self._exchange(lambda: self._group.allreduce([x_TH], _timed(dist.AllreduceOptions())))
        return x_TH

    def embed(self, token_ids_T: torch.Tensor, embedding: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
        local_T = token_ids_T - self.rank * embedding.out_features
        is_here_T = (local_T >= 0) & (local_T < embedding.out_features)
        x_TH = select_outputs(embedding, torch.where(is_here_T, local_T, 0)).dequantize(dtype)
        return self.sum(x_TH.mul_(is_here_T[:, None]))

    def gather_logits(self, logits_RL: torch.Tensor, vocab_size: int) -> torch.Tensor:
        if self._is_alone or not len(logits_RL):
            return logits_RL.repeat(1, self.size)[:, :vocab_size]
        self.num_exchanged += 1
        parts = [torch.empty_like(logits_RL) for _ in range(self.size if self.rank == 0 else 0)]
        gathered = [parts] if parts else []
        options = _timed(dist.GatherOptions())
        self._exchange(lambda: self._group.gather(gathered, [logits_RL.contiguous()], options))
        return torch.cat(parts, dim=1)[:, :vocab_size] if parts else logits_RL

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite the tensor with the leader's on all ranks, and return it."""
        self._exchange(lambda: self._group.broadcast([x], _timed(dist.BroadcastOptions())))
        return x

    def least(self, value: int) -> int:
        found, options = torch.tensor([value], device=self.device), _timed(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MIN
        self._exchange(lambda: self._group.allreduce([found], options))
        return int(found[0])

    def leader_first(self, work: Callable[[], None]) -> None:
        for turn in (True, False):
            if turn == (self.rank == 0):
                self._is_alone = True
                try:
                    work()
                finally:
                    self._is_alone = False
            self.least(0)

    def skip(self, exchanges: Sequence[Exchange], dtype: torch.dtype) -> None:
        """Take part in the rest of a step's exchanges after this rank failed in the middle of the step. The step's
        results are meaningless on all ranks."""
        for each in exchanges[self.num_exchanged :]:
            x = torch.zeros(each.rows, each.width, dtype=dtype, device=self.device)
            if each.kind == "sum":
                self.sum(x)
            else:
                self.gather_logits(x, self.size * each.width)

    def close(self) -> None:
        del self._group

    def _exchange(self, start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise self._lost(error) from None


def _timed(options: Any) -> Any:
    options.timeout = EXCHANGE
    return options
