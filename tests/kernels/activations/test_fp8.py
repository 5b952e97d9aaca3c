"""Linears on activations in fp8 against the definition written out value by value."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import ConfigError
from pipeline.kernels.activations import int8 as int8_activations
from pipeline.kernels.activations.act_quant import Activations, ActQuantLinears, with_act_quant
from pipeline.kernels.activations.fp8 import as_multiplied, rounded
from pipeline.kernels.reference import prepare_linear, reference_kernels
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight
from pipeline.weights.round_to_nearest import int8, nf4
from tests.kernels.triton.problems import random_weight

CPU = torch.device("cpu")
E4M3 = sorted(  # the finite values of at least 0, the even ones at even indices
    {(1 + f / 8) * 2.0 ** (e - 7) if e else f * 2.0**-9 for e in range(16) for f in range(8) if (e, f) != (15, 7)}
)


def nearest(value_K: np.ndarray) -> np.ndarray:
    """Return the nearest e4m3 values, by comparing with all of them."""
    distance_KE = np.abs(np.abs(value_K.astype(np.float64))[:, None] - np.array(E4M3))
    is_best_KE = distance_KE == distance_KE.min(1, keepdims=True)
    is_odd_E = np.arange(len(E4M3)) % 2
    return np.copysign(np.array(E4M3)[np.argmax(2 * is_best_KE - is_odd_E, axis=1)], value_K).astype(np.float32)


def by_definition(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """Round by definition: scales and quotients in float32, the nearest value by search."""
    out = x_MK.clone()
    for row in out:
        for start in range(0, len(row), block):
            piece = row[start : start + block].numpy()
            scale = np.maximum(np.abs(piece).max(), np.float32(2.0**-100)) / np.float32(448)
            piece[:] = nearest(piece / scale) * scale
    return out


ORDER_K = torch.randperm(256, generator=torch.Generator().manual_seed(2))


def fp8_weight(n: int, k: int, block: tuple[int, int]) -> Fp8Weight:
    random = torch.Generator().manual_seed(n)
    scales = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=random) + 0.1
    return Fp8Weight((100 * torch.randn(n, k, generator=random)).to(torch.float8_e4m3fn), scales, block)


@pytest.mark.parametrize(("num_inputs", "block"), [(128, 128), (70, 32), (192, 64), (5, 128)])
def test_activations_go_to_the_nearest_value(num_inputs: int, block: int) -> None:
    x_MK = torch.randn(3, num_inputs, generator=torch.Generator().manual_seed(1)) * 10.0
    x_MK[0, ::2] *= 1e-4  # far below the largest, where e4m3 has no exponents left
    x_MK[1] = 448.0 * torch.linspace(-1, 1, num_inputs)  # many ties
    x_MK[1, 0], x_MK[2, 3] = 448.0, 0.0
    assert torch.equal(rounded(x_MK, block), by_definition(x_MK, block))


class DividesAsOnGpu(TorchDispatchMode):
    """Mode that divides by a number as torch does on a GPU: by its reciprocal."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not args[1].shape:
            return args[0] * args[1].to(args[0].dtype).reciprocal()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounding", [rounded, int8_activations.rounded])
def test_a_gpu_rounds_as_a_processor(rounding: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Ties are common among bfloat16's 8 bits, and the last bit of a scale decides them."""
    x_MK = torch.randn(64, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    with DividesAsOnGpu():
        found = rounding(x_MK, 128)
    assert torch.equal(found, rounding(x_MK, 128))


def test_blocks_of_zeros_and_of_nan() -> None:
    x_MK = torch.zeros(4, 64)
    x_MK[1, 3], x_MK[2, 3], x_MK[3, 40] = float("nan"), float("-inf"), 1e-42
    found = rounded(x_MK, 32)
    assert torch.equal(found[0], x_MK[0])
    assert torch.equal(found.isnan().any(1), torch.tensor([False, True, True, False]))
    assert bool(found[1:3, :32].isnan().all()), "all outputs must be NaN"
    assert float(found[3].abs().max()) < 2.0**-100


@pytest.mark.parametrize(
    ("weight", "block"),
    [
        (random_weight(2, 256, 64), 256),
        (replace(random_weight(2, 64, 32), bits=8), 64),
        (fp8_weight(130, 200, (128, 128)), 128),
        (fp8_weight(3, 200, (8, 64)), 64),
        (fp8_weight(3, 200, (8, 24)), 200),
        (fp8_weight(3, 200, (1, 200)), 200),
    ],
)
def test_inputs_that_share_a_scale(weight: LinearWeight, block: int) -> None:
    found = as_multiplied(weight)
    assert found is not None
    assert found[1] == block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "weight",
    [
        random_weight(40, 256, 64, bias=True),
        replace(random_weight(40, 256, 64), input_order_K=ORDER_K),
        int8(torch.randn(7, 256, generator=torch.Generator().manual_seed(5)), None),
        nf4(torch.randn(7, 256, generator=torch.Generator().manual_seed(6)), None),
        fp8_weight(130, 200, (128, 24)),
        fp8_weight(130, 200, (128, 128)),
        fp8_weight(130, 200, (1, 200)),
        fp8_weight(130, 200, (130, 200)),
    ],
    ids=["int4", "reordered", "int8", "nf4", "fp8, odd blocks", "fp8, blocks", "fp8, outputs", "fp8, one scale"],
)
def test_a_linear_is_that_of_rounded_weights_and_inputs(weight: LinearWeight, dtype: torch.dtype) -> None:
    wide_NK, num_inputs = weight.dequantize(torch.float32), weight.in_features
    is_stored = isinstance(weight, Fp8Weight) and weight.block[1] != 24
    rounded_NK = wide_NK if is_stored else by_definition(wide_NK, num_inputs)
    assert torch.equal(rounded_NK, wide_NK) == is_stored
    x_MK = torch.randn(5, num_inputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    block = 128 if isinstance(weight, Fp8Weight) and weight.block[1] == 128 else num_inputs
    exact = by_definition(x_MK.float(), block).double() @ rounded_NK.double().T
    exact += 0 if weight.bias_N is None else weight.bias_N
    unrounded = prepare_linear(weight, torch.float32, CPU)(x_MK.float())
    assert float((unrounded - exact).abs().max() / exact.abs().max()) > 2e-3, "rounding would not be detected"
    for kernels in ("reference", "cpu"):
        linear = select_kernels(CPU, dtype, kernels).rounded["fp8"].prepare(weight)
        assert linear is not None
        error = float((linear(x_MK).double() - exact).abs().max() / exact.abs().max())
        assert error < (2e-6 if dtype == torch.float32 else 2**-8)


def test_what_has_no_such_form_is_served_as_before_and_counted() -> None:
    kernels = with_act_quant(reference_kernels(torch.float32, CPU), Activations.for_all_weights("fp8"), CPU)
    prepare, x_MK = kernels.prepare_linear, torch.randn(2, 64)
    assert isinstance(prepare, ActQuantLinears)
    dense, narrow = DenseWeight(torch.randn(3, 64)), random_weight(3, 64, 32)
    assert torch.equal(prepare(dense)(x_MK), x_MK @ dense.weight_NK.T)
    rounded_NK = by_definition(narrow.dequantize(torch.float32), 64)
    assert torch.allclose(prepare(narrow)(x_MK), rounded(x_MK, 64) @ rounded_NK.T, atol=1e-5)
    assert (prepare.num_rounded, prepare.num_all) == (1, 2)
    assert "fp8" in kernels.backends["linear"]


def test_a_card_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    kernels = replace(reference_kernels(torch.float32, CPU), rounded={})
    with pytest.raises(ConfigError, match=r"needs compute capability 8.9 or newer .*, and A100 has 8\.0"):
        with_act_quant(kernels, Activations.for_all_weights("fp8"), torch.device("cuda"))


def test_weights_of_zeros_and_of_16_bit() -> None:
    assert as_multiplied(DenseWeight(torch.randn(3, 8))) is None
    zeros = GroupIntWeight(torch.full((4, 256), 8, dtype=torch.uint8), torch.ones(4, 2), torch.full((4, 2), 8.0), 128)
    found = as_multiplied(zeros)
    assert found is not None
    assert np.array_equal(found[0].dequantize(torch.float32).numpy(), np.zeros((4, 256)))
