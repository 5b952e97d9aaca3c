"""The best token of each row against what the engine's greedy sampler says."""

import numpy as np
import pytest
import torch

from pipeline.engine.sampling import on_host as sampler
from pipeline.kernels.triton.sampling import argmax as sampling
from tests.kernels.triton.problems import DEVICE, DTYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter


def agrees(logits_RV: torch.Tensor) -> bool:
    token_R, finite_R = sampling.greedy(logits_RV.to(DEVICE))
    expected = sampler.greedy(logits_RV.float())
    assert token_R.dtype == torch.int64
    same = np.array_equal(token_R.cpu().numpy(), expected.token_ids)
    return same and np.array_equal(finite_R.cpu().numpy(), expected.finite)


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 100, 8192, 8193, 20000])
def test_the_best_token(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    assert agrees(torch.randn(3, vocabulary).to(dtype))


def test_of_equal_ones_the_first() -> None:
    logits_RV = torch.zeros(4, 20000)
    logits_RV[1, [5, 7]] = 1.0
    logits_RV[2, [9000, 9001]] = 1.0  # in one part
    logits_RV[3, [8191, 8192, 19999]] = 1.0  # over parts
    assert agrees(logits_RV)


@pytest.mark.parametrize("at", [0, 8191, 8192, 19999])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told(value: float, at: int) -> None:
    logits_RV = torch.randn(3, 20000)
    logits_RV[1, at] = value
    assert agrees(logits_RV)
    logits_RV[2] = value
    assert agrees(logits_RV)


def test_rows_that_lie_apart_and_no_rows_at_all() -> None:
    assert agrees(torch.randn(4, 60)[:, :30])
    token_R, finite_R = sampling.greedy(torch.empty(0, 10, device=DEVICE))
    assert (len(token_R), len(finite_R)) == (0, 0)
