"""Linears on activations rounded to fp8 (`engine.activation_dtype: fp8`): the definition.

For a token's inputs x_K and the weight of one output, independent of the number of tokens:

1. All inputs share one scale, except for an fp8 weight scaled by blocks of inputs: inputs are then in blocks of 128, or
   of 32 or 64 if the weight's blocks have that size. The last block may be shorter.
2. A scale is the largest magnitude / 448, in float32. Each value becomes the nearest float8_e4m3fn of value / scale,
   ties to even. Magnitudes below 2^-80 count as 2^-80. A block with a NaN or an infinity makes all outputs NaN.
3. Weights of an fp8 checkpoint are multiplied as stored. All others are rounded: the scale of an output is the largest
   magnitude of its weights / 448, in float32, and each weight becomes the nearest float8_e4m3fn of weight / scale, ties
   to even. 16-bit weights are not rounded, and their inputs neither.
4. y = sum over blocks of (input scale * weight scale * sum of products) + bias, in float32, rounded once to the
   activation type.

Such coarse rounding amplifies differences in the order of sums: if the last bit of an input decides, its rounded value
changes by up to an eighth. Two correct sets of kernels, or two batches, agree on near-ties less often than without it.

vLLM and LLM Compressor compute the same with one scale ("FP8 dynamic", per token and per channel). DeepSeek-V3 (2024,
arXiv 2412.19437, section 3.3) rounds to blocks. A 4-bit weight times its group scale keeps 3 fraction bits, and one
large input reduces the precision of all others of its token. `pipeline eval` measures the loss.

On NVIDIA GPUs from compute capability 8.9 on it is faster: they multiply e4m3 at twice the rate of 16 bits. Everywhere
else it is slower, and serves to measure the effect on a model's outputs before renting such a card.
"""

from dataclasses import replace

import torch

from pipeline.kernels.activations.activation_blocks import block_of, in_blocks
from pipeline.weights import round_to_nearest
from pipeline.weights.packed import DenseWeight, Fp8Weight, LinearWeight
from pipeline.weights.round_to_nearest import LARGEST, SMALLEST_MAGNITUDE

MIN_CAPABILITY = (8, 9)  # of an NVIDIA GPU that multiplies e4m3


def rounded(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """Apply step 2 of the definition: return each rounded value times its block's scale, in float32."""
    wide_MBk = in_blocks(x_MK, block)
    largest_MB1 = wide_MBk.abs().amax(-1, keepdim=True)
    # Divide by a tensor: on a GPU, torch turns division by a number into multiplication by its rounded reciprocal,
    # which changes ties.
    scale_MB1 = largest_MB1.clamp_min(SMALLEST_MAGNITUDE) / torch.full_like(largest_MB1, LARGEST)
    scale_MB1 = torch.where(largest_MB1.isfinite(), scale_MB1, float("nan"))
    value_MBk = (wide_MBk / scale_MB1).to(torch.float8_e4m3fn)
    return (value_MBk.float() * scale_MB1).flatten(1)[:, : x_MK.shape[1]]


def as_multiplied(weight: LinearWeight, device: torch.device | None = None) -> tuple[Fp8Weight, int] | None:
    """Apply step 3 of the definition, on `device` if given. Return the weight, and the inputs of a token that share a
    scale; None for 16-bit weights.

    The inputs of the result are in their natural order, whatever order the checkpoint stores.
    """
    if isinstance(weight, DenseWeight):
        return None
    num_inputs = weight.in_features
    if isinstance(weight, Fp8Weight):
        if weight.block[1] >= num_inputs:
            return Fp8Weight(weight.value_NK, weight.scales_NG, (1, num_inputs), weight.bias_N), num_inputs
        if (block := block_of(weight.block[1], num_inputs)) is not None:
            return weight, block
    if device is not None:
        tensors = {name: value for name, value in vars(weight).items() if isinstance(value, torch.Tensor)}
        weight = replace(weight, **{name: tensor.to(device) for name, tensor in tensors.items()})
    return round_to_nearest.fp8(weight.dequantize(torch.float32), weight.bias_N), num_inputs
