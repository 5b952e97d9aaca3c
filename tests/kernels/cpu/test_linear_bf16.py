"""bfloat16 linears by products of pairs against the weight as it is stored."""

import pytest
import torch

from pipeline.kernels.cpu.linear import compiled_linear, compiled_pairs
from pipeline.kernels.cpu.linear.pairs import PairInt4Linear, PairLinear, multiplies_pairs, pair_linear
from pipeline.kernels.cpu.linear.selection import DenseLinear, ReorderedLinear, prepare_linear
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, GroupIntWeight, LinearWeight

pytestmark = pytest.mark.skipif(not multiplies_pairs(), reason="this processor has no products of bfloat16 pairs")

SHAPES = [(1, 8), (31, 64), (64, 128), (100, 256), (257, 384), (192, 2 * compiled_pairs.DEPTH + 128)]
TOKENS = [1, 2, 3, 5, 6, 7, 8, 11, 13, compiled_linear.TOKENS + 3]
ROUNDING = 2.0**-8
"""Of the result, the only thing that is rounded."""


def int4_weight(
    shape_NK: tuple[int, int], group: int, bias_N: torch.Tensor | None = None, scales_dtype: torch.dtype = torch.float16
) -> GroupIntWeight:
    num_outputs, num_inputs = shape_NK
    groups = (num_outputs, num_inputs // group)
    return GroupIntWeight(
        torch.randint(0, 16, shape_NK, dtype=torch.uint8),
        ((torch.rand(groups) + 0.5) * num_inputs**-0.5 / 4).to(scales_dtype).float(),
        torch.randint(0, 16, groups).float(),
        group,
        bias_N,
    )


def weight_of(kind: str, shape_NK: tuple[int, int]) -> LinearWeight:
    num_outputs, num_inputs = shape_NK
    bias_N = torch.randn(num_outputs) if num_outputs % 2 else None
    if kind == "int4":
        return int4_weight(shape_NK, min(128, num_inputs), bias_N)
    return DenseWeight((torch.randn(shape_NK) * num_inputs**-0.5).to(torch.bfloat16), bias_N)


def product(x_MK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """In double precision, of weights that are not rounded."""
    exact_MN = x_MK.double() @ weight.dequantize(torch.float32).double().T
    return exact_MN if weight.bias_N is None else exact_MN + weight.bias_N.double()


def is_rounded_once(ours_MN: torch.Tensor, exact_MN: torch.Tensor) -> bool:
    """To bfloat16; what float32 sums of parts that cancel out lose beside."""
    lost_MN = (ours_MN.double() - exact_MN).abs()
    return bool((lost_MN <= ROUNDING * exact_MN.abs() + 4e-5 * exact_MN.abs().max()).all())


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("shape_NK", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_only_what_comes_out_is_rounded(kind: str, shape_NK: tuple[int, int], tokens: int) -> None:
    torch.manual_seed(tokens)
    weight = weight_of(kind, shape_NK)
    linear = pair_linear(weight)
    assert type(linear) is (PairInt4Linear if kind == "int4" else PairLinear)
    x_MK = torch.randn(tokens, shape_NK[1]).to(torch.bfloat16)
    ours_MN = linear(x_MK)
    assert ours_MN.shape == (tokens, shape_NK[0])
    assert ours_MN.dtype == torch.bfloat16
    assert is_rounded_once(ours_MN, product(x_MK, weight))


@pytest.mark.parametrize("group", [8, 32, 64, 256, 24, 136])
@pytest.mark.parametrize("scales_dtype", [torch.float16, torch.float32])
def test_groups_of_each_size(group: int, scales_dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    weight, x_MK = (
        int4_weight((96, 6 * group), group, scales_dtype=scales_dtype),
        torch.randn(7, 6 * group).to(torch.bfloat16),
    )
    assert is_rounded_once(PairInt4Linear(weight)(x_MK), product(x_MK, weight))


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_a_token_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    torch.manual_seed(0)
    linear, x_MK = pair_linear(weight_of(kind, (130, 1152))), torch.randn(17, 1152).to(torch.bfloat16)
    assert linear is not None
    together_MN = linear(x_MK)
    for m in range(len(x_MK)):
        assert torch.equal(linear(x_MK[m : m + 1])[0], together_MN[m])
    assert torch.equal(linear(x_MK[:9]), together_MN[:9])


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(kind: str, broken: float) -> None:
    linear, x_MK = pair_linear(weight_of(kind, (64, 128))), torch.randn(8, 128).to(torch.bfloat16)
    assert linear is not None
    clean_MN = linear(x_MK)
    x_MK[5, 70] = broken
    broken_MN = linear(x_MK)
    assert not torch.isfinite(broken_MN[5]).any()
    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(broken_MN[others], clean_MN[others])


def test_who_serves_what() -> None:
    assert (
        select_kernels(torch.device("cpu"), torch.bfloat16)
        .served_by["linear"]
        .endswith("products of pairs (AVX-512 BF16)")
    )
    torch.manual_seed(0)
    in_order = int4_weight((64, 128), 32)
    order_K = torch.randperm(128)
    in_another = GroupIntWeight(in_order.q_NK, in_order.scales_NG, in_order.zeros_NG, 32, input_order_K=order_K)
    of_bytes = GroupIntWeight(in_order.q_NK, in_order.scales_NG, in_order.zeros_NG, 32, bits=8, input_order_K=order_K)
    x_MK = torch.randn(5, 128).to(torch.bfloat16)
    kinds: list[tuple[LinearWeight, type]] = [(in_order, PairInt4Linear), (in_another, PairInt4Linear)]
    for weight, kind in [*kinds, (of_bytes, PairLinear), (DenseWeight(torch.randn(8, 128)), PairLinear)]:
        linear = prepare_linear(weight, torch.bfloat16)
        if isinstance(weight, GroupIntWeight) and weight.input_order_K is not None:
            assert type(linear) is ReorderedLinear
            assert type(linear.linear) is kind
        else:
            assert type(linear) is kind
        exact_MN = product(x_MK, weight)
        assert float((linear(x_MK).double() - exact_MN).abs().max() / exact_MN.abs().max()) < 2 * ROUNDING
    assert type(prepare_linear(DenseWeight(torch.randn(8, 60)), torch.bfloat16)) is DenseLinear
