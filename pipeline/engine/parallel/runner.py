"""Runs a step on all ranks: `ParallelRunner` on the leader, `serve` on the others. Both call the same `ModelRunner`.

Only plans are sent to the other ranks, and tensors that only the device knows: the sampled tokens of a step in flight,
and hidden states whose logits are wanted later. If a rank runs out of memory it takes part in the remaining exchanges
of the step, and the leader undoes the step.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import torch

from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.parallel.group import RankGroup, failure_of
from pipeline.engine.parallel.plans import PlanMemory
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import RankLost
from pipeline.kernels.ranks import Exchange, ProcessRanks
from pipeline.model.config import ModelConfig
from pipeline.model.sharding import exchanges_of_step

T = TypeVar("T")
STEP_FIELDS = tuple(field.name for field in fields(StepInput))


class ParallelRunner:
    """Runner of the leader; see `engine.forward.runner.Runner`."""

    def __init__(self, own: ModelRunner, model: ModelConfig, ranks: ProcessRanks, group: RankGroup) -> None:
        """own: of the leader's share. model: the whole model."""
        self._own, self._share, self._group, self._ranks = own, _ShareRunner(own, model, ranks), group, ranks
        self.vocab_size, self.hidden_size = own.vocab_size, own.hidden_size
        self.class_head_CH, self.has_vocabulary_head = own.class_head_CH, own.has_vocabulary_head
        self.is_asynchronous = own.is_asynchronous
        self.greedy, self.sample = own.greedy, own.sample

    @property
    def has_graphs(self) -> bool:
        return self._own.has_graphs

    def execute(self, step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        arrays = [getattr(step, name) for name in STEP_FIELDS]
        if future is not None:
            num_rows = np.array([len(future.token_ids_R)])
            arrays += [future.token_index_F, future.row_F, num_rows]
        return self._call("execute", arrays, lambda: self._share.execute(step, future))

    def execute_and_read(self, step: StepInput, row_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        arrays = [*(getattr(step, name) for name in STEP_FIELDS), row_N]
        return self._call("execute_and_read", arrays, lambda: self._share.execute_and_read(step, row_N))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        hidden_RH = hidden_RH.to(self._own.decoder.device, self._own.decoder.dtype).contiguous()
        return self._call("logits", [np.array([len(hidden_RH)])], lambda: self._share.logits(hidden_RH))

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        raise AssertionError("models with states are not divided over ranks")

    def zero_pages(self, page_ids: list[int]) -> None:
        self._call("zero_pages", [np.array(page_ids)], lambda: self._own.zero_pages(page_ids))

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()
        self._group.close()

    def _call(self, method: str, arrays: list[np.ndarray | None], run: Callable[[], T]) -> T:
        self._group.call(method, arrays)
        try:
            result = run()
        except RankLost as error:
            raise self._group.lost(error) from None
        except BaseException:
            self._group.wait()  # all ranks have taken part in the step
            raise
        self._group.wait()
        return result


def serve(runner: ModelRunner, model: ModelConfig, ranks: ProcessRanks, memory: PlanMemory, leader: Connection) -> None:
    """Answer the leader's calls until its connection closes; errors are answers too. Raises RankLost."""
    share = _ShareRunner(runner, model, ranks)
    while True:
        try:
            method, arrays = memory.read(leader.recv_bytes())
        except EOFError:
            return
        failure = None
        try:
            share.answer(method, arrays)
        except RankLost:
            raise
        except Exception as error:
            failure = failure_of(error)
        if failure is not None and runner.is_asynchronous:
            torch.cuda.empty_cache()  # the exception has been dropped, and with it the step's tensors
        leader.send(failure)


class _ShareRunner:
    """Computes calls on one rank. A call that fails takes part in the remaining exchanges of the step."""

    def __init__(self, runner: ModelRunner, model: ModelConfig, ranks: ProcessRanks) -> None:
        self._runner, self._model, self._ranks = runner, model, ranks
        self._has_head = runner.has_vocabulary_head

    def answer(self, method: str, arrays: list[np.ndarray | None]) -> None:
        """Compute a call from its arrays, on a rank other than the leader."""
        device, numbers = self._runner.decoder.device, arrays[len(STEP_FIELDS) :]
        if method == "execute":
            future = None
            if numbers:
                index_F, row_F, num_rows = numbers
                assert index_F is not None
                assert row_F is not None
                assert num_rows is not None
                with self._lost_if_it_fails():
                    token_ids_R = torch.empty(int(num_rows[0]), dtype=torch.int64, device=device)
                future = FutureTokens(index_F, row_F, token_ids_R)
            self.execute(_step_of(arrays), future)
        elif method == "execute_and_read":
            (row_N,) = numbers
            assert row_N is not None
            self.execute_and_read(_step_of(arrays), row_N)
        elif method == "logits":
            (num_rows,) = arrays
            assert num_rows is not None
            size = int(num_rows[0]), self._runner.hidden_size
            with self._lost_if_it_fails():
                hidden_RH = torch.empty(size, dtype=self._runner.decoder.dtype, device=device)
            self.logits(hidden_RH)
        else:
            assert method == "zero_pages"
            (page_ids,) = arrays
            assert page_ids is not None
            self._runner.zero_pages(page_ids.tolist())

    def execute(self, step: StepInput, future: FutureTokens | None) -> torch.Tensor:
        if future is not None:
            self._broadcast(future.token_ids_R)
        if not self._runner.is_captured(step):
            exchanges = self._exchanges(step, len(step.logit_row_R))
            return self._attempt(exchanges, lambda: self._runner.execute(step, future))
        with _deferred_interrupts():  # nothing can take part in the rest of a captured step
            return self._attempt(None, lambda: self._runner.execute(step, future))

    def execute_and_read(self, step: StepInput, row_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        exchanges = self._exchanges(step, len(self._runner.computed_rows(step, row_N)))
        return self._attempt(exchanges, lambda: self._runner.execute_and_read(step, row_N))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        self._broadcast(hidden_RH)
        exchanges = exchanges_of_step(self._model, self._ranks.size, 0, 0, len(hidden_RH) * self._has_head)
        return self._attempt(exchanges, lambda: self._runner.logits(hidden_RH))

    @torch.inference_mode()
    def _broadcast(self, x: torch.Tensor) -> None:
        with self._lost_if_it_fails():
            self._ranks.broadcast(x)

    @contextlib.contextmanager
    def _lost_if_it_fails(self) -> Iterator[None]:
        """Raise RankLost for any error, because other ranks wait for this one in an exchange."""
        try:
            yield
        except Exception as error:
            raise RankLost(f"rank {self._ranks.rank}: {error}") from error

    def _exchanges(self, step: StepInput, num_last: int) -> list[Exchange]:
        sizes = len(step.token_id_T), num_last, len(step.logit_row_R) * self._has_head
        return exchanges_of_step(self._model, self._ranks.size, *sizes)

    def _attempt(self, exchanges: list[Exchange] | None, run: Callable[[], T]) -> T:
        """exchanges: of the call; None: unknown, so a failure ends the group."""
        self._ranks.begin_step()
        try:
            return run()
        except RankLost:
            raise
        except BaseException as error:
            if exchanges is None:
                raise RankLost(f"a captured step failed on rank {self._ranks.rank}: {error}") from error
            with self._lost_if_it_fails():
                self._ranks.skip(exchanges, self._runner.decoder.dtype)
            raise


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """Deliver a Ctrl-C during the block after it."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets them
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def _step_of(arrays: list[np.ndarray | None]) -> StepInput:
    return StepInput(**dict(zip(STEP_FIELDS, arrays)))  # pyright: ignore[reportArgumentType]
