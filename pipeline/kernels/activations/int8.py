"""Linears on activations rounded to int8 (`engine.activation_dtype: int8`): the definition.

For a token's inputs x_K and the 4- or 8-bit weight of one output, independent of the number of tokens:

1. Split the inputs into blocks of 128, or of 32 or 64 if the weight's scale groups have that size. If the groups are
   not contiguous (`GroupIntWeight.input_order_K`), use the weight's order of inputs. The last block may be shorter.
2. The scale of a block is its largest magnitude / 127, in float32. Each value becomes the nearest integer of
   value * (127 / largest magnitude), ties to even. A block with a NaN or an infinity makes all outputs NaN.
3. Weights are not rounded: their integers are multiplied unchanged; their scales and zero points stay in float32.
4. y = sum over blocks of (input scale * weight scale * (sum of integer products - zero point * sum of the inputs'
   integers)) + bias, integers exactly, the rest in float32.

llama.cpp computes Q4_0 and Q4_1 the same way, in blocks of 32 (`ggml_vec_dot_q4_0_q8_0`). CPUs multiply bytes several
times faster than they widen and multiply floats. The only loss is the rounding of the inputs.
"""

import torch

from pipeline.kernels.activations.activation_blocks import block_of, in_blocks
from pipeline.weights.packed import GroupIntWeight, LinearWeight

LARGEST = 127.0


def supports_groups(group_size: int | None) -> bool:
    """Return whether int8 supports weights with one scale per `group_size` inputs, or per output if it is None."""
    return group_size is None or block_of(group_size, group_size + 1) is not None


def int8_block(weight: LinearWeight) -> int | None:
    """Return the inputs per activation block for this weight; None if int8 does not support the weight."""
    if not isinstance(weight, GroupIntWeight) or weight.in_features % 8:
        return None
    return block_of(weight.group_size, weight.in_features)


def as_multiplied(weight: LinearWeight) -> tuple[LinearWeight, int] | None:
    """Return the weight, which is not rounded, and `int8_block`; None if int8 does not support the weight."""
    block = int8_block(weight)
    return None if block is None else (weight, block)


def rounded(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """Apply step 2 of the definition: return each value's integer times its block's scale, in float32."""
    wide_MBk = in_blocks(x_MK, block)
    largest_MB1 = wide_MBk.abs().amax(-1, keepdim=True)
    # Divide tensors by tensors: if one is a number, torch multiplies by its reciprocal, which is rounded twice.
    limit_MB1 = torch.full_like(largest_MB1, LARGEST)
    integer_MBk = (wide_MBk * (limit_MB1 / largest_MB1)).round()
    scale_MB1 = torch.where(largest_MB1.isfinite(), largest_MB1 / limit_MB1, float("nan"))
    return torch.where(largest_MB1 == 0, 0.0, integer_MBk * scale_MB1).flatten(1)[:, : x_MK.shape[1]]
