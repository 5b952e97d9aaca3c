"""Selection of the linear for a weight on CPU, and oneDNN's packed weights in native bfloat16.

In float32, weights stored in a narrower type are read in that type (`linear_widened.py`); others are plain matrices for
BLAS. In bfloat16 on processors with AVX-512 BF16 and without AMX, `linear_bf16.py` serves all weights. Elsewhere oneDNN
packs weights once. It compiles a kernel for each number of tokens (a few milliseconds each), and that number changes
from step to step, so tokens are padded to one of a few numbers. A 4-bit weight then has two forms: int4 for few tokens,
where reading the weights dominates, and packed bfloat16 of the same values for many, where multiplying does. An fp8
weight has its bytes alone, which a step of many tokens widens (`linear_widened.py`).
"""

from dataclasses import replace
from typing import TypeGuard

import torch
import torch.nn.functional as F

from pipeline.kernels.linears import Linear
from pipeline.machine.numba import numba_unavailable_reason
from pipeline.weights.packed import Fp8Weight, GroupIntWeight, LinearWeight

INT4PACK_GROUPS = (32, 64, 128, 256)
CROSSOVER = 8
"""Maximum number of tokens of a step for which int4 and fp8 weights are multiplied directly.

By `python -m benchmarks.cpu_crossover` on a Zen 5 EPYC with AVX-512 BF16, 2026-11-22 and 2026-11-26: the forms cross
between 4 and 12 tokens for weights of 1,024 x 256 to 4,096 x 4,096, on one thread and on two. Processors with AMX were
not measured: up to 8 tokens their dense product waits for memory as well. Measuring at load could change the rounding
of a row from start to start.
"""


def supports_bf16() -> bool:
    """Return whether this processor multiplies bfloat16 natively; emulated, it is 5 to 8 times slower than float32."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=torch.bfloat16), None)
    except RuntimeError:
        return False
    return True


def padded_tokens(num_tokens: int) -> int:
    """Return the number of tokens to run a packed product for: at most an eighth more, with few distinct values."""
    step = max(1, 1 << max(0, num_tokens.bit_length() - 4))
    return -(-num_tokens // step) * step


class DenseLinear:
    """Linear y = x @ weight.T + bias; `packed` by oneDNN or a plain matrix."""

    def __init__(
        self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype, packed: bool | None = None
    ) -> None:
        self.bias_N = None if bias_N is None else bias_N.to(dtype)
        self.packed = (dtype == torch.bfloat16 and supports_bf16()) if packed is None else packed
        weight_NK = weight_NK.to(dtype).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK, None) if self.packed else weight_NK

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x_TK, self.weight, self.bias_N)
        num_tokens = x_TK.shape[0]
        padding = padded_tokens(num_tokens) - num_tokens
        x_TK = F.pad(x_TK, (0, 0, 0, padding)) if padding else x_TK
        y_TN = torch.ops.mkldnn._linear_pointwise(x_TK, self.weight, self.bias_N, "none", [], "")
        return y_TN[:num_tokens]


class Int4Linear:
    """Linear of a grouped 4-bit weight in bfloat16: int4 up to `crossover` tokens, the dense form above.

    `_weight_int4pack_mm_for_cpu` computes w = (q - 8) * scale + zero, so its zero is (8 - z) * scale.
    """

    def __init__(self, weight: GroupIntWeight) -> None:
        self.group_size = weight.group_size
        self.bias_N = None if weight.bias_N is None else weight.bias_N.to(torch.bfloat16)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.q_NK.to(torch.int32), 1)
        scales_GN = weight.scales_NG.t()
        zeros_GN = (8.0 - weight.zeros_NG.t()) * scales_GN
        self.scale_zero_GN2 = torch.stack([scales_GN, zeros_GN], dim=-1).to(torch.bfloat16).contiguous()
        in_its_order = replace(weight, input_order_K=None)  # like the int4 form
        self.dense = DenseLinear(in_its_order.dequantize(torch.bfloat16), weight.bias_N, torch.bfloat16)
        self.crossover = CROSSOVER

    def int4(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TK, self.packed, self.group_size, self.scale_zero_GN2)
        return y_TN if self.bias_N is None else y_TN + self.bias_N

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.int4(x_TK) if x_TK.shape[0] <= self.crossover else self.dense(x_TK)


class ReorderedLinear:
    """Linear whose weight has its inputs in another order; permutes the inputs of each token first."""

    def __init__(self, linear: Linear, input_order_K: torch.Tensor) -> None:
        self.linear, self.input_order_K = linear, input_order_K

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.linear(x_TK.index_select(1, self.input_order_K))


def supports_int4(weight: LinearWeight, dtype: torch.dtype) -> TypeGuard[GroupIntWeight]:
    """Return whether torch's int4 product supports this weight."""
    if not isinstance(weight, GroupIntWeight) or weight.bits != 4 or dtype != torch.bfloat16:
        return False
    return weight.out_features % 64 == 0 and weight.in_features % 32 == 0 and weight.group_size in INT4PACK_GROUPS


def prepare_linear(weight: LinearWeight, dtype: torch.dtype) -> Linear:
    """Pack one weight for CPU. The caller can drop its own copy."""
    linear: Linear | None = _compiled(weight, dtype) if numba_unavailable_reason() is None else None
    if linear is None and supports_int4(weight, dtype):
        linear = Int4Linear(weight)
    if linear is None:
        return DenseLinear(weight.dequantize(dtype), weight.bias_N, dtype)
    order_K = weight.input_order_K if isinstance(weight, GroupIntWeight) else None
    return linear if order_K is None else ReorderedLinear(linear, order_K)


def _compiled(weight: LinearWeight, dtype: torch.dtype) -> Linear | None:
    from pipeline.kernels.cpu.linear.linear_widened import Float8Linear, widened_linear

    if dtype == torch.float32:
        return widened_linear(weight)
    if isinstance(weight, Fp8Weight) and (stored := widened_linear(weight)) is not None:
        return Float8Linear(weight, stored, CROSSOVER)
    from pipeline.kernels.cpu.linear.linear_bf16 import bf16_linear, use_avx512_bf16

    return bf16_linear(weight) if dtype == torch.bfloat16 and use_avx512_bf16() else None
