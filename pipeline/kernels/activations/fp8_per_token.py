"""Linears on activations in fp8 with one scale a token (`engine.activation_dtype: fp8-per-token`): what they compute.

Definition, for a token's inputs x_K and an output's weight, the same for every number of tokens:

1. A token's inputs are rounded as step 2 of `fp8.py` rounds a block: all of them have one scale.
2. Weights are rounded too: those of an output have one scale, their largest magnitude / 448 in float32, and each
   becomes the nearest float8_e4m3fn of weight / scale, ties to even. An fp8 checkpoint with a scale for each output is
   taken as it is.
3. y = scale of the token * scale of the output * sum of products + bias, in float32, rounded once to the type of the
   activations.

vLLM and LLM Compressor compute so ("FP8 dynamic", per token and per channel). A product is scaled once instead of once
a block of 128, so it is faster than that of `fp8`, and less exact: a 4-bit weight's value times its group's scale keeps
3 bits of fraction, and one large input takes exponents from all others of its token. `pipeline eval` shows the loss.
"""

from dataclasses import replace

import torch

from pipeline.kernels.activations.fp8 import LARGEST, SMALLEST_MAGNITUDE
from pipeline.weights.packed import DenseWeight, Fp8Weight, LinearWeight


def per_output(weight: LinearWeight, device: torch.device | None = None) -> Fp8Weight | None:
    """Step 2 of the definition, computed on `device`, else where the weight is; None for a weight of 16 bit.

    Its inputs are in their own order, whatever order a checkpoint stores them in.
    """
    if isinstance(weight, DenseWeight):
        return None
    if isinstance(weight, Fp8Weight) and weight.block[1] >= weight.in_features:
        return Fp8Weight(weight.value_NK, weight.scales_NG, (1, weight.in_features), weight.bias_N)
    if device is not None:
        tensors = {name: value for name, value in vars(weight).items() if isinstance(value, torch.Tensor)}
        weight = replace(weight, **{name: tensor.to(device) for name, tensor in tensors.items()})
    wide_NK = weight.dequantize(torch.float32)
    largest_N1 = torch.linalg.vector_norm(wide_NK, float("inf"), dim=1, keepdim=True)
    scale_N1 = largest_N1.clamp_min(SMALLEST_MAGNITUDE) / torch.full_like(largest_N1, LARGEST)
    return Fp8Weight(wide_NK.div_(scale_N1).to(torch.float8_e4m3fn), scale_N1, (1, weight.in_features), weight.bias_N)
