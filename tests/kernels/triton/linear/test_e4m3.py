"""fp8 weights on a GPU with 16-bit activations: the fused product, the weight itself, and what stays in a byte."""

from dataclasses import replace

import pytest
import torch

from pipeline.kernels.triton.launch import CompileTarget
from pipeline.kernels.triton.linear.dispatch import DequantBuffer, TorchLinear, TwoPathLinear, prepare_linear
from pipeline.kernels.triton.linear.e4m3 import TiledE4m3, dequantize_launch, e4m3_launches
from pipeline.weights.packed import Fp8Weight
from tests.kernels.activations.test_fp8 import fp8_weight
from tests.kernels.triton.problems import DEVICE, DTYPES, PRODUCT

WEIGHTS = {
    "blocks": fp8_weight(130, 200, (128, 128)),
    "two blocks a scale": fp8_weight(33, 512, (128, 256)),
    "rows": fp8_weight(7, 200, (1, 200)),
    "one scale": fp8_weight(70, 384, (70, 384)),
    "several parts": replace(fp8_weight(20, 2048, (1, 2048)), bias_N=torch.randn(20)),
}


def relative_error(ours: torch.Tensor, weight: Fp8Weight, x_MK: torch.Tensor) -> float:
    exact = x_MK.double().cpu() @ weight.dequantize(torch.float32).double().T
    exact += 0 if weight.bias_N is None else weight.bias_N.to(x_MK.dtype)
    return float((ours.double().cpu() - exact).abs().max() / exact.abs().max())


@DTYPES
@pytest.mark.parametrize("adjacent", [2, 4])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_product_and_the_weight_itself(name: str, adjacent: int, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]
    tiled = TiledE4m3.repack(weight, DEVICE, adjacent)
    weight_NK = torch.empty(weight.value_NK.shape, dtype=dtype, device=DEVICE)
    dequantize_launch(tiled, weight_NK).run()
    assert torch.equal(weight_NK.cpu(), weight.dequantize(dtype))
    bias_N = None if weight.bias_N is None else weight.bias_N.to(DEVICE, dtype)
    for tokens in (1, 17):
        x_MK = torch.randn(tokens, 2 * weight.in_features).to(DEVICE, dtype)[:, weight.in_features :]
        out_MN = x_MK.new_empty(tokens, weight.out_features)
        launches = e4m3_launches(x_MK, tiled, bias_N, out_MN, CompileTarget.from_device(DEVICE))
        assert DEVICE.type == "cuda" or len(launches) == 1 + (name == "several parts")
        for launch in launches:
            launch.run()
        assert relative_error(out_MN, weight, x_MK) < PRODUCT[dtype], tokens


@pytest.mark.parametrize("with_scratch", [False, True])
def test_a_linear_keeps_a_byte_per_weight(with_scratch: bool) -> None:
    """Besides a 16-bit copy for many tokens, without a shared scratch."""
    scratch = DequantBuffer(torch.float16, DEVICE) if with_scratch else None
    weight = WEIGHTS["blocks"]
    linear = prepare_linear(weight, torch.float16, DEVICE, scratch)
    assert isinstance(linear, TwoPathLinear)
    assert linear.tiled.num_bytes == 130 * 256 + 4 * 130 * 2
    assert hasattr(linear, "kept_NK") != with_scratch
    for tokens in (0, 2, linear.crossover + 1):
        x_MK = torch.randn(tokens, weight.in_features).to(DEVICE, torch.float16)
        ours = linear(x_MK)
        assert ours.shape == (tokens, 130)
        assert tokens == 0 or relative_error(ours, weight, x_MK) < PRODUCT[torch.float16]


def test_blocks_that_are_no_whole_blocks_of_the_product_are_widened() -> None:
    weight = fp8_weight(130, 192, (128, 64))
    linear = prepare_linear(weight, torch.float32, DEVICE)
    assert isinstance(linear, TorchLinear)
    x_MK = torch.randn(2, 192, device=DEVICE)
    assert relative_error(linear(x_MK), weight, x_MK) < PRODUCT[torch.float32]
