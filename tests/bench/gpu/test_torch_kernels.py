"""What torch itself has for our work: the form of its weights, and that doing without it is no failure."""

import sys
from types import ModuleType

import pytest
import torch

from pipeline.bench.gpu.kernels import torch_kernels, torch_times
from pipeline.bench.gpu.kernels.inputs import random_int4
from pipeline.bench.gpu.rates import Stopwatch
from pipeline.roofline.cost_model import AWQ, DENSE, DecoderSize

CPU = torch.device("cpu")
SIZE = DecoderSize(128, 128, 1, 2, 2, 64, 70)


def test_an_int4_weight_keeps_its_values(monkeypatch):
    """As torch's CUDA kernel reads it: two values in a byte, the even one first; (q - 8) * scale + zero."""
    weight, told = random_int4(16, 128, 32, torch.Generator().manual_seed(0)), {}

    def convert(pairs_NK, inner_tiles):
        assert (pairs_NK.dtype, pairs_NK.shape, inner_tiles) == (torch.uint8, (16, 64), 8)
        return torch.stack([pairs_NK >> 4, pairs_NK & 15], dim=2).flatten(1)

    def product(x_MK, q_NK, group, both_GN2):
        told["shape"] = both_GN2.shape
        scale_NK, zero_NK = (both_GN2[:, :, n].T.repeat_interleave(group, dim=1) for n in (0, 1))
        return x_MK @ ((q_NK.float() - 8) * scale_NK + zero_NK).T

    monkeypatch.setattr(torch.ops.aten, "_convert_weight_to_int4pack", convert)
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", product)
    x_MK = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    ours = torch_kernels.int4_product(weight, CPU)(x_MK)
    assert told["shape"] == (4, 16, 2)
    assert torch.allclose(ours, x_MK @ weight.dequantize(torch.float32).T, atol=0.03)


def test_torch_kernels_are_asked_for_only_on_a_card():
    stopwatch = Stopwatch(CPU, 0.0)
    assert list(torch_times.torch_cases(SIZE, AWQ, torch.bfloat16, stopwatch, (1,))) == []
    stopwatch.on_gpu = True
    assert list(torch_times.torch_cases(SIZE, DENSE, torch.bfloat16, stopwatch, (1,))) == []


def test_one_that_cannot_be_had_or_is_wrong_says_why(monkeypatch):
    def refuses():
        raise RuntimeError("not compiled for this card")

    def measured(prepare):
        weight = random_int4(16, 128, 32, torch.Generator().manual_seed(0))
        exact = lambda: lambda x_TK: x_TK @ weight.dequantize(torch.float32).T  # noqa: E731
        arguments = "qkv", torch_kernels.TORCH_INT4, 128, prepare, exact, torch.float32, Stopwatch(CPU, 0.0), (1, 3)
        return torch_times._measured(*arguments), exact

    with pytest.raises(torch_times.NoBaseline, match="torch int4, qkv: RuntimeError: not compiled"):
        measured(refuses)
    with pytest.raises(torch_times.NoBaseline, match="torch int4 float32, qkv, 1 tokens: error"):
        measured(lambda: lambda x_TK: torch.ones(len(x_TK), 16))
    weight = random_int4(16, 128, 32, torch.Generator().manual_seed(0))
    times, _ = measured(lambda: lambda x_TK: x_TK @ weight.dequantize(torch.float32).T)
    assert [(time.path, time.tokens) for time in times] == [("torch int4", 1), ("torch int4", 3)]


@pytest.mark.parametrize("is_old", [True, False])
def test_ragged_attention_is_called_as_this_torch_wants_it(monkeypatch, is_old):
    called = {}

    def old(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        called.update(shapes=(q.shape, k.shape), starts=cu_q.tolist(), causal=is_causal)

    def new(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        called.update(shapes=(q.shape, k.shape), starts=cu_q.tolist(), causal=window_size == (-1, 0) and enable_gqa)

    module = ModuleType("varlen")
    module.varlen_attn = old if is_old else new
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    q, k = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8)
    torch_kernels.varlen_attention([5, 5], q, k, k)()
    assert called == {
        "shapes": ((10, 4, 8), (10, 4 if is_old else 2, 8)), "starts": [0, 5, 10], "causal": True,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert torch_kernels.varlen_attention([5, 5], q, k, k) is None
