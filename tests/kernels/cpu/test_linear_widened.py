"""float32 linears on narrow weights against the dense float32 weight."""

import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.cpu.linear import compiled_linear
from pipeline.kernels.cpu.linear import crossover as crossover_module
from pipeline.kernels.cpu.linear.crossover import crossover
from pipeline.kernels.cpu.linear.narrow import (
    FLOAT8_SCALE_LIMIT,
    Bfloat16Linear,
    CodebookLinear,
    Float8Linear,
    Float32Linear,
    GroupInt4Linear,
    GroupInt8Linear,
    NarrowLinear,
    narrow_linear,
)
from pipeline.kernels.cpu.linear.selection import DenseLinear, ReorderedLinear, prepare_linear
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight
from pipeline.weights.round_to_nearest import NF4

KINDS = ["float32", "bfloat16", "int4", "int8", "float8", "nf4"]
SHAPES = [(1, 8), (31, 64), (32, 128), (100, 256), (257, 384), (1024, 1152)]


def dense_and_narrow(kind: str, shape_NK: tuple[int, int], group: int = 0) -> tuple[torch.Tensor, NarrowLinear]:
    num_outputs, num_inputs = shape_NK
    bias_N = torch.randn(num_outputs) if num_outputs % 2 else None
    if kind == "float32":
        weight_NK = torch.randn(shape_NK) * num_inputs**-0.5
        return weight_NK, Float32Linear(weight_NK, bias_N)
    if kind == "bfloat16":
        weight_NK = (torch.randn(shape_NK) * num_inputs**-0.5).to(torch.bfloat16)
        return weight_NK.float(), Bfloat16Linear(weight_NK, bias_N)
    group = group or min(128, num_inputs)
    groups = (num_outputs, num_inputs // group)
    scales_NG = (torch.rand(groups) + 0.5) * num_inputs**-0.5
    if kind == "float8":
        grid = (-(-num_outputs // 24), -(-num_inputs // 20))  # blocks that neither lanes nor inputs are a multiple of
        code_NK = torch.randint(0, 254, shape_NK, dtype=torch.int16).to(torch.uint8)
        code_NK = torch.where(code_NK >= 127, code_NK + 1, code_NK)  # 127 and 255 are no numbers
        scales_RG = (torch.rand(grid) + 0.5) * num_inputs**-0.5 / 100
        weight = Fp8Weight(code_NK.view(torch.float8_e4m3fn), scales_RG, (24, 20), bias_N)
        return weight.dequantize(torch.float32), Float8Linear(weight)
    if kind == "nf4":
        weight = CodebookWeight(
            torch.randint(0, 16, shape_NK, dtype=torch.uint8), scales_NG, torch.tensor(NF4), group, bias_N
        )
        return weight.dequantize(torch.float32), CodebookLinear(weight)
    bits = int(kind.removeprefix("int"))
    weight = GroupIntWeight(
        torch.randint(0, 1 << bits, shape_NK, dtype=torch.int16).to(torch.uint8),
        scales_NG * 3.5 / (1 << bits),
        torch.randint(0, 1 << bits, groups).float(),
        group,
        bias_N,
        bits,
    )
    return weight.dequantize(torch.float32), GroupInt4Linear(weight) if bits == 4 else GroupInt8Linear(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape_NK", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, compiled_linear.TOKENS + 3, 2 * compiled_linear.TOKENS])
def test_they_give_what_the_dense_weight_gives(kind: str, shape_NK: tuple[int, int], tokens: int) -> None:
    torch.manual_seed(tokens)
    weight_NK, linear = dense_and_narrow(kind, shape_NK)
    x_MK = torch.randn(tokens, shape_NK[1])
    exact = x_MK.double() @ weight_NK.double().T
    if linear.bias_N is not None:
        exact += linear.bias_N.double()
    ours = linear(x_MK)
    assert ours.shape == exact.shape
    assert ours.dtype == torch.float32
    assert float((ours - exact).abs().max() / exact.abs().max()) < 2e-6


@pytest.mark.parametrize("kind", ["int4", "int8", "nf4"])
@pytest.mark.parametrize("group", [8, 32, 64, 128, 256])
def test_groups_of_each_size(group: int, kind: str) -> None:
    weight_NK, linear = dense_and_narrow(kind, (96, 256), group)
    x_MK = torch.randn(3, 256)
    assert torch.allclose(linear(x_MK), x_MK @ weight_NK.T, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_widening_rounds_nothing(kind: str) -> None:
    """Unit vectors through a linear are its weight, bit for bit."""
    weight_NK, linear = dense_and_narrow(kind, (70, 256))
    linear.bias_N = None
    assert torch.equal(linear(torch.eye(256)).T, weight_NK)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    _, linear = dense_and_narrow(kind, (64, 128))
    x_MK = torch.randn(4, 128)
    clean = linear(x_MK)
    x_MK[2, 5] = float("nan")
    broken = linear(x_MK)
    assert torch.isnan(broken[2]).all()
    assert torch.equal(broken[[0, 1, 3]], clean[[0, 1, 3]])


def test_rows_that_lie_apart_in_memory() -> None:
    weight_NK, linear = dense_and_narrow("bfloat16", (64, 128))
    x_MK = torch.randn(4, 256)[:, ::2]
    assert torch.allclose(linear(x_MK), x_MK @ weight_NK.T, atol=1e-5)


def test_a_weight_stays_as_narrow_as_it_was_stored() -> None:
    torch.manual_seed(0)
    stored = torch.randn(64, 128)
    kinds = {
        torch.bfloat16: Bfloat16Linear,
        torch.float16: DenseLinear,  # its values have more digits than bfloat16 holds
        torch.float32: DenseLinear,
    }
    for dtype, kind in kinds.items():
        linear = prepare_linear(DenseWeight(stored.to(dtype)), torch.float32)
        assert type(linear) is kind
        x_MK = torch.randn(2, 128)
        assert torch.allclose(linear(x_MK), x_MK @ stored.to(dtype).float().T, atol=1e-5)
    short = stored.to(torch.bfloat16)
    assert type(prepare_linear(DenseWeight(short.float()), torch.float32)) is Bfloat16Linear
    assert type(prepare_linear(DenseWeight(short[:, :60]), torch.float32)) is DenseLinear
    quantized = GroupIntWeight(torch.ones(8, 32, dtype=torch.uint8), torch.ones(8, 1), torch.zeros(8, 1), 32)
    assert type(prepare_linear(quantized, torch.float32)) is GroupInt4Linear


def test_every_float8_number_is_widened_to_its_value() -> None:
    code_NK = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 64)
    value_NK = torch.where((code_NK & 127) == 127, 0, code_NK).view(torch.float8_e4m3fn)
    for scale in (1.0, 2.0**-20, 0.3, 100.0):
        linear = Float8Linear(Fp8Weight(value_NK, torch.full((4, 1), scale), (1, 64)))
        assert torch.equal(linear(torch.eye(64)).T, value_NK.float() * scale)


def test_what_no_narrow_linear_reads_is_widened_at_load() -> None:
    torch.manual_seed(0)
    x_MK = torch.randn(3, 36)
    float8 = torch.randn(8, 36).to(torch.float8_e4m3fn)
    odd = [
        GroupIntWeight(torch.ones(8, 36, dtype=torch.uint8), torch.ones(8, 3), torch.zeros(8, 3), 12),
        GroupIntWeight(torch.ones(8, 36, dtype=torch.uint8), torch.ones(8, 6), torch.zeros(8, 6), 6, bits=8),
        CodebookWeight(torch.ones(8, 36, dtype=torch.uint8), torch.ones(8, 3), torch.tensor(NF4), 12),
        Fp8Weight(float8, torch.rand(8, 6), (1, 6)),
        Fp8Weight(float8, torch.full((1, 1), FLOAT8_SCALE_LIMIT), (8, 36)),
    ]
    for weight in odd:
        assert narrow_linear(weight) is None
        linear = prepare_linear(weight, torch.float32)
        assert type(linear) is DenseLinear
        exact = x_MK @ weight.dequantize(torch.float32).T
        assert float((linear(x_MK) - exact).abs().max() / exact.abs().max()) < 1e-6
    assert type(narrow_linear(Fp8Weight(float8, torch.full((1, 1), 1.0), (8, 36)))) is Float8Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_another_order_meet_their_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    order_K = torch.randperm(128)
    weight = GroupIntWeight(
        torch.randint(0, 16, (64, 128), dtype=torch.uint8),
        torch.rand(64, 4) * 0.1,
        torch.randint(0, 16, (64, 4)).float(),
        32,
        torch.randn(64),
        input_order_K=order_K,
    )
    x_MK = torch.randn(5, 128).to(dtype)
    plain = GroupIntWeight(weight.q_NK, weight.scales_NG, weight.zeros_NG, 32, weight.bias_N)
    exact = x_MK.float()[:, order_K] @ plain.dequantize(torch.float32).T + weight.bias_N
    linear = prepare_linear(weight, dtype)
    assert type(linear) is ReorderedLinear
    for ours in (linear(x_MK), reference.prepare_linear(weight, dtype, torch.device("cpu"))(x_MK)):
        assert float((ours.float() - exact).abs().max() / exact.abs().max()) < (
            1e-6 if ours.dtype.itemsize == 4 else 0.02
        )


def test_the_crossover_is_where_the_times_cross_and_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(crossover_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(crossover_module, "_measured", {})

    def takes(seconds_of):
        def multiply(x_TK: torch.Tensor) -> torch.Tensor:
            clock[0] += seconds_of(len(x_TK))
            return x_TK

        return multiply

    few, many = takes(lambda tokens: tokens * 1.0), takes(lambda tokens: 10.0)
    assert crossover("a", few, many, 8, torch.float32) == 8
    assert crossover("b", many, few, 8, torch.float32) == 0
    assert crossover("c", takes(lambda tokens: 0.1), few, 8, torch.float32) == crossover_module.TOKENS[-1]
    before = clock[0]
    assert crossover("a", few, many, 8, torch.float32) == 8
    assert clock[0] == before
