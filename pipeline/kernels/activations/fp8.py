"""Linears on activations rounded to fp8 (`engine.activation_dtype: fp8`): what they compute.

Definition, for a token's inputs x_K and an output's weight, the same for every number of tokens:

1. Inputs are cut into blocks of 128; of 32 or 64 where the weight has a scale for that many. Of a weight whose groups
   are not of neighbouring inputs (`GroupIntWeight.input_order_K`), in that order. The last block may have fewer.
2. A block's scale is its largest magnitude / 448, in float32, and each of its values becomes the nearest
   float8_e4m3fn of value / scale, ties to even. A magnitude below 2^-80 counts as 2^-80. A block that holds what is
   no finite number makes all outputs NaN.
3. Weights are not rounded: q - zero of 4 bits is an integer of at most 16, which e4m3 holds exactly, as it does an fp8
   checkpoint's values. Their scales stay in float32.
4. y = sum over blocks of (scale of the inputs * scale of the weight * sum of the products within the block) + bias, all
   in float32 (within a block, as a GPU's units add up), rounded once to the type of the activations.

Rounding so coarse amplifies what other orders of sums leave: where the last bit of an input decides, its rounded value
moves by up to an eighth. Two right sets of kernels, or batches, agree on near-ties less often than without it.

After the products with fp8 of DeepSeek-V3 (2024, arXiv 2412.19437, section 3.3), whose activations are rounded so too.
The 4-bit weights make it exact on one side, so what is lost is the rounding of the inputs alone: 3 bits of fraction.

On NVIDIA GPUs from compute capability 8.9 on it is for speed: their units multiply e4m3 at twice the rate of 16 bit.
Everywhere else it costs time, and is there to see what it does to a model's outputs before renting such a card.

`engine.activation_dtype: fp8-per-token` differs in this:

1. All inputs of a token have one scale, by step 2.
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

from pipeline.kernels.activations.activation_blocks import block_of, in_blocks
from pipeline.weights.packed import DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight

LEAST_CAPABILITY = (8, 9)  # of an NVIDIA GPU that multiplies e4m3
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_MAGNITUDE = 2.0**-80  # so that what a division leaves is no subnormal number
MOST_EXACT = 16  # the integers from -16 to 16 are all in e4m3


def fp8_block(weight: LinearWeight) -> int | None:
    """Inputs of a block of activations for this weight; None where the weight has no exact form in e4m3."""
    if isinstance(weight, GroupIntWeight):
        zeros_NG = weight.zeros_NG
        fits = (zeros_NG == zeros_NG.round()) & (zeros_NG >= 0) & (zeros_NG <= MOST_EXACT)
        group = weight.group_size if weight.bits == 4 and bool(fits.all()) else None
    else:
        group = weight.block[1] if isinstance(weight, Fp8Weight) else None
    return None if group is None else block_of(group, weight.in_features)


def rounded(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """Step 2 of the definition: each value times its block's scale again, in float32."""
    wide_MBk = in_blocks(x_MK, block)
    largest_MB1 = wide_MBk.abs().amax(-1, keepdim=True)
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number, which is rounded twice and decides ties.
    scale_MB1 = largest_MB1.clamp_min(SMALLEST_MAGNITUDE) / torch.full_like(largest_MB1, LARGEST)
    scale_MB1 = torch.where(largest_MB1.isfinite(), scale_MB1, float("nan"))
    value_MBk = (wide_MBk / scale_MB1).to(torch.float8_e4m3fn)
    return (value_MBk.float() * scale_MB1).flatten(1)[:, : x_MK.shape[1]]


def per_output(weight: LinearWeight, device: torch.device | None = None) -> Fp8Weight | None:
    """The weight as `fp8-per-token` rounds it, computed on `device`, else where it is; None for one of 16 bit.

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
