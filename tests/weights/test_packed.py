"""Fusing and selecting outputs: each output keeps its own weight, and the form is kept where all parts share it."""

from dataclasses import replace

import pytest
import torch

from pipeline.kernels.cpu.linear.selection import supports_int4
from pipeline.weights.packed import (
    CodebookWeight,
    DenseWeight,
    Fp8Weight,
    GroupIntWeight,
    LinearWeight,
    concatenate,
    select_outputs,
)
from pipeline.weights.round_to_nearest import NF4

K = 64


def grouped(outputs: int, bits: int = 4, group: int = 32, order_K: torch.Tensor | None = None) -> GroupIntWeight:
    return GroupIntWeight(
        torch.randint(0, 1 << bits, (outputs, K), dtype=torch.int16).to(torch.uint8),
        torch.rand(outputs, K // group) + 0.1,
        torch.randint(0, 1 << bits, (outputs, K // group)).float(),
        group,
        bits=bits,
        input_order_K=order_K,
    )


def coded(outputs: int, group: int = 32) -> CodebookWeight:
    codes = torch.randint(0, 16, (outputs, K), dtype=torch.uint8)
    return CodebookWeight(codes, torch.rand(outputs, K // group), torch.tensor(NF4), group)


def float8(outputs: int, rows: int, columns: int) -> Fp8Weight:
    grid = (-(-outputs // rows), -(-K // columns))
    return Fp8Weight(torch.randn(outputs, K).to(torch.float8_e4m3fn), torch.rand(grid) + 0.1, (rows, columns))


ORDER, OTHER = (torch.randperm(K, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
CASES: dict[str, tuple[list[LinearWeight], type]] = {
    "one form": ([grouped(8), grouped(4), grouped(4)], GroupIntWeight),
    "int8": ([grouped(8, 8), grouped(4, 8)], GroupIntWeight),
    "one order": ([grouped(8, order_K=ORDER), grouped(4, order_K=ORDER.clone())], GroupIntWeight),
    "two orders": ([grouped(8, order_K=ORDER), grouped(4, order_K=OTHER)], DenseWeight),
    "an order and none": ([grouped(8), grouped(4, order_K=OTHER)], DenseWeight),
    "4 and 8 bits": ([grouped(8), grouped(4, 8)], DenseWeight),
    "two group sizes": ([grouped(8), grouped(4, 4, 16)], DenseWeight),
    "codes": ([coded(8), coded(3)], CodebookWeight),
    "codes of two group sizes": ([coded(8), coded(4, 64)], DenseWeight),
    "codes of two books": ([coded(8), replace(coded(4), codebook_C=torch.tensor(NF4) * 2)], DenseWeight),
    "fp8 whole": ([float8(8, 8, K), float8(4, 4, K)], Fp8Weight),
    "fp8 whole, of one size": ([float8(8, 8, K), float8(8, 8, K)], Fp8Weight),
    "fp8 by output": ([float8(8, 1, K), float8(4, 1, K)], Fp8Weight),
    "fp8 blocks": ([float8(8, 4, 32), float8(4, 4, 32)], Fp8Weight),
    "fp8 blocks that do not end with a part": ([float8(6, 4, 32), float8(8, 4, 32)], Fp8Weight),
    "fp8 blocks wider than a part": ([float8(4, 128, 128), float8(8, 128, 128)], Fp8Weight),
    "fp8 of two widths of blocks": ([float8(8, 4, 32), float8(4, 4, 16)], DenseWeight),
    "16 bits": ([DenseWeight(torch.randn(4, K).to(torch.bfloat16)) for _ in range(2)], DenseWeight),
    "two kinds": ([grouped(8), float8(4, 4, 32)], DenseWeight),
    "three kinds": ([coded(4), grouped(8), DenseWeight(torch.randn(4, K).to(torch.bfloat16))], DenseWeight),
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
