"""The second launch of a product whose inputs are split into parts (split-K): adds the parts in a fixed order.

Suffixes: P parts, M tokens, N outputs.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import Launch


@triton.jit
def _add_parts(
    part_ptr,
    bias_ptr,
    out_ptr,
    num_elements,
    num_outputs,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Add the parts in order, then the bias, and write the output."""
    element = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = element < num_elements
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for _ in tl.static_range(PARTS):
        total += tl.load(part_ptr + element, mask=inside, other=0.0)
        part_ptr += num_elements
    if BIASED:
        total += tl.load(bias_ptr + element % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_parts_launch(part_PMN: torch.Tensor, bias_N: torch.Tensor | None, out_MN: torch.Tensor) -> Launch:
    """Return the launch that adds the parts in order, then the bias, in float32."""
    width = 512
    return Launch(
        _add_parts,
        (-(-out_MN.numel() // width),),
        (part_PMN, bias_N, out_MN, out_MN.numel(), out_MN.shape[1]),
        {"PARTS": len(part_PMN), "WIDTH": width, "BIASED": bias_N is not None},
    )
