"""What linears on activations rounded to int8 compute (`engine.activation_dtype: int8`).

Definition, for a token's inputs x_K and an output's weight of 4 or 8 bits, the same for every number of tokens:

1. Inputs are cut into blocks of 128; of 32 or 64 where the weight has a scale for that many. Of a weight whose groups
   are not of neighbouring inputs (`GroupIntWeight.input_order_K`), in that order. The last block may have fewer.
2. A block's scale is its largest magnitude / 127, in float32, and each of its values becomes the nearest integer of
   value * (127 / largest magnitude), ties to even. A block that holds what is no finite number makes all outputs NaN.
3. Weights are not rounded: their integers are multiplied as they are, their scales and zero points stay in
   float32.
4. y = sum over blocks of (scale of the inputs * scale of the weight * (sum of integer products - zero point * sum of
   the inputs' integers)) + bias, integers exactly, the rest in float32.

llama.cpp computes its Q4_0 and Q4_1 so, in blocks of 32 (its `ggml_vec_dot_q4_0_q8_0`). A processor multiplies bytes
several times as fast as it widens and multiplies floats; what is lost is the rounding of the inputs alone.
"""

import torch

from pipeline.kernels.activations.activation_blocks import block_of, in_blocks
from pipeline.weights.packed import GroupIntWeight, LinearWeight

LARGEST = 127.0


def int8_block(weight: LinearWeight) -> int | None:
    """Inputs of a block of activations for this weight; None where it is not served."""
    if not isinstance(weight, GroupIntWeight) or weight.in_features % 8:
        return None
    return block_of(weight.group_size, weight.in_features)


def rounded(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    """Step 2 of the definition: each value's integer times its block's scale, in float32."""
    wide_MBk = in_blocks(x_MK, block)
    largest_MB1 = wide_MBk.abs().amax(-1, keepdim=True)
    # Tensors by tensors: where one of the two is a number, torch multiplies by a reciprocal, which is rounded twice.
    limit_MB1 = torch.full_like(largest_MB1, LARGEST)
    integer_MBk = (wide_MBk * (limit_MB1 / largest_MB1)).round()
    scale_MB1 = torch.where(largest_MB1.isfinite(), largest_MB1 / limit_MB1, float("nan"))
    return torch.where(largest_MB1 == 0, 0.0, integer_MBk * scale_MB1).flatten(1)[:, : x_MK.shape[1]]
