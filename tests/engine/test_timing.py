"""Steps that are timed at start-up read what steps of real sequences would read."""

import numpy as np
import pytest
import torch

from pipeline.engine import timing
from pipeline.engine.propose.ngram import NgramProposer
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import StepInput, made_input


class Noting:
    """A runner that computes nothing."""

    vocab_size, is_asynchronous, most_short_queries = 4, False, 0

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self.written: list[int] = []

    def execute(self, step: StepInput, late=None) -> torch.Tensor:
        self.steps.append(step)
        return torch.zeros(len(step.logit_row_R), self.vocab_size)

    def zero_blocks(self, blocks: list[int]) -> None:
        assert not self.steps, "before anything is timed"
        self.written += blocks


def test_sequences_have_blocks_of_their_own_as_far_as_there_are_some() -> None:
    for num_blocks, most_times in ((40, 1), (20, 2), (9, 4), (0, 4)):  # of 4 sequences with 10 blocks each
        step = made_input(8, 4, 150, 16, 1000, 8, num_blocks)
        times = np.bincount(step.block_table_SM.ravel())
        assert step.block_table_SM.shape == (4, 10)
        assert len(times) == max(num_blocks, 10)
        assert times.max() == most_times
        for row_M in step.block_table_SM:
            assert len(set(row_M.tolist())) == 10
        written_T = step.slot_mapping_T // 16
        assert written_T.tolist() == [step.block_table_SM[s, 150 // 16] for s in range(4) for _ in range(2)]


@pytest.mark.parametrize("num_blocks", [1 << 14, 300])
def test_what_they_read_was_written_before(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WRITING_S", 60.0)
    monkeypatch.setattr(timing, "BUDGET_S", 0.3)
    runner, table = Noting(), SlotTable(8, 2000, 16)
    timing.controlled_drafts([NgramProposer(table, 4)], 4, runner, table, 512, [], num_blocks)
    wanted = min(8 * 65, num_blocks)
    assert runner.written == list(range(wanted))
    read = np.unique(np.concatenate([step.block_table_SM.ravel() for step in runner.steps]))
    assert read.max() < wanted
    real = [s.block_table_SM for s in runner.steps if len(s.block_table_SM) <= 8]  # the table goes on a little further
    shared = [len(np.unique(table_SM)) < table_SM.size for table_SM in real]
    assert any(shared) == (num_blocks == 300)


def test_writing_does_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WRITING_S", 0.0)
    monkeypatch.setattr(timing, "BUDGET_S", 0.1)
    runner, table = Noting(), SlotTable(8, 2000, 16)
    timing.controlled_drafts([NgramProposer(table, 4)], 4, runner, table, 512, [], 1 << 14)
    assert runner.written == []
    assert all(step.block_table_SM.max() < step.block_table_SM.shape[1] for step in runner.steps)
    assert len(runner.steps) > 0
