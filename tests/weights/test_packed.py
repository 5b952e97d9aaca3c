"""Fusing linears, and selecting outputs or inputs: each weight keeps its value, and the form is kept where possible."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pipeline.errors import ModelError
from pipeline.kernels.cpu.linear.selection import supports_int4
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import (
    CodebookWeight,
    DenseWeight,
    Fp8Weight,
    GroupIntWeight,
    LinearWeight,
    StackedWeight,
    concatenate,
    select_inputs,
    select_outputs,
)
from pipeline.weights.round_to_nearest import NF4
from tests.kernels.lora import random_updates

K = 64


def grouped(
    outputs: int, bits: int = 4, group: int = 32, order_K: torch.Tensor | None = None, inputs: int = K
) -> GroupIntWeight:
    return GroupIntWeight(
        torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.int16).to(torch.uint8),
        torch.rand(outputs, inputs // group) + 0.1,
        torch.randint(0, 1 << bits, (outputs, inputs // group)).float(),
        group,
        bits=bits,
        input_order_K=order_K,
    )


def coded(outputs: int, group: int = 32, inputs: int = K) -> CodebookWeight:
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    return CodebookWeight(codes, torch.rand(outputs, inputs // group), torch.tensor(NF4), group)


def float8(outputs: int, rows: int, columns: int, inputs: int = K) -> Fp8Weight:
    grid = (-(-outputs // rows), -(-inputs // columns))
    return Fp8Weight(torch.randn(outputs, inputs).to(torch.float8_e4m3fn), torch.rand(grid) + 0.1, (rows, columns))


ORDER, OTHER = (torch.randperm(K, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
CASES: dict[str, tuple[list[LinearWeight], type]] = {
    "one form": ([grouped(8), grouped(4), grouped(4)], GroupIntWeight),
    "int8": ([grouped(8, 8), grouped(4, 8)], GroupIntWeight),
    "one order": ([grouped(8, order_K=ORDER), grouped(4, order_K=ORDER.clone())], GroupIntWeight),
    "two orders": ([grouped(8, order_K=ORDER), grouped(4, order_K=OTHER)], StackedWeight),
    "an order and none": ([grouped(8), grouped(4, order_K=OTHER)], StackedWeight),
    "4 and 8 bits": ([grouped(8), grouped(4, 8)], StackedWeight),
    "two group sizes": ([grouped(8), grouped(4, 4, 16)], StackedWeight),
    "codes": ([coded(8), coded(3)], CodebookWeight),
    "codes of two group sizes": ([coded(8), coded(4, 64)], StackedWeight),
    "codes of two books": ([coded(8), replace(coded(4), codebook_C=torch.tensor(NF4) * 2)], StackedWeight),
    "fp8 whole": ([float8(8, 8, K), float8(4, 4, K)], Fp8Weight),
    "fp8 whole, of one size": ([float8(8, 8, K), float8(8, 8, K)], Fp8Weight),
    "fp8 by output": ([float8(8, 1, K), float8(4, 1, K)], Fp8Weight),
    "fp8 blocks": ([float8(8, 4, 32), float8(4, 4, 32)], Fp8Weight),
    "fp8 blocks that do not end with a part": ([float8(6, 4, 32), float8(8, 4, 32)], Fp8Weight),
    "fp8 blocks wider than a part": ([float8(4, 128, 128), float8(8, 128, 128)], Fp8Weight),
    "fp8 of two widths of blocks": ([float8(8, 4, 32), float8(4, 4, 16)], StackedWeight),
    "16 bits": ([DenseWeight(torch.randn(4, K).to(torch.bfloat16)) for _ in range(2)], DenseWeight),
    "two kinds": ([grouped(8), float8(4, 4, 32)], StackedWeight),
    "three kinds": ([coded(4), grouped(8), DenseWeight(torch.randn(4, K).to(torch.bfloat16))], StackedWeight),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_each_output_keeps_its_weight(case: str, biased: bool) -> None:
    parts, kind = CASES[case]
    if biased:
        parts = [parts[0], *(replace(part, bias_N=torch.ones(part.out_features)) for part in parts[1:])]
    fused = concatenate(parts)
    assert type(fused) is kind
    assert case != "16 bits" or fused.weight_NK.dtype == torch.bfloat16
    assert fused.out_features == sum(part.out_features for part in parts)
    assert fused.in_features == K
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(fused.dequantize(torch.float32), expected)
    if biased:
        assert fused.bias_N is not None
        assert fused.bias_N.tolist() == [0.0] * parts[0].out_features + [1.0] * (len(expected) - parts[0].out_features)


def test_outputs_of_parts_of_several_forms_are_selected_part_by_part() -> None:
    """Rotary positions and several GPUs select those of fused q, k and v."""
    parts = [grouped(8), replace(grouped(4, 8), bias_N=torch.arange(4.0)), coded(4)]
    fused, rows = concatenate(parts), torch.tensor([5, 1, 0, 7, 11, 8, 13, 12])
    selected = select_outputs(fused, rows)
    assert isinstance(selected, StackedWeight)
    assert [part.out_features for part in selected.parts] == [4, 2, 2]
    assert torch.equal(selected.dequantize(torch.float32), fused.dequantize(torch.float32)[rows])
    assert selected.bias_N is not None
    assert selected.bias_N.tolist() == [0.0] * 4 + [3.0, 0.0] + [0.0] * 2
    assert concatenate([grouped(8), grouped(4), coded(4)]).parts[0].out_features == 12  # neighbours are fused


SELECTED: dict[str, LinearWeight] = {
    "16 bits": DenseWeight(torch.randn(12, K).to(torch.bfloat16)),
    "int4": grouped(12),
    "int4, ordered": grouped(12, order_K=ORDER),
    "int8": grouped(12, 8),
    "codes": coded(12),
    "fp8 whole": float8(12, 12, K),
    "fp8 by output": float8(12, 1, K),
    "fp8 blocks": float8(12, 4, 32),
    "fp8 blocks that are not full": float8(12, 5, 48),
}


@pytest.mark.parametrize("case", SELECTED)
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_are_selected_with_their_weights_and_biases(case: str, biased: bool) -> None:
    weight, rows = SELECTED[case], torch.tensor([11, 0, 7, 3, 2, 8, 5])
    if biased:
        weight = replace(weight, bias_N=torch.arange(12.0))
    found = select_outputs(weight, rows)
    assert type(found) is type(weight)
    assert torch.equal(found.dequantize(torch.float32), weight.dequantize(torch.float32)[rows])
    assert (found.bias_N is not None) == biased
    assert not biased or torch.equal(found.bias_N, rows.float())


WIDE = 192
SPLIT: dict[str, tuple[LinearWeight, tuple[int, int, int]]] = {
    # the inputs that share a scale in each of 2, 3 and 4 parts: of 96, 64 and 48 inputs
    "int4": (grouped(12, inputs=WIDE), (32, 32, 16)),
    "int4, wide groups": (grouped(12, group=64, inputs=WIDE), (32, 64, 16)),
    "int4 by output": (grouped(12, group=WIDE, inputs=WIDE), (96, 64, 48)),
    "int8": (grouped(12, 8, group=96, inputs=WIDE), (96, 32, 48)),
    "codes": (coded(12, inputs=WIDE), (32, 32, 16)),
    "codes by output": (coded(12, WIDE, inputs=WIDE), (96, 64, 48)),
    "fp8 whole": (float8(12, 12, WIDE, inputs=WIDE), (96, 64, 48)),
    "fp8 by output": (float8(12, 1, WIDE, inputs=WIDE), (96, 64, 48)),
    "fp8 blocks": (float8(12, 4, 32, inputs=WIDE), (32, 32, 16)),
    "fp8 blocks that are not full": (float8(12, 5, 128, inputs=WIDE), (32, 64, 16)),
    "fp8 blocks wider than the weight": (float8(12, 128, 256, inputs=WIDE), (96, 64, 48)),
}


def inputs_per_scale(weight: LinearWeight) -> int:
    return weight.block[1] if isinstance(weight, Fp8Weight) else weight.group_size


def assert_parts_add_up(weight: LinearWeight, parts: list[LinearWeight]) -> None:
    """Compare the columns exactly, and the sum of the CPU kernels' products."""
    assert all(part.bias_N is None for part in parts)
    columns_NK = torch.cat([part.dequantize(torch.float32) for part in parts], dim=1)
    assert torch.equal(columns_NK, weight.dequantize(torch.float32))
    kernels, x_TK = select_kernels(torch.device("cpu"), torch.float32), torch.randn(5, weight.in_features)
    xs = x_TK.split([part.in_features for part in parts], dim=1)
    products = [kernels.prepare_linear(part)(x.contiguous()) for part, x in zip(parts, xs)]
    whole_TN = kernels.prepare_linear(replace(weight, bias_N=None))(x_TK)
    torch.testing.assert_close(
        torch.stack(products).sum(0), whole_TN, rtol=1e-4, atol=1e-4 * float(whole_TN.abs().max())
    )


@pytest.mark.parametrize("num_parts", [2, 3, 4])
@pytest.mark.parametrize("case", SPLIT)
def test_products_of_parts_of_the_inputs_add_up(case: str, num_parts: int) -> None:
    weight, sizes = SPLIT[case]
    weight, width = replace(weight, bias_N=torch.ones(12)), WIDE // num_parts
    parts = [select_inputs(weight, start, start + width) for start in range(0, WIDE, width)]
    assert {type(part) for part in parts} == {type(weight)}
    assert {inputs_per_scale(part) for part in parts} == {sizes[num_parts - 2]}
    assert_parts_add_up(weight, parts)


@pytest.mark.parametrize("case", ["16 bits", "int4, ordered", "int4 by output", "fp8 whole", "fp8 by output"])
def test_weights_without_contiguous_groups_are_split_anywhere(case: str) -> None:
    weights = SELECTED | {"int4 by output": grouped(12, group=K)}
    weight, borders = replace(weights[case], bias_N=torch.ones(12)), (0, 5, 22, 23, K)
    parts = [select_inputs(weight, *ends) for ends in pairwise(borders)]
    kind = DenseWeight if case == "int4, ordered" else type(weight)
    assert {type(part) for part in parts} == {kind}
    assert_parts_add_up(weight, parts)


def test_parts_of_different_sizes_have_groups_that_fit_each() -> None:
    weight, borders = grouped(12, inputs=WIDE), (0, 16, 64, 128, WIDE)
    parts = [select_inputs(weight, *ends) for ends in pairwise(borders)]
    assert [part.group_size for part in parts] == [16, 16, 32, 32]
    assert_parts_add_up(weight, parts)


@pytest.mark.parametrize(("weight", "group"), [(grouped(4), 32), (coded(4), 32), (float8(4, 4, 32), 32)])
def test_groups_that_would_become_too_small_are_refused(weight: LinearWeight, group: int) -> None:
    with pytest.raises(ModelError, match=rf"64 inputs with a scale per {group} .* at inputs 24 and 48: a scale per 8 "):
        select_inputs(weight, 24, 48)


def test_an_update_of_a_linear_is_split_like_its_weight() -> None:
    (update,), x_TK, row_N = random_updates([4], 12, K), torch.randn(3, K), torch.tensor([7, 0, 11])
    assert update is not None
    whole_TN = x_TK @ update.a_RK.T @ update.b_NR.T
    outputs = update.select_outputs(row_N)
    torch.testing.assert_close(x_TK @ outputs.a_RK.T @ outputs.b_NR.T, whole_TN[:, row_N])
    parts = [update.select_inputs(0, 20), update.select_inputs(20, K)]
    sums = [x_T @ part.a_RK.T @ part.b_NR.T for x_T, part in zip((x_TK[:, :20], x_TK[:, 20:]), parts)]
    torch.testing.assert_close(sums[0] + sums[1], whole_TN)


def test_an_order_of_inputs_is_undone_when_dequantized() -> None:
    weight = grouped(4, order_K=ORDER)
    straight = replace(weight, input_order_K=None).dequantize(torch.float32)
    x_MK = torch.randn(3, K)
    assert torch.allclose(x_MK @ weight.dequantize(torch.float32).T, x_MK[:, ORDER] @ straight.T, atol=1e-4)
    assert torch.equal(weight.dequantize(torch.float32)[:, ORDER[5]], straight[:, 5])


def test_torchs_int4_product_takes_what_it_has_kernels_for() -> None:
    assert supports_int4(grouped(64), torch.bfloat16)
    for weight in (grouped(64, 8), grouped(60), grouped(64, 4, 16), coded(64), float8(64, 64, K)):
        assert not supports_int4(weight, torch.bfloat16)
    assert not supports_int4(grouped(64), torch.float32)
