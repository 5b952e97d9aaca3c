"""Linears on activations rounded to int8, against their definition in torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.blocks import BLOCK
from pipeline.kernels.cpu import compiled_int8
from pipeline.kernels.cpu.int8 import ByteLinear, multiplies_bytes
from pipeline.kernels.cpu.threads import WHOLE, use_threads
from pipeline.kernels.int8 import int8_block, rounded
from pipeline.quant.packed import DenseWeight, GroupIntWeight

pytestmark = pytest.mark.skipif(not multiplies_bytes(), reason="this processor has no AVX2")


def group_weight(num_outputs: int, num_inputs: int, group_size: int, bias: bool = False) -> GroupIntWeight:
    torch.manual_seed(num_outputs * num_inputs + group_size)
    groups = -(-num_inputs // group_size)
    return GroupIntWeight(
        torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8),
        torch.rand(num_outputs, groups) * 0.02 + 0.001,
        torch.randint(0, 16, (num_outputs, groups)).to(torch.float32),
        group_size,
        torch.randn(num_outputs) if bias else None,
    )


def test_blocks_follow_the_weights_groups() -> None:
    sizes = {32: 32, 64: 64, 128: 128, 256: 128, 512: 128, 16: None, 96: None}
    assert {size: int8_block(group_weight(8, 768 if size in (96, 256) else 512, size)) for size in sizes} == sizes
    assert int8_block(group_weight(8, 200, 200)) == BLOCK
    assert int8_block(DenseWeight(torch.zeros(8, 128))) is None


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 65, 300])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "group_size"),
    [(64, 128, 128), (100, 512, 32), (130, 256, 64), (1, 768, 256), (70, 200, 200), (200, 1024, 1024)],
)
def test_products_are_those_of_the_definition(
    num_tokens: int, num_outputs: int, num_inputs: int, group_size: int
) -> None:
    weight = group_weight(num_outputs, num_inputs, group_size, bias=num_outputs == 100)
    block = int8_block(weight)
    assert block is not None
    x_MK = torch.randn(num_tokens, num_inputs) * torch.logspace(-2, 2, num_inputs)
    wanted_MN = F.linear(rounded(x_MK, block).double(), weight.dequantize(torch.float64))
    if weight.bias_N is not None:
        wanted_MN += weight.bias_N
    found_MN = ByteLinear(weight, block)(x_MK)
    # the zero points' share of a sum is many times the sum, so its rounding is measured by that
    size = float(rounded(x_MK, block).abs().max() * weight.scales_NG.max() * 15)
    assert (found_MN - wanted_MN).abs().max() < 1e-5 * size
    assert not torch.allclose(found_MN, F.linear(x_MK, weight.dequantize(torch.float32), weight.bias_N), rtol=1e-5)


def test_extreme_bytes_do_not_overflow() -> None:
    """All inputs at the largest byte and all weights at 15: the largest sums there are, and the smallest."""
    weight = GroupIntWeight(torch.full((64, 256), 15, dtype=torch.uint8), torch.ones(64, 2), torch.zeros(64, 2), 128)
    for sign in (1.0, -1.0):
        y_MN = ByteLinear(weight, 128)(torch.full((5, 256), sign * 127.0))
        assert torch.equal(y_MN, torch.full((5, 64), sign * 127.0 * 15 * 256))


def test_a_token_is_the_same_alone_and_among_others() -> None:
    weight = group_weight(192, 512, 128)
    x_MK = torch.randn(37, 512)
    linear = ByteLinear(weight, 128)
    together_MN = linear(x_MK)
    for m in range(len(x_MK)):
        assert torch.equal(linear(x_MK[m : m + 1])[0], together_MN[m])


def test_scales_of_float16_are_kept_in_16_bits() -> None:
    weight = group_weight(100, 512, 128)
    halves = replace(weight, scales_NG=weight.scales_NG.to(torch.float16).float())
    x_MK = torch.randn(7, 512)
    narrow, wide = ByteLinear(halves, 128), ByteLinear(halves, 128)
    assert narrow.scales_TBL.dtype == np.uint16
    wide.scales_TBL = narrow.scales_TBL.view(np.float16).astype(np.float32)
    assert torch.equal(narrow(x_MK), wide(x_MK))
    assert ByteLinear(weight, 128).scales_TBL.dtype == np.float32


def test_rounding_is_the_definitions() -> None:
    x_MK = torch.randn(9, 300) * 3
    x_MK[2, 128:256] = 0.0
    x_MK[3, 5] = 1e-30
    byte_MK, scale_MB = np.empty((9, 384), np.int8), np.empty((9, 3), np.float32)
    sum_MB = np.empty_like(scale_MB)
    use_threads(False)
    compiled_int8.round_to_bytes(x_MK.numpy(), 128, byte_MK, scale_MB, sum_MB, *WHOLE)
    in_order_MK = byte_MK.reshape(9, -1, 2, 4).transpose(0, 1, 3, 2).reshape(9, 3, 128)
    found_MK = (torch.from_numpy(in_order_MK).float() * torch.from_numpy(scale_MB)[..., None]).reshape(9, 384)
    assert torch.equal(found_MK[:, :300], rounded(x_MK, 128))
    assert not found_MK[:, 300:].any()
    np.testing.assert_allclose(sum_MB, in_order_MK.astype(np.float32).sum(-1) * scale_MB, rtol=1e-6)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_breaks_its_token_alone(broken: float) -> None:
    weight = group_weight(70, 256, 128)
    x_MK = torch.randn(6, 256)
    whole_MN = ByteLinear(weight, 128)(x_MK)
    x_MK[4, 200] = broken
    found_MN = ByteLinear(weight, 128)(x_MK)
    assert found_MN[4].isnan().all()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(found_MN[others], whole_MN[others])
    assert rounded(x_MK, 128)[4].isnan().any()
