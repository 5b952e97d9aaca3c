"""Linears on activations rounded to fp8 (`engine.activation_dtype: fp8`): the definition.

For a token's inputs x_K and the weight of one output, independent of the number of tokens:

1. Split the inputs into blocks of 128, or of 32 or 64 if the weight's scale groups have that size. If the groups are
   not contiguous (`GroupIntWeight.input_order_K`), use the weight's order of inputs. The last block may be shorter.
2. The scale of a block is its largest magnitude / 448, in float32. Each value becomes the nearest float8_e4m3fn of
   value / scale, ties to even. Magnitudes below 2^-80 count as 2^-80. A block with a NaN or an infinity makes all
   outputs NaN.
3. Weights are not rounded: q - zero of 4 bits is an integer of at most 16, which e4m3 represents exactly, like the
   values of an fp8 checkpoint. Their scales stay in float32.
4. y = sum over blocks of (input scale * weight scale * sum of the products within the block) + bias, all in float32
   (within a block, as a GPU's units add), rounded once to the activation type.

Such coarse rounding amplifies differences in the order of sums: if the last bit of an input decides, its rounded value
changes by up to an eighth. Two correct sets of kernels, or two batches, agree on near-ties less often than without it.

Based on the fp8 products of DeepSeek-V3 (2024, arXiv 2412.19437, section 3.3), which rounds activations the same way.
The 4-bit weights are exact, so the only loss is the rounding of the inputs to 3 fraction bits.

On NVIDIA GPUs from compute capability 8.9 on it is faster: they multiply e4m3 at twice the rate of 16 bits. Everywhere
else it is slower, and serves to measure the effect on a model's outputs before renting such a card.

`engine.activation_dtype: fp8-per-token` differs as follows:

1. All inputs of a token share one scale, computed as in step 2.
2. Weights are rounded too. The scale of an output is the largest magnitude of its weights / 448, in float32, and each
   weight becomes the nearest float8_e4m3fn of weight / scale, ties to even. An fp8 checkpoint with one scale per output
   is used unchanged.
3. y = token scale * output scale * sum of products + bias, in float32, rounded once to the activation type.

vLLM and LLM Compressor compute the same ("FP8 dynamic", per token and per channel). A product is scaled once instead of
once per block of 128, so it is faster than `fp8` and less exact: a 4-bit weight times its group scale keeps 3 fraction
bits, and one large input reduces the precision of all others of its token. `pipeline eval` measures the loss.
"""

from dataclasses import replace

import torch

from pipeline.kernels.activations.activation_blocks import block_of, in_blocks
from pipeline.weights.packed import DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight

MIN_CAPABILITY = (8, 9)  # of an NVIDIA GPU that multiplies e4m3
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_MAGNITUDE = 2.0**-80  # keeps quotients out of the subnormal range
MAX_EXACT = 16  # e4m3 represents the integers from -16 to 16 exactly


def fp8_block(weight: LinearWeight) -> int | None:
    """Return the inputs per activation block for this weight; None if e4m3 cannot represent the weight exactly."""
    if isinstance(weight, GroupIntWeight):
        zeros_NG = weight.zeros_NG
        fits = (zeros_NG == zeros_NG.round()) & (zeros_NG >= 0) & (zeros_NG <= MAX_EXACT)
        group = weight.group_size if weight.bits == 4 and bool(fits.all()) else None
    else:
        group = weight.block[1] if isinstance(weight, Fp8Weight) else None
    return None if group is None else block_of(group, weight.in_features)


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


def per_output(weight: LinearWeight, device: torch.device | None = None) -> Fp8Weight | None:
    """Return the weight as `fp8-per-token` rounds it, computed on `device` if given; None for 16-bit weights.

    The inputs of the result are in their natural order, whatever order the checkpoint stores.
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
