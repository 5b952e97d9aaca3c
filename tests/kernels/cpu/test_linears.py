"""Compiled linears of every kind against the weight as it is stored."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.activations.int8 import int8_block, rounded
from pipeline.kernels.cpu.compile.processor import HAS_AVX512_BF16
from pipeline.kernels.cpu.compile.threads import ALL_ITEMS, use_threads
from pipeline.kernels.cpu.linear.linear_bf16 import bf16_linear, use_avx512_bf16
from pipeline.kernels.cpu.linear.linear_int8 import Int8Linear, has_vnni
from pipeline.kernels.cpu.linear.linear_kernel import BF16_DEPTH
from pipeline.kernels.cpu.linear.linear_widened import FLOAT8_SCALE_LIMIT, float32_linear, widened_linear
from pipeline.kernels.cpu.linear.round_int8 import round_to_int8
from pipeline.kernels.cpu.linear.selection import DenseLinear, ReorderedLinear, prepare_linear
from pipeline.kernels.cpu.linear.tiled_linear import TiledLinear
from pipeline.kernels.cpu.tiles.int8_tile import Form, forms_here
from pipeline.kernels.cpu.tiles.weight_tiles import TOKENS
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight
from pipeline.weights.round_to_nearest import NF4

WIDENED = ["float32", "bfloat16", "int4", "int8", "float8", "codebook4"]
PAIRS = ["bf16", "bf16_int4"] if HAS_AVX512_BF16 else []
BYTES = ["int8 by int4", "int8 by int8"] if has_vnni() else []
KINDS = [*WIDENED, *PAIRS, *BYTES]
SHAPES = [(1, 8), (31, 64), (32, 128), (100, 256), (257, 384), (1024, 1152), (192, 2 * BF16_DEPTH + 128)]
ROUNDING = 2.0**-8  # of a result in bfloat16, the only thing that is rounded there


def int_weight(
    shape_NK: tuple[int, int], group: int, bits: int = 4, bias_N: torch.Tensor | None = None, halves: bool = True
) -> GroupIntWeight:
    """Build a random integer weight. halves: whether scales are float16 numbers."""
    groups = (shape_NK[0], -(-shape_NK[1] // group))
    scales_NG = (torch.rand(groups) + 0.5) * shape_NK[1] ** -0.5 * 4 / (1 << bits)
    return GroupIntWeight(
        torch.randint(0, 1 << bits, shape_NK, dtype=torch.int16).to(torch.uint8),
        scales_NG.to(torch.float16).float() if halves else scales_NG,
        torch.randint(0, 1 << bits, groups).float(),
        group,
        bias_N,
        bits,
    )


def weight_of(kind: str, shape_NK: tuple[int, int], group: int = 0, halves: bool = True) -> LinearWeight:
    num_outputs, num_inputs = shape_NK
    bias_N = torch.randn(num_outputs) if num_outputs % 2 else None
    group = group or min(128, num_inputs)
    if kind.endswith(("int4", "int8")):
        return int_weight(shape_NK, group, int(kind[-1]), bias_N, halves)
    if kind == "float8":
        grid = (-(-num_outputs // 24), -(-num_inputs // 20))  # blocks that neither lanes nor inputs are a multiple of
        code_NK = torch.randint(0, 254, shape_NK, dtype=torch.int16).to(torch.uint8)
        code_NK = torch.where(code_NK >= 127, code_NK + 1, code_NK)  # 127 and 255 are no numbers
        scales_RG = (torch.rand(grid) + 0.5) * num_inputs**-0.5 / 100
        return Fp8Weight(code_NK.view(torch.float8_e4m3fn), scales_RG, (24, 20), bias_N)
    if kind == "codebook4":
        scales_NG = (torch.rand(num_outputs, num_inputs // group) + 0.5) * num_inputs**-0.5
        code_NK = torch.randint(0, 16, shape_NK, dtype=torch.uint8)
        return CodebookWeight(code_NK, scales_NG, torch.tensor(NF4), group, bias_N)
    weight_NK = torch.randn(shape_NK) * num_inputs**-0.5
    return DenseWeight(weight_NK if kind == "float32" else weight_NK.to(torch.bfloat16), bias_N)


def linear_of(kind: str, weight: LinearWeight, form: Form | None = None) -> TiledLinear:
    """Build the linear of a kind; one of bytes in `form`, or in this processor's fastest."""
    linear = None
    if kind in BYTES:
        block = int8_block(weight)
        assert block is not None
        assert isinstance(weight, GroupIntWeight)
        linear = Int8Linear(weight, block, form or forms_here()[0])
    elif kind in PAIRS:
        linear = bf16_linear(weight)
    elif kind == "float32":
        assert isinstance(weight, DenseWeight)
        linear = float32_linear(weight.weight_NK, weight.bias_N)
    else:
        linear = widened_linear(weight)
    assert linear is not None
    assert linear.kind.startswith(kind.replace(" ", "_"))
    return linear


def tokens_for(kind: str, shape_MK: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape_MK).to(torch.bfloat16 if kind in PAIRS else torch.float32)


def is_product(y_MN: torch.Tensor, kind: str, weight: LinearWeight, x_MK: torch.Tensor) -> bool:
    """Return whether y is within rounding of the product in double precision with the stored weight."""
    block = int8_block(weight) if kind in BYTES else None
    x_MK = x_MK if block is None else rounded(x_MK, block)
    exact_MN = x_MK.double() @ weight.dequantize(torch.float32).double().T
    exact_MN += 0 if weight.bias_N is None else weight.bias_N.double()
    lost_MN, most = (y_MN.double() - exact_MN).abs(), exact_MN.abs().max()
    if kind in PAIRS:  # rounded once; and what float32 sums of parts that cancel out lose
        return bool((lost_MN <= ROUNDING * exact_MN.abs() + 4e-5 * most).all())
    if isinstance(weight, GroupIntWeight) and block is not None:
        # the zero points' share of a sum is many times the sum, so its rounding is measured by that
        most = x_MK.abs().max() * weight.scales_NG.max() * ((1 << weight.bits) - 1) * 5
    return float(lost_MN.max() / most) < 2e-6


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith(("int4", "int8"))])
def test_zero_points_that_are_no_integers(kind: str) -> None:
    """Minima of GGUF's groups are such."""
    torch.manual_seed(0)
    for halves in (True, False):
        weight = weight_of(kind, (101, 256), 32, halves)
        assert isinstance(weight, GroupIntWeight)
        weight = replace(weight, zeros_NG=weight.zeros_NG * 1.3 - 2.7)
        for tokens in (1, 2, 7):
            x_MK = tokens_for(kind, (tokens, 256))
            assert is_product(linear_of(kind, weight)(x_MK), kind, weight, x_MK), (tokens, halves)


@pytest.mark.parametrize("kind", KINDS)
def test_they_multiply_by_the_stored_weight(kind: str) -> None:
    torch.manual_seed(0)
    for shape_NK in SHAPES:
        weight = weight_of(kind, shape_NK)
        linear = linear_of(kind, weight)
        for tokens in (1, 2, 3, 5, 6, 7, 8, 11, 13, TOKENS + 3, 2 * TOKENS):
            x_MK = tokens_for(kind, (tokens, shape_NK[1]))
            y_MN = linear(x_MK)
            assert (y_MN.shape, y_MN.dtype) == ((tokens, shape_NK[0]), x_MK.dtype)
            assert is_product(y_MN, kind, weight, x_MK), (shape_NK, tokens)
            if kind in BYTES:
                of_exact = x_MK @ weight.dequantize(torch.float32).T
                assert not torch.allclose(y_MN, of_exact, rtol=1e-5), "of rounded tokens"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith(("4", "int8"))])
def test_groups_of_each_size(kind: str) -> None:
    torch.manual_seed(0)
    # A block of tokens in bytes must fit a group.
    for group in (32, 64, 128, 200, 256) if kind in BYTES else (8, 24, 32, 64, 128, 136, 200, 256):
        num_inputs = group if group == 200 else 6 * group
        for halves in (True, False):
            weight, x_MK = weight_of(kind, (96, num_inputs), group, halves), tokens_for(kind, (7, num_inputs))
            assert is_product(linear_of(kind, weight)(x_MK), kind, weight, x_MK), (group, halves)


@pytest.mark.parametrize("kind", WIDENED)
def test_widening_rounds_nothing(kind: str) -> None:
    """Unit vectors through a linear are its weight, bit for bit."""
    weight = weight_of(kind, (70, 256))
    assert torch.equal(linear_of(kind, weight)(torch.eye(256)).T, weight.dequantize(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    linear, x_MK = linear_of(kind, weight_of(kind, (64, 256))), tokens_for(kind, (8, 256))
    clean_MN = linear(x_MK)
    for broken in (float("nan"), float("inf"), -float("inf")):
        x_MK[5, 70] = broken
        broken_MN = linear(x_MK)
        if kind not in ("codebook4", "int4", "int8", "float8") or broken != broken:  # a weight of 0 makes NaN of inf
            assert not torch.isfinite(broken_MN[5]).any()
        others = [0, 1, 2, 3, 4, 6, 7]
        assert torch.equal(broken_MN[others], clean_MN[others])


@pytest.mark.parametrize("kind", [*PAIRS, *BYTES])
def test_a_token_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    torch.manual_seed(0)
    linear, x_MK = linear_of(kind, weight_of(kind, (130, 1152))), tokens_for(kind, (37, 1152))
    together_MN = linear(x_MK)
    for m in range(len(x_MK)):
        assert torch.equal(linear(x_MK[m : m + 1])[0], together_MN[m])
    assert torch.equal(linear(x_MK[:9]), together_MN[:9])


def test_rows_that_are_not_contiguous_in_memory() -> None:
    weight, x_MK = weight_of("bfloat16", (64, 128)), torch.randn(4, 256)[:, ::2]
    assert is_product(linear_of("bfloat16", weight)(x_MK), "bfloat16", weight, x_MK)


def test_every_float8_number_is_widened_to_its_value() -> None:
    code_NK = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(4, 64)
    value_NK = torch.where((code_NK & 127) == 127, 0, code_NK).view(torch.float8_e4m3fn)
    for scale in (1.0, 2.0**-20, 0.3, 100.0):
        linear = linear_of("float8", Fp8Weight(value_NK, torch.full((4, 1), scale), (1, 64)))
        assert torch.equal(linear(torch.eye(64)).T, value_NK.float() * scale)


# -- selection


def kind_of(linear: Callable[[torch.Tensor], torch.Tensor]) -> str:
    linear = linear.linear if isinstance(linear, ReorderedLinear) else linear
    return linear.kind if isinstance(linear, TiledLinear) else type(linear).__name__


def test_a_weight_stays_as_narrow_as_it_was_stored() -> None:
    torch.manual_seed(0)
    short_NK = torch.randn(64, 128).to(torch.bfloat16)
    order_K = torch.randperm(128)
    served: list[tuple[LinearWeight, str, str]] = [  # and what serves it in float32 and in bfloat16
        (DenseWeight(short_NK), "bfloat16", "bf16"),
        (DenseWeight(short_NK.float()), "bfloat16", "bf16"),
        (DenseWeight(torch.randn(64, 128).half()), "DenseLinear", "bf16"),  # more digits than bfloat16 holds
        (DenseWeight(torch.randn(64, 128)), "DenseLinear", "bf16"),
        (DenseWeight(short_NK[:, :60]), "DenseLinear", "DenseLinear"),
        (int_weight((64, 128), 32), "int4", "bf16_int4"),
        (replace(int_weight((64, 128), 32), input_order_K=order_K), "int4", "bf16_int4"),
        (replace(int_weight((64, 128), 32, bits=8), input_order_K=order_K), "int8", "bf16"),
    ]
    for weight, kind, in_bfloat16 in served:
        linear = prepare_linear(weight, torch.float32)
        assert kind_of(linear) == kind
        x_MK = torch.randn(2, weight.in_features)
        assert is_product(linear(x_MK), "float32", weight, x_MK), kind
        if use_avx512_bf16():
            assert kind_of(prepare_linear(weight, torch.bfloat16)) == in_bfloat16


def test_what_no_narrow_linear_reads_is_widened_at_load() -> None:
    torch.manual_seed(0)
    x_MK, float8 = torch.randn(3, 36), torch.randn(8, 36).to(torch.float8_e4m3fn)
    odd = [
        int_weight((8, 36), 12),
        int_weight((8, 36), 6, bits=8),
        CodebookWeight(torch.ones(8, 36, dtype=torch.uint8), torch.ones(8, 3), torch.tensor(NF4), 12),
        Fp8Weight(float8, torch.rand(8, 6), (1, 6)),
        Fp8Weight(float8, torch.full((1, 1), FLOAT8_SCALE_LIMIT), (8, 36)),
    ]
    for weight in odd:
        assert widened_linear(weight) is None
        linear = prepare_linear(weight, torch.float32)
        assert type(linear) is DenseLinear
        assert is_product(linear(x_MK), "float32", weight, x_MK)
    assert widened_linear(Fp8Weight(float8, torch.full((1, 1), 1.0), (8, 36))) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_another_order_meet_their_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    order_K = torch.randperm(128)
    plain = int_weight((64, 128), 32, bias_N=torch.randn(64))
    weight = replace(plain, input_order_K=order_K)
    x_MK = torch.randn(5, 128).to(dtype)
    exact = x_MK.float()[:, order_K] @ plain.dequantize(torch.float32).T + plain.bias_N
    linear = prepare_linear(weight, dtype)
    assert type(linear) is ReorderedLinear
    for ours in (linear(x_MK), reference.prepare_linear(weight, dtype, torch.device("cpu"))(x_MK)):
        assert float((ours.float() - exact).abs().max() / exact.abs().max()) < (1e-6 if dtype.itemsize == 4 else 0.02)


# -- tokens rounded to int8


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("form", forms_here(), ids=lambda form: form.name)
def test_extreme_bytes_do_not_overflow(form: Form, kind: str) -> None:
    """Inputs and weights at their maximum give the largest and smallest possible sums, then the largest shares of zero
    points."""
    bits = int(kind[-1])
    most = (1 << bits) - 1
    for q, zero in ((most, 0), (0, most)):
        q_NK, zeros_NG = torch.full((64, 256), q, dtype=torch.uint8), torch.full((64, 2), float(zero))
        linear = linear_of(kind, GroupIntWeight(q_NK, torch.ones(64, 2), zeros_NG, 128, bits=bits), form)
        for sign in (1.0, -1.0):
            y_MN = linear(torch.full((7, 256), sign * 127.0))
            assert torch.equal(y_MN, torch.full((7, 64), sign * 127.0 * (q - zero) * 256))


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group"), [(101, 512, 32), (70, 200, 200)])
def test_all_forms_give_the_same_bits(num_outputs: int, num_inputs: int, group: int, kind: str) -> None:
    fastest, *others = forms_here()
    weight, x_MK = weight_of(kind, (num_outputs, num_inputs), group), torch.randn(23, num_inputs)
    wanted_MN = linear_of(kind, weight, fastest)(x_MK)
    for form in others:
        linear = linear_of(kind, weight, form)
        assert torch.equal(linear(x_MK), wanted_MN)
        assert all(torch.equal(linear(x_MK[:few]), wanted_MN[:few]) for few in (1, 2, 7))


@pytest.mark.skipif(not BYTES, reason="this processor has no AVX2")
def test_bfloat16_is_read_and_written() -> None:
    """It is computed in float32 and rounded once, bias included."""
    linear = linear_of("int8 by int4", weight_of("int4", (101, 256), 64))
    for num_tokens in (1, 5, 40):
        x_MK = torch.randn(num_tokens, 256).to(torch.bfloat16)
        found_MN = linear(x_MK)
        assert found_MN.dtype == torch.bfloat16
        assert torch.equal(found_MN, linear(x_MK.float()).to(torch.bfloat16))


def test_rounding_is_the_definitions() -> None:
    x_MK = torch.randn(9, 300) * 3
    x_MK[2, 128:256] = 0.0
    x_MK[3, 5] = 1e-30
    byte_MK, scale_MB = np.empty((9, 384), np.int8), np.empty((9, 3), np.float32)
    sum_MB = np.empty((9, 3), np.int32)
    use_threads(False)
    round_to_int8(x_MK.numpy(), 128, byte_MK, scale_MB, sum_MB, *ALL_ITEMS)
    byte_MBk = torch.from_numpy(byte_MK).unflatten(1, (3, 128))
    found_MK = (byte_MBk.float() * torch.from_numpy(scale_MB)[..., None]).flatten(1)
    assert torch.equal(found_MK[:, :300], rounded(x_MK, 128))
    assert not found_MK[:, 300:].any()
    assert torch.equal(torch.from_numpy(sum_MB), byte_MBk.sum(-1).int())
    x_MK[4, 200] = float("nan")
    assert rounded(x_MK, 128)[4].isnan().any()
