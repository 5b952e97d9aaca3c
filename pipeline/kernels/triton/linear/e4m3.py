"""fp8 weights and 16-bit activations on a GPU: a product that widens the weights in registers, and a pass that
dequantizes them. It runs on cards that do not multiply fp8 too, and wherever activations are not rounded.

Words are those of `minifloat.py`. Scales are float32, per output and block of 128 inputs, and are applied after the dot
product of each block.

Suffixes: N outputs, K inputs, M tokens, B blocks, W words of a block, G groups of a weight, P parts of the inputs.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import CompileTarget, Launch
from pipeline.kernels.triton.linear.int4 import BLOCK, adjacent_inputs, tile_for, words_of_codes
from pipeline.kernels.triton.linear.minifloat import e4m3_values, sum_of_blocks
from pipeline.kernels.triton.linear.split_k import add_parts_launch
from pipeline.weights.packed import Fp8Weight


@triton.jit(do_not_specialize=["num_tokens", "blocks_per_part"])
def _multiply(
    x_ptr,
    word_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    x_stride,
    blocks_per_part,
    INPUTS: tl.constexpr,
    ADJACENT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Multiply tokens by weights over one part of the inputs; out_ptr is (P, M, N), float32 if there are several
    parts."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token_M = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    mask_N, mask_M = output_N < num_outputs, token_M < num_tokens
    x_at = x_ptr + token_M[None, :].to(tl.int64) * x_stride + tl.arange(0, 128)[:, None]
    first = tl.program_id(1) * blocks_per_part
    total_NM = sum_of_blocks(
        *(x_at, word_ptr, scale_ptr, output_N, mask_N, mask_M),
        *(first, tl.minimum(first + blocks_per_part, (INPUTS + 127) // 128)),
        *(num_outputs, INPUTS, 8, ADJACENT, 128),
    )
    if BIASED:
        total_NM += tl.load(bias_ptr + output_N, mask=mask_N, other=0.0).to(tl.float32)[:, None]
    row_M = tl.program_id(1).to(tl.int64) * num_tokens + token_M
    out_at = out_ptr + row_M[None, :] * num_outputs + output_N[:, None]
    tl.store(out_at, total_NM.to(out_ptr.dtype.element_ty), mask=mask_N[:, None] & mask_M[None, :])


@triton.jit
def _dequantize(word_ptr, scale_ptr, out_ptr, num_outputs, num_inputs, ADJACENT: tl.constexpr, OUTPUTS: tl.constexpr):
    """Write one block of some outputs to (N, K): value * scale in float32, rounded once."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    block = tl.program_id(1).to(tl.int64)
    mask_N, row_N = output_N < num_outputs, block * num_outputs + output_N
    word_at = word_ptr + row_N[:, None] * 32 + tl.arange(0, 32)[None, :]
    word_NW = tl.load(word_at, mask=mask_N[:, None], other=0)
    scale_N = tl.load(scale_ptr + row_N, mask=mask_N, other=0.0)
    weight_NK = e4m3_values(word_NW, ADJACENT, tl.float16).to(tl.float32) * scale_N[:, None]
    input_K = block * 128 + tl.arange(0, 128)
    out_at = out_ptr + output_N[:, None].to(tl.int64) * num_inputs + input_K[None, :]
    mask_NK = mask_N[:, None] & (input_K < num_inputs)[None, :]
    tl.store(out_at, weight_NK.to(out_ptr.dtype.element_ty), mask=mask_NK)


@dataclass(frozen=True)
class TiledE4m3:
    """An `Fp8Weight` in the order that the kernels read. Inputs are padded to whole blocks; adjacent: the order of
    words, see `int4.py`."""

    word_BNW: torch.Tensor  # int32
    scale_BN: torch.Tensor
    num_inputs: int
    adjacent: int

    @property
    def num_outputs(self) -> int:
        return self.word_BNW.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.word_BNW, self.scale_BN))

    @classmethod
    def repack(cls, weight: Fp8Weight, device: torch.device, adjacent: int | None = None) -> "TiledE4m3":
        """Repack on `device`, which temporarily takes 5 bytes per weight. Requires `supports`. adjacent: None is the
        number that suits the device's products."""
        adjacent = adjacent or adjacent_inputs(CompileTarget.from_device(device))
        code_NK = weight.value_NK.view(torch.uint8).to(device)
        code_NK = F.pad(code_NK, (0, -weight.in_features % BLOCK))
        scale_NG = weight.scales_NG.to(device, torch.float32)
        scale_NB = scale_NG.repeat_interleave(-(-weight.block[1] // BLOCK), dim=1)[:, : code_NK.shape[1] // BLOCK]
        return cls(words_of_codes(code_NK, 8, adjacent), scale_NB.t().contiguous(), weight.in_features, adjacent)


def supports(weight: Fp8Weight) -> bool:
    """Return whether the kernels support a weight: a scale covers whole blocks of 128 inputs, and no code is NaN, which
    the bits of a code do not become."""
    code_NK = weight.value_NK.view(torch.uint8)
    fits = weight.block[1] % BLOCK == 0 or weight.block[1] >= weight.in_features
    return fits and not bool(((code_NK & 0x7F) == 0x7F).any())


def e4m3_launches(
    x_MK: torch.Tensor,
    weight: TiledE4m3,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    target: CompileTarget,
) -> list[Launch]:
    """Return the launches of out = x @ weight.T + bias: the product, and the sum of its parts if there are several.

    Rows of x may be strided. Tiles are those of `int4.py`.
    """
    num_tokens, num_blocks, num_outputs = len(x_MK), len(weight.word_BNW), weight.num_outputs
    assert x_MK.stride(1) == 1
    tile = tile_for(num_tokens, num_outputs, -(-num_blocks // 2), target)
    product_MN = out_MN
    if tile.parts > 1:
        product_MN = torch.empty(tile.parts, num_tokens, num_outputs, dtype=torch.float32, device=x_MK.device)
    product = Launch(
        _multiply,
        (-(-num_outputs // tile.outputs), tile.parts, -(-num_tokens // tile.tokens)),
        (
            *(x_MK, weight.word_BNW, weight.scale_BN, bias_N, product_MN),
            *(num_tokens, num_outputs, x_MK.stride(0), -(-num_blocks // tile.parts)),
        ),
        {
            "INPUTS": weight.num_inputs,
            "ADJACENT": weight.adjacent,
            "OUTPUTS": tile.outputs,
            "TOKENS": tile.tokens,
            "BIASED": bias_N is not None and tile.parts == 1,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product] if tile.parts == 1 else [product, add_parts_launch(product_MN, bias_N, out_MN)]


def dequantize_launch(weight: TiledE4m3, out_NK: torch.Tensor) -> Launch:
    """Return the launch that writes the weight (N, K) in out's type."""
    outputs = 64
    return Launch(
        _dequantize,
        (-(-weight.num_outputs // outputs), len(weight.word_BNW)),
        (weight.word_BNW, weight.scale_BN, out_NK, weight.num_outputs, weight.num_inputs),
        {"ADJACENT": weight.adjacent, "OUTPUTS": outputs},
    )
