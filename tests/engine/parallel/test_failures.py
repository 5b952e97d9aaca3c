"""Failures of a call on one rank, while the others wait for it in an exchange."""

import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.demo import demo_model
from pipeline.engine.parallel.runner import STEP_FIELDS, _ShareRunner
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.errors import RankLost
from pipeline.kernels.ranks import Exchange, OneRank
from pipeline.model.config import read_config


class Ranks(OneRank):
    """A rank of two that exchanges nothing. skip_error: raised where it takes part in the rest of a step."""

    rank, size = 1, 2

    def __init__(self, skip_error: Exception | None = None) -> None:
        self.skip_error, self.skipped = skip_error, 0

    def begin_step(self) -> None: ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def skip(self, exchanges: list[Exchange], dtype: torch.dtype) -> None:
        self.skipped += 1
        if self.skip_error is not None:
            raise self.skip_error


def share_of(ranks: Any, execute: Any = None, is_captured: bool = False) -> _ShareRunner:
    runner: Any = SimpleNamespace(
        has_vocabulary_head=True,
        hidden_size=256,
        decoder=SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32),
        is_captured=lambda step: is_captured,
        execute=execute,
    )
    return _ShareRunner(runner, read_config(demo_model("target")), ranks)


def step() -> StepInput:
    ones = np.ones(1, dtype=np.int64)
    return dummy_step(count_S=ones, context_len_S=ones, block_table_SM=ones[None], block_size=8, row_R=ones - 1)


@pytest.mark.parametrize("method", ["execute", "logits"])
def test_without_memory_for_what_the_leader_sends_a_rank_is_lost(method: str) -> None:
    """An answer would leave the leader waiting in the exchange."""
    num_rows = np.array([1 << 44])
    arrays = [num_rows]
    if method == "execute":
        arrays = [*(getattr(step(), name) for name in STEP_FIELDS), np.zeros(1), np.zeros(1), num_rows]
    with pytest.raises(RankLost, match=r"rank 1: .*memory"):
        share_of(Ranks()).answer(method, arrays)


def test_without_memory_for_the_rest_of_a_step_a_rank_is_lost() -> None:
    def execute(*_: object) -> None:
        raise MemoryError("no memory for a step")

    ranks = Ranks()
    with pytest.raises(MemoryError, match="for a step"):
        share_of(ranks, execute).execute(step(), None)
    assert ranks.skipped == 1
    with pytest.raises(RankLost, match="rank 1: no memory for an exchange"):
        share_of(Ranks(MemoryError("no memory for an exchange")), execute).execute(step(), None)


def test_an_interrupt_waits_for_the_end_of_a_captured_step() -> None:
    finished = []

    def execute(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        finished.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for its background jobs
    try:
        with pytest.raises(KeyboardInterrupt):
            share_of(Ranks(), execute, is_captured=True).execute(step(), None)
        assert finished
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
