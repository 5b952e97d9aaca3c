"""One copy, and a launch that is captured once, write each step's numbers into the tensors of its graph."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels.attention_input import AttentionInput
from pipeline.kernels.graph_attention import FutureNumbers, GraphShape, LayerKind
from pipeline.kernels.triton.attention.staging import StagedStep
from tests.kernels.triton.problems import DEVICE, recorded_launches

SHAPE = GraphShape(900, 100, 16, 4, (LayerKind(None, 2, 16), LayerKind(70, 2, 16)), 1, 900, num_numbers=6000)


@pytest.mark.parametrize("has_window_blocks", [False, True])
@pytest.mark.parametrize(
    ("num_seqs", "num_blocks", "num_future"), [(1, 1, 0), (3, 5, 2), (70, 33, 5), (2, 1, 1500), (900, 80, 3)]
)
def test_tables_and_future_numbers_come_where_they_belong(
    num_seqs: int, num_blocks: int, num_future: int, has_window_blocks: bool
) -> None:
    rng = np.random.default_rng(num_seqs)
    step = StagedStep([3, 5], replace(SHAPE, has_window_blocks=has_window_blocks), DEVICE)
    with recorded_launches() as captured:
        step.unpack()
    for length in (2000, 1601):  # the second step leaves what is beyond its own as it is
        targets = [step.table_of(None), step.table_of(70)][: 1 + has_window_blocks]
        tables_before = [target.cpu().numpy().copy() for target in targets]
        numbers_before = step.numbers.cpu().numpy().copy()
        arrays = [rng.integers(0, 99, 3), rng.integers(0, 99, 2)]
        numbers = rng.integers(0, 1 << 40, length + 2 * num_future)
        sequences = np.zeros(num_seqs + 1, np.int32), np.zeros(num_seqs, np.int32)
        tables = [rng.integers(0, 1 << 30, (num_seqs, num_blocks + 2)).astype(np.int32)[:, :num_blocks] for _ in "ab"]
        layouts = [AttentionInput(*sequences, table_SM, torch.zeros(0), 16) for table_SM in tables]
        value_N = torch.from_numpy(rng.integers(0, 1 << 40, 1 + num_future)).to(DEVICE)
        token_index_F, row_F = rng.permutation(length)[:num_future], rng.integers(0, 1 + num_future, num_future)
        numbers[length:] = [*token_index_F, *row_F]
        future = FutureNumbers(length, num_future, value_N) if num_future else None
        step.fill(arrays, numbers, replace(layouts[0], windowed=layouts[1]), future)
        for launch in captured:
            launch.run()
        assert step.arrays[0].tolist() == arrays[0].tolist()
        assert step.arrays[1][:2].tolist() == arrays[1].tolist()
        for target, before, table_SM in zip(targets, tables_before, tables):
            before[:num_seqs, :num_blocks] = table_SM
            np.testing.assert_array_equal(target.cpu(), before)
        numbers_before[: len(numbers)] = numbers
        numbers_before[token_index_F] = value_N.cpu().numpy()[row_F]
        begin = len(numbers)  # behind them come the tables
        np.testing.assert_array_equal(step.numbers[:begin].cpu(), numbers_before[:begin])
