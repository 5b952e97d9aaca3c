"""Drawn tokens against the oracle and against what the engine's sampler on the host draws."""

import numpy as np
import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.triton import draw as drawing
from tests.kernels.triton.problems import DEVICE, DTYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter

OPTIONS = {  # temperature, top_k (0: all), top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.7, 0, 1.0, 0.0),
    "hot": (30.0, 0, 1.0, 0.0),
    "cold": (1e-30, 0, 1.0, 0.0),
    "top_k": (1.0, 7, 1.0, 0.0),
    "top_p": (1.0, 0, 0.8, 0.0),
    "little top_p": (1.0, 0, 0.01, 0.0),
    "min_p": (1.3, 0, 1.0, 0.05),
    "all": (1.5, 40, 0.9, 0.002),
}


def how_of(options: list[tuple[float, float, float, float]], vocabulary: int, u_R: np.ndarray) -> torch.Tensor:
    how_R4 = np.array([(t, k or vocabulary, p, m) for t, k, p, m in options]).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(np.vstack([how_R4.T, u_R]), dtype=np.float64))


def both(logits_RV: torch.Tensor, how_5R: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    ours = drawing.draw(logits_RV.to(DEVICE), how_5R.to(DEVICE))
    return [
        (token_R.cpu().numpy(), finite_R.cpu().numpy())
        for token_R, finite_R in (ours, reference.draw(logits_RV, how_5R))
    ]


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 100, 8192, 20_000])
def test_tokens_are_those_of_the_oracle(vocabulary: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(vocabulary)
    options = list(OPTIONS.values()) * 2
    logits_RV = torch.from_numpy(random.normal(0, 3, (len(options), vocabulary))).to(dtype)
    top_k = [(t, min(k, vocabulary), p, m) for t, k, p, m in options]
    (ours, finite), (oracle, _) = both(logits_RV, how_of(top_k, vocabulary, random.random(len(options))))
    assert finite.all()
    assert (ours == oracle).all()
