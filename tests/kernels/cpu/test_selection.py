"""Selection of kernels for the CPU, and oneDNN's linears."""

from dataclasses import replace

import pytest
import torch

from pipeline.kernels.cpu.linear.linear_widened import Float8Linear
from pipeline.kernels.cpu.linear.selection import (
    DenseLinear,
    Int4Linear,
    padded_tokens,
    prepare_linear,
    supports_int4,
)
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, GroupIntWeight
from tests.kernels.activations.test_fp8 import fp8_weight
from tests.kernels.cpu.test_attention import TOLERANCE

CPU = torch.device("cpu")


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


def test_int4_and_dense_paths_agree_to_bfloat16_rounding() -> None:
    torch.manual_seed(0)
    q_NK, zeros_NG = torch.randint(0, 16, (192, 256), dtype=torch.uint8), torch.randint(0, 16, (192, 2)).float()
    weight = GroupIntWeight(q_NK, torch.rand(192, 2) * 0.05 + 0.01, zeros_NG, 128, torch.randn(192))
    assert supports_int4(weight, torch.bfloat16)
    linear, x_TK = Int4Linear(weight), torch.randn(5, 256, dtype=torch.bfloat16)
    exact = x_TK.float() @ weight.dequantize(torch.float32).T + weight.bias_N
    for path in (linear.int4, linear.dense):
        assert float((path(x_TK).float() - exact).abs().max() / exact.abs().max()) < 0.02
    linear.crossover = 4
    assert torch.equal(linear(x_TK), linear.dense(x_TK))
    assert torch.equal(linear(x_TK[:4]), linear.int4(x_TK[:4]))


@pytest.mark.parametrize("block", [(128, 128), (1, 200), (70, 200)])
def test_fp8_weights_in_bfloat16_are_held_once(block: tuple[int, int]) -> None:
    weight = replace(fp8_weight(70, 200, block), bias_N=torch.randn(70))
    linear = prepare_linear(weight, torch.bfloat16)
    assert isinstance(linear, Float8Linear)
    assert torch.equal(linear.widened(), weight.dequantize(torch.bfloat16))
    for tokens in (0, 1, linear.crossover, linear.crossover + 1):
        x_TK = torch.randn(tokens, 200).bfloat16()
        exact = x_TK.float() @ weight.dequantize(torch.float32).T + weight.bias_N
        ours = linear(x_TK)
        assert (ours.shape, ours.dtype) == (exact.shape, torch.bfloat16)
        assert tokens == 0 or float((ours.float() - exact).abs().max() / exact.abs().max()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 100, 1023])
def test_the_packed_linear_pads_its_tokens_and_removes_the_padding(tokens: int) -> None:
    torch.manual_seed(2)
    weight, bias, x_TK = torch.randn(48, 80), torch.randn(48), torch.randn(tokens, 80)
    ours = DenseLinear(weight, bias, torch.float32, packed=True)(x_TK)
    assert ours.shape == (tokens, 48)
    assert float((ours - (x_TK @ weight.T + bias)).abs().max()) < 1e-4


def test_padding_costs_little_and_leaves_few_numbers_of_tokens() -> None:
    assert all(t <= padded_tokens(t) <= t + t // 8 for t in range(1, 5000))
    assert len({padded_tokens(t) for t in range(1, 2049)}) < 80


def test_selection_reports_the_kernels_of_each_operation() -> None:
    names = {"linear", "add_rms_norm", "norm_rope_write", "attention", "delta_net", "rms_norm", "gate_mul", "greedy"}
    backends = {kind: select_kernels(CPU, torch.float32, kind).backends for kind in ("auto", "triton")}
    backends["deterministic"] = select_kernels(CPU, torch.float32, "triton", deterministic=True).backends
    names |= {"sample", "route", "experts"}
    expected = dict.fromkeys(("auto", "triton", "deterministic"), names)
    assert {kind: set(found) for kind, found in backends.items()} == expected
    compiled = names - {"linear", "greedy", "sample", "route", "experts"}
    assert all("numba" in backends["auto"][name] for name in compiled)
    for name in ("linear", "attention"):
        assert ["batch-invariant" in found[name] for found in backends.values()] == [False, False, True]


def test_selecting_kernels_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernels = select_kernels(CPU, torch.float32)
        kernels.gate_mul(torch.ones(2000, 64), "silu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
