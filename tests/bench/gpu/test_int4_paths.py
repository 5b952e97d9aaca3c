"""The ways of an int4 weight on a card are ways to the same product: here in Triton's interpreter."""

import pytest
import torch

from pipeline.bench.gpu.kernels.checks import TOLERANCES, relative_error
from pipeline.bench.gpu.kernels.inputs import random_int4
from pipeline.bench.gpu.kernels.linear_times import fixed_path, int4_paths

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytest.importorskip("triton")


def test_every_path_gives_the_same_product():
    weight = random_int4(256, 128, 128, torch.Generator().manual_seed(0))
    x_TK = torch.randn(33, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    expected = x_TK.float() @ weight.dequantize(torch.float32).to(DEVICE).T
    found = {name: prepare()(x_TK) for name, prepare in int4_paths(weight, torch.float16, DEVICE).items()}
    assert list(found) == ["int4 fused", "cached", "scratch"]
    for product in found.values():
        assert 0 < relative_error(product, expected) < TOLERANCES[torch.float16]
    assert relative_error(fixed_path(weight, torch.float16, DEVICE)(x_TK), expected) < TOLERANCES[torch.float16]
    assert torch.equal(found["cached"], found["scratch"])
    assert not torch.equal(found["cached"], found["int4 fused"])  # which does not round its weights
