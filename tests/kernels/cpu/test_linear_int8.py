"""Linears on activations rounded to int8, against their definition in torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.kernels.activations.activation_blocks import BLOCK
from pipeline.kernels.activations.int8 import int8_block, rounded
from pipeline.kernels.cpu.compile.threads import WHOLE, use_threads
from pipeline.kernels.cpu.linear import compiled_int8
from pipeline.kernels.cpu.linear.compiled_int8 import Form, forms_here
from pipeline.kernels.cpu.linear.int8 import ByteLinear, multiplies_bytes
from pipeline.weights.packed import DenseWeight, GroupIntWeight

pytestmark = pytest.mark.skipif(not multiplies_bytes(), reason="this processor has no AVX2")


def group_weight(
    num_outputs: int, num_inputs: int, group_size: int, bias: bool = False, bits: int = 4
) -> GroupIntWeight:
    torch.manual_seed(num_outputs * num_inputs + group_size)
    groups = -(-num_inputs // group_size)
    return GroupIntWeight(
        torch.randint(0, 1 << bits, (num_outputs, num_inputs), dtype=torch.uint8),
        torch.rand(num_outputs, groups) * 0.02 + 0.001,
        torch.randint(0, 1 << bits, (num_outputs, groups)).to(torch.float32),
        group_size,
        torch.randn(num_outputs) if bias else None,
        bits,
    )


def linear_of(weight: GroupIntWeight, form: Form | None = None) -> ByteLinear:
    """In a form, or in this processor's fastest."""
    block = int8_block(weight)
    assert block is not None
    return ByteLinear(weight, block, form or forms_here()[0])


def test_blocks_follow_the_weights_groups() -> None:
    sizes = {32: 32, 64: 64, 128: 128, 256: 128, 512: 128, 16: None, 96: None}
    assert {size: int8_block(group_weight(8, 768 if size in (96, 256) else 512, size)) for size in sizes} == sizes
    assert int8_block(group_weight(8, 200, 200)) == BLOCK
    assert int8_block(DenseWeight(torch.zeros(8, 128))) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 65, 300])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "group_size"),
    [(64, 128, 128), (100, 512, 32), (130, 256, 64), (1, 768, 256), (70, 200, 200), (200, 1024, 1024)],
)
def test_products_are_those_of_the_definition(
    num_tokens: int, num_outputs: int, num_inputs: int, group_size: int, bits: int
) -> None:
    weight = group_weight(num_outputs, num_inputs, group_size, bias=num_outputs == 100, bits=bits)
    block = int8_block(weight)
    assert block is not None
    x_MK = torch.randn(num_tokens, num_inputs) * torch.logspace(-2, 2, num_inputs)
    wanted_MN = F.linear(rounded(x_MK, block).double(), weight.dequantize(torch.float64))
    if weight.bias_N is not None:
        wanted_MN += weight.bias_N
    found_MN = linear_of(weight)(x_MK)
    # the zero points' share of a sum is many times the sum, so its rounding is measured by that
    size = float(rounded(x_MK, block).abs().max() * weight.scales_NG.max() * ((1 << bits) - 1))
    assert (found_MN - wanted_MN).abs().max() < 1e-5 * size
    assert not torch.allclose(found_MN, F.linear(x_MK, weight.dequantize(torch.float32), weight.bias_N), rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", forms_here(), ids=lambda form: form.name)
def test_extreme_bytes_do_not_overflow(form: Form, bits: int) -> None:
    """All inputs at the largest byte and all weights at their largest: the largest sums there are, and the smallest;
    then the largest shares of zero points."""
    most = (1 << bits) - 1
    for q, zero in ((most, 0), (0, most)):
        q_NK, zeros_NG = torch.full((64, 256), q, dtype=torch.uint8), torch.full((64, 2), float(zero))
        linear = linear_of(GroupIntWeight(q_NK, torch.ones(64, 2), zeros_NG, 128, bits=bits), form)
        for sign in (1.0, -1.0):
            y_MN = linear(torch.full((7, 256), sign * 127.0))
            assert torch.equal(y_MN, torch.full((7, 64), sign * 127.0 * (q - zero) * 256))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group_size"), [(100, 512, 32), (70, 200, 200)])
def test_all_forms_give_the_same_bits(num_outputs: int, num_inputs: int, group_size: int, bits: int) -> None:
    fastest, *others = forms_here()
    if not others:
        pytest.skip("this processor has one form")
    weight = group_weight(num_outputs, num_inputs, group_size, bias=True, bits=bits)
    x_MK = torch.randn(23, num_inputs)
    wanted_MN = linear_of(weight, fastest)(x_MK)
    for form in others:
        linear = linear_of(weight, form)
        assert torch.equal(linear(x_MK), wanted_MN)
        assert all(torch.equal(linear(x_MK[:few]), wanted_MN[:few]) for few in (1, 2, 7))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_bfloat16_is_read_and_written(num_tokens: int) -> None:
    """Computed in float32 and rounded once, bias included."""
    weight = group_weight(100, 256, 64, bias=True)
    x_MK = torch.randn(num_tokens, 256).to(torch.bfloat16)
    linear = linear_of(weight)
    found_MN = linear(x_MK)
    assert found_MN.dtype == torch.bfloat16
    assert torch.equal(found_MN, linear(x_MK.float()).to(torch.bfloat16))


def test_a_token_is_the_same_alone_and_among_others() -> None:
    weight = group_weight(192, 512, 128)
    x_MK = torch.randn(37, 512)
    linear = linear_of(weight)
    together_MN = linear(x_MK)
    for m in range(len(x_MK)):
        assert torch.equal(linear(x_MK[m : m + 1])[0], together_MN[m])


def test_scales_of_float16_are_kept_in_16_bits() -> None:
    weight = group_weight(100, 512, 128)
    halves = replace(weight, scales_NG=weight.scales_NG.to(torch.float16).float())
    x_MK = torch.randn(7, 512)
    narrow, wide = linear_of(halves), linear_of(halves)
    assert narrow.scales_TBL.dtype == np.uint16
    wide.scales_TBL = narrow.scales_TBL.view(np.float16).astype(np.float32)
    assert torch.equal(narrow(x_MK), wide(x_MK))
    assert linear_of(weight).scales_TBL.dtype == np.float32


def test_rounding_is_the_definitions() -> None:
    x_MK = torch.randn(9, 300) * 3
    x_MK[2, 128:256] = 0.0
    x_MK[3, 5] = 1e-30
    byte_MK, scale_MB = np.empty((9, 384), np.int8), np.empty((9, 3), np.float32)
    sum_MB = np.empty((9, 3), np.int32)
    use_threads(False)
    compiled_int8.round_to_bytes(x_MK.numpy(), 128, byte_MK, scale_MB, sum_MB, *WHOLE)
    byte_MBk = torch.from_numpy(byte_MK).unflatten(1, (3, 128))
    found_MK = (byte_MBk.float() * torch.from_numpy(scale_MB)[..., None]).flatten(1)
    assert torch.equal(found_MK[:, :300], rounded(x_MK, 128))
    assert not found_MK[:, 300:].any()
    assert torch.equal(torch.from_numpy(sum_MB), byte_MBk.sum(-1).int())


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_breaks_its_token_alone(broken: float) -> None:
    weight = group_weight(70, 256, 128)
    x_MK = torch.randn(6, 256)
    whole_MN = linear_of(weight)(x_MK)
    x_MK[4, 200] = broken
    found_MN = linear_of(weight)(x_MK)
    assert found_MN[4].isnan().all()
    others = [0, 1, 2, 3, 5]
    assert torch.equal(found_MN[others], whole_MN[others])
    assert rounded(x_MK, 128)[4].isnan().any()
