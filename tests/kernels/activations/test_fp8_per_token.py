"""What linears in fp8 with one scale a token and one an output compute, against the definition in numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.kernels.activations.fp8 import per_output
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight, Fp8Weight, LinearWeight
from pipeline.weights.round_to_nearest import int8, nf4
from tests.kernels.activations.test_fp8 import by_definition, fp8_weight, int4_weight

ORDER_K = torch.randperm(256, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "weight",
    [
        int4_weight(40, 256, 64, bias=True),
        replace(int4_weight(40, 256, 64), input_order_K=ORDER_K),
        int8(torch.randn(7, 256, generator=torch.Generator().manual_seed(5)), None),
        nf4(torch.randn(7, 256, generator=torch.Generator().manual_seed(6)), None),
        fp8_weight(130, 200, (128, 128)),
    ],
    ids=["int4", "reordered", "int8", "nf4", "fp8"],
)
def test_a_linear_is_that_of_rounded_weights_and_inputs(weight: LinearWeight) -> None:
    wide_NK = weight.dequantize(torch.float32)
    rounded_NK = by_definition(wide_NK, wide_NK.shape[1])
    assert float((rounded_NK - wide_NK).abs().max()) > 0
    x_MK = torch.randn(5, weight.in_features, generator=torch.Generator().manual_seed(3))
    exact = by_definition(x_MK, x_MK.shape[1]).double() @ rounded_NK.double().T
    exact += 0 if weight.bias_N is None else weight.bias_N
    for kernels in ("reference", "cpu"):
        linear = select_kernels(torch.device("cpu"), torch.float32, kernels).rounded["fp8-per-token"].prepare(weight)
        assert linear is not None
        assert float((linear(x_MK) - exact).abs().max() / exact.abs().max()) < 2e-6


@pytest.mark.parametrize("block", [(1, 200), (130, 200)])
def test_an_fp8_checkpoint_with_a_scale_for_each_output_is_taken_as_it_is(block: tuple[int, int]) -> None:
    weight = fp8_weight(130, 200, block)
    found = per_output(weight)
    assert found is not None
    assert torch.equal(found.dequantize(torch.float32), weight.dequantize(torch.float32))
    assert found.value_NK is weight.value_NK


def test_weights_of_zeros_and_of_16_bit() -> None:
    assert per_output(DenseWeight(torch.randn(3, 8))) is None
    zeros = Fp8Weight(torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(1, 2), (4, 128))
    found = per_output(zeros)
    assert found is not None
    assert np.array_equal(found.dequantize(torch.float32).numpy(), np.zeros((4, 256)))
