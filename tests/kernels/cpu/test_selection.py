"""Which kernels serve the CPU, and oneDNN's linears."""

import os
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.kernels.cache import LayerCache
from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.cpu import elementwise
from pipeline.kernels.cpu.attention.attention import attention
from pipeline.kernels.cpu.attention.decode_kernel import paged_decode
from pipeline.kernels.cpu.compile.threads import is_cached
from pipeline.kernels.cpu.linear.selection import DenseLinear, padded_tokens, prepare_linear
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight
from tests.kernels.cpu.test_attention import TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_dense_linear(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(48, 80), torch.randn(48)
    x_TK = torch.randn(tokens, 80).to(dtype)
    ours = prepare_linear(DenseWeight(weight, bias), dtype)(x_TK)
    exact = x_TK.float() @ weight.to(dtype).float().T + bias.to(dtype).float()
    assert ours.dtype == dtype
    assert float((ours.float() - exact).abs().max() / exact.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 100, 1023])
def test_the_packed_linear_pads_its_tokens_and_gives_them_back(tokens: int) -> None:
    torch.manual_seed(2)
    weight, bias, x_TK = torch.randn(48, 80), torch.randn(48), torch.randn(tokens, 80)
    ours = DenseLinear(weight, bias, torch.float32, packed=True)(x_TK)
    assert ours.shape == (tokens, 48)
    assert float((ours - (x_TK @ weight.T + bias)).abs().max()) < 1e-4


def test_padding_costs_little_and_leaves_few_numbers_of_tokens() -> None:
    assert all(t <= padded_tokens(t) <= t + t // 8 for t in range(1, 5000))
    assert len({padded_tokens(t) for t in range(1, 2049)}) < 80


def test_selection_says_who_serves_each_operation() -> None:
    kernels = select_kernels(torch.device("cpu"), torch.float32)
    names = {"linear", "add_rms_norm", "norm_rope_write", "attention", "silu_mul", "greedy", "sample"}
    assert set(kernels.served_by) == names
    assert all(
        "numba" in origin
        for operation, origin in kernels.served_by.items()
        if operation not in ("linear", "greedy", "sample")
    )


def test_it_is_known_whether_the_kernels_are_compiled(tmp_path: Path) -> None:
    cache, q = LayerCache.allocate(1, 4, 1, 4, torch.float32, torch.device("cpu")), torch.ones(1, 3, 4)
    elementwise.add_rms_norm(q[0], q[0], q[0, 0], 1e-5)
    elementwise.norm_rope_write(q, q[:, 0, :2], q[:, 0, :2], None, 1e-5, cache, torch.tensor([2]))
    elementwise.silu_mul(q[0])
    where = AttentionInput(
        np.array([0, 1], dtype=np.int32),
        np.array([3], dtype=np.int32),
        np.zeros((1, 1), dtype=np.int32),
        torch.tensor([2]),
        4,
    )
    attention(q, cache, where, 1.0, None)
    passes = elementwise.add_rms_norm_kernel, elementwise.norm_rope_write_kernel, elementwise.silu_mul_kernel
    assert all(is_cached(kernel) for kernel in (*passes, paged_decode))
    newer = tmp_path / "elementwise.py"
    newer.write_text("a newer file")
    later = time.time() + 60
    os.utime(newer, (later, later))

    class Changed:
        stats, __name__ = elementwise.silu_mul_kernel.stats, "silu_mul_kernel"
        py_func = types.FunctionType(elementwise.silu_mul_kernel.py_func.__code__.replace(co_filename=str(newer)), {})

    class OfOtherTiles(Changed):
        py_func = types.FunctionType(elementwise.silu_mul_kernel.py_func.__code__, {})
        py_func.__qualname__ = f"silu_mul_kernel-{'0' * 12}"

    assert not is_cached(Changed())  # type: ignore[arg-type]
    assert not is_cached(OfOtherTiles())  # type: ignore[arg-type]


def test_selecting_kernels_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernels = select_kernels(torch.device("cpu"), torch.float32)
        kernels.silu_mul(torch.ones(2000, 64))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
