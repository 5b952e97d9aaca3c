"""Products on activations in fp8 on a GPU, against the oracle; here in Triton's interpreter."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pipeline.kernels.activations.fp8 import rounded
from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.triton import elementwise
from pipeline.kernels.triton.fp8_rounding import Fp8Inputs, rounding_launch
from pipeline.kernels.triton.launch import A100, H100, CompileTarget
from pipeline.kernels.triton.linear import fp8
from pipeline.kernels.triton.linear.fp8 import Fp8Linear, fp8_linears, parts_of, tile_for
from pipeline.kernels.triton.linear.scaled_mm import ScaledMm
from pipeline.weights.packed import DenseWeight, Fp8Weight, LinearWeight
from tests.gpu.checks import FP8_SUMS, fp8_tolerance
from tests.kernels.activations.test_fp8 import fp8_weight
from tests.kernels.triton.problems import DEVICE, DTYPES, PRODUCT, random_weight

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) < fp8.MIN_CAPABILITY, reason="no fp8 units"
)
SUMS = 0.0 if DEVICE.type == "cpu" else FP8_SUMS


def oracle(weight: LinearWeight, x_MK: torch.Tensor) -> torch.Tensor:
    linear = reference_kernels(torch.float32, torch.device("cpu")).rounded["fp8"].prepare(weight)
    assert linear is not None
    return linear(x_MK.float().cpu())


def linear_of(weight: LinearWeight, cublas: ScaledMm | None = None) -> Fp8Linear:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScaledMm, "on", lambda device, dtype, per_token: cublas)
        linear = fp8_linears(DEVICE, torch.bfloat16)["fp8"].prepare(weight)
    assert isinstance(linear, Fp8Linear)
    return linear


def spread(rounded: Fp8Inputs, num_inputs: int) -> torch.Tensor:
    """Return values times their scales, of existing tokens and inputs; assert that zeros fill the last block."""
    value_MK, scale_BM = rounded.value_MK[: rounded.num_tokens], rounded.scale_BM[:, : rounded.num_tokens]
    spread_MK = value_MK.float() * scale_BM.t().repeat_interleave(rounded.block, 1)[:, : value_MK.shape[1]]
    behind = spread_MK[:, num_inputs:]
    assert bool((behind == 0).all() or behind.isnan().any())
    return spread_MK[:, :num_inputs].cpu()


def rounded_by_kernel(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    into = Fp8Inputs.for_tokens(x_MK, -(-x_MK.shape[1] // block) * block, block)
    rounding_launch(x_MK, into).run()
    return spread(into, x_MK.shape[1])


@DTYPES
@pytest.mark.parametrize(("num_inputs", "block"), [(128, 128), (70, 32), (2500, 64), (5, 128)])
def test_rounding_is_the_oracles_bit_for_bit(num_inputs: int, block: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_inputs)
    x_MK = torch.randn(4, num_inputs) * 10.0
    x_MK[0, ::2] *= 1e-4
    x_MK[1] = 448.0 * torch.linspace(-1, 1, num_inputs)
    x_MK[1, 0], x_MK[2, 3], x_MK[3] = 448.0, 0.0, 0.0
    x_MK = x_MK.to(DEVICE, dtype)
    assert torch.equal(rounded_by_kernel(x_MK, block), rounded(x_MK.cpu(), block))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_quotients_of_16_bit(dtype: torch.dtype) -> None:
    """Largest magnitudes are some mantissas, in bfloat16 all; values go from the largest to 2^-19 of it."""
    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    mantissa = 1 + torch.arange(1 << bits) / (1 << bits)
    largest = mantissa if bits == 7 else mantissa[torch.randperm(len(mantissa))[:32]]
    values = (mantissa * 2.0 ** -torch.arange(19).unsqueeze(1)).flatten()
    values = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(1, -1, 127).expand(len(largest), -1, -1)
    values = torch.where(values > largest.view(-1, 1, 1), values / 2, values)
    first = largest.view(-1, 1, 1).expand(-1, values.shape[1], -1)
    x_MK = torch.cat([first, values], 2).flatten(1).to(DEVICE, dtype)
    assert torch.equal(rounded_by_kernel(x_MK, 128), rounded(x_MK.cpu(), 128))


def unusual_tokens(num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return tokens of normal, tiny, large and zero values, with NaN and with infinity."""
    x_MK = torch.randn(6, num_inputs) * torch.tensor([[1.0], [1e-6], [200.0], [0.0], [1.0], [1.0]])
    x_MK[4, -1], x_MK[5, 3] = float("nan"), float("inf")
    return x_MK.to(DEVICE, dtype)


def bits(rounded: Fp8Inputs) -> list[torch.Tensor]:
    value_MK, scale_BM = rounded.value_MK[: rounded.num_tokens], rounded.scale_BM[:, : rounded.num_tokens]
    return [value_MK.view(torch.uint8), scale_BM.view(torch.int32)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter
@DTYPES
@pytest.mark.parametrize("block", [128, 64, 32, None])
@pytest.mark.parametrize("num_inputs", [128, 1408])
def test_norms_and_silu_round_to_the_bits_of_a_launch_of_its_own(
    num_inputs: int, block: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_inputs)
    linear = linear_of(fp8_weight(8, num_inputs, (8, block or num_inputs)))
    x_TH, residual_TH = unusual_tokens(num_inputs, dtype), unusual_tokens(num_inputs, dtype)
    gate_up_T2F = torch.cat([x_TH, residual_TH], 1)
    weight_H = (torch.rand(num_inputs) + 0.5).to(DEVICE, dtype)
    norm_TH, total_TH = elementwise.add_rms_norm(x_TH.clone(), residual_TH.clone(), weight_H, 1e-5)
    rounded_norm, total = linear.add_rms_norm(x_TH.clone(), residual_TH.clone(), weight_H, 1e-5)
    assert torch.equal(total.nan_to_num(7.0), total_TH.nan_to_num(7.0))
    silu = elementwise.gate_mul(gate_up_T2F, "silu")
    for apart, fused in ((norm_TH, rounded_norm), (silu, linear.gate_mul(gate_up_T2F, "silu"))):
        assert isinstance(fused, Fp8Inputs)
        assert all(map(torch.equal, bits(fused), bits(linear.round(apart))))
        oracle_MK = rounded(apart.cpu(), fused.block)
        assert torch.equal(spread(fused, num_inputs).nan_to_num(7.0), oracle_MK.nan_to_num(7.0))
        outputs = linear(fused), linear(apart)
        assert outputs[0].dtype == dtype
        assert torch.equal(*(each.nan_to_num(7.0) for each in outputs))


@pytest.mark.parametrize(
    "weight",
    [fp8_weight(7, 200, (128, 128)), random_weight(2, 32_896, 128)],
    ids=["no whole blocks", "too wide for one program"],
)
def test_norms_and_silu_stay_in_16_bit_for_linears_that_round_for_themselves(weight: LinearWeight) -> None:
    linear, num_inputs = linear_of(weight), weight.in_features
    x_TH = torch.randn(2, num_inputs, device=DEVICE)
    gate_up_T2F, weight_H = torch.cat([x_TH, x_TH], 1), torch.ones_like(x_TH[0])
    ours, expected = (
        (*each.add_rms_norm(x_TH.clone(), x_TH.clone(), weight_H, 1e-5), each.gate_mul(gate_up_T2F, "silu"))
        for each in (linear, elementwise)
    )
    for tensor, its in zip(ours, expected, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.equal(its)  # type: ignore[arg-type]


def test_what_is_no_number_makes_all_outputs_none() -> None:
    weight = random_weight(8, 256, 128)
    x_MK = torch.randn(4, 256, device=DEVICE)
    x_MK[1, 130], x_MK[2, 5] = float("nan"), float("inf")
    y_MN = linear_of(weight)(x_MK)
    assert torch.equal(y_MN.isnan().all(1).cpu(), torch.tensor([False, True, True, False]))
    assert torch.equal(y_MN.isfinite().all(1).cpu(), torch.tensor([True, False, False, True]))


# Tiles go by the tokens, and types matter where inputs are read and outputs written.
OF_TYPES = [(1, torch.float32), (17, torch.float16), (70, torch.float32)]
OF_TYPES += [(tokens, torch.bfloat16) for tokens in (1, 17, 70) if DEVICE.type == "cuda"]


WEIGHTS = {
    "bias": random_weight(70, 256, 128, bias=True),
    "reordered": replace(random_weight(9, 128, 64), input_order_K=torch.randperm(128)),
    "several parts": random_weight(20, 2048, 128),
    "8 bits": replace(random_weight(8, 96, 48), bits=8),
    "blocks": fp8_weight(130, 200, (128, 128)),
    "blocks of 32": fp8_weight(64, 160, (64, 32)),
    "blocks of 64": fp8_weight(130, 192, (128, 64)),
    "two blocks a scale": fp8_weight(33, 512, (128, 256)),
    "less than a block": fp8_weight(5, 96, (128, 128)),
    "rows": fp8_weight(7, 200, (1, 200)),
    "one scale": fp8_weight(7, 200, (7, 200)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_product(name: str) -> None:
    weight = WEIGHTS[name]
    linear = linear_of(weight)
    for tokens, dtype in OF_TYPES:
        torch.manual_seed(tokens)
        x_MK = (torch.randn(tokens, weight.in_features) * torch.rand(tokens, 1)).to(DEVICE, dtype)
        ours, expected = linear(x_MK), oracle(weight, x_MK)
        assert ours.dtype == dtype
        error = float((ours.float().cpu() - expected).abs().max() / expected.abs().max())
        assert error < PRODUCT[dtype] + SUMS, (tokens, dtype)


@pytest.mark.parametrize("bias", [False, True])
def test_a_tokens_bits_are_the_same_beside_others(bias: bool) -> None:
    """Parts of the inputs in programs of their own for few tokens, in one for many."""
    weight = random_weight(20, 2048, 128, bias)
    linear, x_MK = linear_of(weight), torch.randn(80, 2048, device=DEVICE)
    assert parts_of(20, 16, 128, CompileTarget.from_device(DEVICE)) > 1
    whole = linear(x_MK)
    for rows in (slice(0, 1), slice(3, 5), slice(0, 80)):
        assert torch.equal(linear(x_MK[rows]), whole[rows])
    assert float((whole.cpu() - oracle(weight, x_MK)).abs().max()) < (PRODUCT[torch.float32] + SUMS) * 3


def test_no_tokens_and_rows_that_lie_apart() -> None:
    linear, x_MK = linear_of(random_weight(8, 64, 64)), torch.randn(6, 64, device=DEVICE)
    assert linear(x_MK[:0]).shape == (0, 8)
    assert linear(linear.add_rms_norm(x_MK[:0], x_MK[:0], x_MK[0], 1e-5)[0]).shape == (0, 8)
    assert linear(linear.gate_mul(x_MK[:0].repeat(1, 2), "silu")).shape == (0, 8)
    assert torch.equal(linear(x_MK[::2]), linear(x_MK[::2].contiguous()))


def test_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = fp8_linears(DEVICE, torch.bfloat16)["fp8"]
    assert linears.prepare(DenseWeight(torch.randn(8, 64))) is None
    for capability, served in [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(ScaledMm, "on", lambda device, dtype, per_token: None)
        assert ("fp8" in fp8_linears(torch.device("cuda"), torch.float16)) == served


def test_parts_cover_the_inputs_and_fit_shared_memory() -> None:
    for target in (A100, H100):
        for num_outputs, num_blocks, block in ((4096, 112, 128), (28672, 32, 128), (128, 7, 32)):
            parts = parts_of(num_outputs, num_blocks, block, target)
            per_part = -(-num_blocks // parts)
            assert (parts - 1) * per_part < num_blocks <= parts * per_part
            for tokens in (1, 16, 17, 64, 100_000):
                tile = tile_for(tokens, parts, block, target)
                assert tile.num_stages * (tile.outputs + tile.tokens) * block <= target.max_shared_bytes


# -- products by cuBLAS


def in_blocks(
    value_MK: torch.Tensor,
    value_KN: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the result of `torch._scaled_mm`, and assert the layouts that it requires."""
    (tokens, inputs), outputs = value_MK.shape, value_KN.shape[1]
    assert value_MK.is_contiguous()
    assert value_KN.t().is_contiguous()
    blocks = len(scale_b)
    assert blocks in (1, inputs // 128)
    assert (scale_a.shape, scale_a.stride()) == ((tokens, blocks), (1, tokens))
    assert scale_b.is_contiguous()
    assert scale_b.shape == (blocks, outputs)
    wide_MK = value_MK.float() * scale_a.repeat_interleave(inputs // blocks, 1)
    return (wide_MK @ (value_KN.float() * scale_b.repeat_interleave(inputs // blocks, 0))).to(out_dtype)


def cublas_of_card(monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool] = lambda tokens: False) -> list[int]:
    """Install a `torch._scaled_mm` that refuses numbers of tokens as cuBLASLt does, and those that `refused` selects.
    Return a list that receives the numbers that it computes."""
    products: list[int] = []

    def product(value_MK: torch.Tensor, *others: torch.Tensor, **scales: Any) -> torch.Tensor:
        if len(value_MK) % 4 or refused(len(value_MK)):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`")
        products.append(len(value_MK))
        return in_blocks(value_MK, *others, **scales)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    return products


def cublas_of(dtype: torch.dtype = torch.bfloat16, per_token: bool = False) -> ScaledMm:
    return ScaledMm(dtype, per_token)


def of_blocks(num_outputs: int, num_inputs: int = 384) -> Fp8Weight:
    return fp8_weight(num_outputs, num_inputs, (128, 128))


def error_of(linear: Fp8Linear, weight: LinearWeight, x_MK: torch.Tensor) -> float:
    expected = oracle(weight, x_MK)
    return float((linear(x_MK).cpu() - expected).abs().max() / expected.abs().max())


BY_CUBLAS = fp8_tolerance(torch.bfloat16)
BY_TRITON = BY_CUBLAS + 2**-8  # its interpreter truncates instead of rounding


@pytest.mark.parametrize(("per_token", "by_cublas"), [(False, [16, 16, 64, 80, 80, 144]), (True, [80, 80, 144])])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_tokens_that_are_cublass(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias: bool, per_token: bool, by_cublas: list[int]
) -> None:
    products = cublas_of_card(monkeypatch)
    weight = fp8_weight(32, 384, (32, 384)) if per_token else of_blocks(32)
    weight = replace(weight, bias_N=torch.randn(32)) if bias else weight
    linear = linear_of(weight, cublas_of(dtype, per_token))
    products.clear()
    for tokens in (1, 16, 64, 65, 77, 130):
        error = error_of(linear, weight, torch.randn(tokens, 384, device=DEVICE).to(dtype))
        once_more = bias or tokens < 65  # a sum with a bias is rounded again; Triton's interpreter truncates
        assert error < fp8_tolerance(dtype) + once_more * torch.finfo(dtype).eps / 2
    assert products == by_cublas, "multiples of 16"
    assert linear(torch.randn(0, 384, device=DEVICE, dtype=dtype)).shape == (0, 32)
    if not per_token:
        for other in (fp8_weight(32, 384, (128, 64)), fp8_weight(32, 512, (128, 256)), of_blocks(30)):
            assert linear_of(other, cublas=cublas_of()).cublas is None
    assert len(products) == len(by_cublas)


def test_tokens_that_pad_a_product_change_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of padding holds arbitrary values, NaN included."""
    cublas_of_card(monkeypatch)
    weight = of_blocks(32)
    linear, x_MK = linear_of(weight, cublas=cublas_of()), torch.randn(77, 384, device=DEVICE).bfloat16()
    empty = torch.empty

    def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory = empty(*shape, dtype=dtype, device=device)
        return memory.view(torch.uint8).fill_(0xFF).view(dtype)

    monkeypatch.setattr(torch, "empty", poisoned)
    assert error_of(linear, weight, x_MK) < BY_CUBLAS


def test_a_shape_that_cublas_refuses_is_tritons_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    products = cublas_of_card(monkeypatch, refused=lambda tokens: tokens == 176)
    cublas, weights = cublas_of(), [of_blocks(outputs) for outputs in (32, 32, 64)]
    first, second, other = (linear_of(weight, cublas=cublas) for weight in weights)
    x_MK = torch.randn(170, 384, device=DEVICE).bfloat16()
    with pytest.warns(RuntimeWarning, match=r"32 outputs and 384 inputs was rejected at 176 tokens: .*NOT_SUPPORTED"):
        assert error_of(first, weights[0], x_MK) < BY_TRITON
    products.clear()
    for linear, weight in zip((first, second), weights):
        assert error_of(linear, weight, x_MK) < BY_TRITON
        assert error_of(linear, weight, x_MK[:100]) < BY_TRITON
    assert products == []
    assert error_of(other, weights[2], x_MK[:100]) < BY_CUBLAS
    assert products == [112]


def test_memory_that_runs_out_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    cublas_of_card(monkeypatch)
    linear = linear_of(of_blocks(32), cublas=cublas_of())
    runs_out = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(torch, "_scaled_mm", runs_out)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            linear(torch.randn(80, 384, device=DEVICE).bfloat16())


def mixed_up(*tensors: torch.Tensor, scale_b: torch.Tensor, **rest: Any) -> torch.Tensor:
    return in_blocks(*tensors, scale_b=scale_b.flip(0), **rest)


def wrong_at_the_end(*tensors: torch.Tensor, **rest: Any) -> torch.Tensor:
    found_MN = in_blocks(*tensors, **rest)
    found_MN[192:, -1] = 0
    return found_MN


REFUSED = [Mock(side_effect=kind("no such product")) for kind in (RuntimeError, AttributeError)]


@pytest.mark.parametrize("product", [mixed_up, wrong_at_the_end, *REFUSED])
def test_a_shape_that_the_probe_finds_wrong_is_tritons(
    monkeypatch: pytest.MonkeyPatch, product: Callable[..., torch.Tensor]
) -> None:
    weight, cublas = of_blocks(96), cublas_of()
    monkeypatch.setattr(torch, "_scaled_mm", product)
    with pytest.warns(RuntimeWarning, match="96 outputs and 384 inputs was wrong or rejected when probed"):
        linear = linear_of(weight, cublas=cublas)
    assert not cublas.supports(linear.weight.value_NK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = linear_of(weight, cublas=cublas)
    assert error_of(again, weight, torch.randn(80, 384, device=DEVICE).bfloat16()) < BY_TRITON


def test_a_type_in_which_cublas_is_wrong_is_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    def less_exact(*tensors: torch.Tensor, out_dtype: torch.dtype, **scales: Any) -> torch.Tensor:
        return (in_blocks(*tensors, out_dtype=torch.float32, **scales) * (1 + 0.7 * 2**-8)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", less_exact)
    weight, in_bfloat16 = of_blocks(32), cublas_of()
    assert in_bfloat16.supports(linear_of(weight, cublas=in_bfloat16).weight.value_NK)
    with pytest.warns(RuntimeWarning, match="wrong or rejected when probed"):
        linear = linear_of(weight, cublas=cublas_of(dtype=torch.float16))
    assert error_of(linear, weight, torch.randn(80, 384, device=DEVICE).half()) < fp8_tolerance(torch.float16)


def test_cublas_is_only_for_cards_that_have_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", in_blocks)
    assert ScaledMm.on(torch.device("cpu"), torch.bfloat16, per_token=True) is None
    for capability in ((8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert ScaledMm.on(torch.device("cuda"), torch.bfloat16, per_token=False) is None


def test_deterministic_kernels_never_take_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaledMm, "on", lambda device, dtype, per_token: cublas_of())
    monkeypatch.setattr(torch, "_scaled_mm", in_blocks)
    weight = of_blocks(32)
    for deterministic in (False, True):
        linears = fp8_linears(DEVICE, torch.bfloat16, deterministic)["fp8"]
        linear = linears.prepare(weight)
        assert isinstance(linear, Fp8Linear)
        assert (linear.cublas is not None) == ("cuBLAS" in linears.backends) == (not deterministic)
