"""Products of e4m3 weights and e4m3 activations on a GPU, as defined in `kernels/activations/fp8.py`.

There are two launches for any number of tokens: one rounds the tokens' inputs, unless the kernel that computes them
does (a norm or silu: `Fp8Linear`); one multiplies, and applies the scales of inputs and weights after the dot product
of each block. Within a dot product, sm_90 adds in fewer bits than float32 has (DeepSeek-V3, section 3.3.2); a block has
128 products at most, and everything after it is in float32. cuBLAS multiplies instead if it has the product, is faster
and no order of sums is required: `scaled_mm.py`.

A weight's inputs are split into parts by its shape alone, not by the number of tokens. Each part is summed by itself,
then the parts are added in order: by separate programs with few tokens, by one program with many. So the order of sums,
and every bit of a token's result, does not depend on the rest of the step. The outputs are the rows of a tile and the
tokens its columns: wgmma needs at least 64 rows, but only 8 columns.

Unlike int4 weights without fp8, few tokens have no separate path: a weight is one byte, read once per step.

Suffixes: N outputs, K inputs (padded to whole blocks with zeros), M tokens, B blocks of inputs, G groups of inputs with
a scale, P parts of the inputs.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
# It does not understand functions made by `triton.jit`.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.activations.fp8 import MIN_CAPABILITY, as_multiplied
from pipeline.kernels.linears import Linear, RoundedLinears
from pipeline.kernels.triton import elementwise
from pipeline.kernels.triton.fp8_rounding import Fp8Inputs, rounding_launch
from pipeline.kernels.triton.launch import CompileTarget, Launch, power_of_two
from pipeline.kernels.triton.linear.scaled_mm import BLOCK, ScaledMm
from pipeline.kernels.triton.linear.split_k import add_parts_launch
from pipeline.weights.packed import LinearWeight

_MAX_FUSED_BLOCK = 32768  # inputs with one scale that a norm or silu rounds: one program holds them in registers


@triton.jit
def _sum_of_part(
    weight_at,
    x_at,
    weight_scale_at,
    x_scale_at,
    mask_N,
    mask_M,
    begin,
    end,
    num_outputs,
    x_scale_stride,
    BLOCK: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
):
    """Return the sum of the blocks from `begin` to `end`."""
    total_NM = tl.zeros([mask_N.shape[0], mask_M.shape[0]], dtype=tl.float32)
    for block in range(begin, end):
        weight_NK = tl.load(weight_at + block * BLOCK, mask=mask_N[:, None], other=0.0)
        x_KM = tl.load(x_at + block * BLOCK, mask=mask_M[None, :], other=0.0)
        weight_scale_N = tl.load(weight_scale_at + block // BLOCKS_PER_SCALE * num_outputs, mask=mask_N, other=0.0)
        x_scale_M = tl.load(x_scale_at + block * x_scale_stride, mask=mask_M, other=0.0)
        total_NM += tl.dot(weight_NK, x_KM) * (weight_scale_N[:, None] * x_scale_M[None, :])
    return total_NM


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "blocks_per_part", "x_scale_stride"])
def _multiply(
    weight_ptr,
    x_ptr,
    weight_scale_ptr,
    x_scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_blocks,
    row_stride,
    blocks_per_part,
    x_scale_stride,
    BLOCK: tl.constexpr,
    BLOCKS_PER_SCALE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Multiply weights (N, K) by inputs (M, K) over PARTS parts of the inputs; out_ptr is (P / PARTS, M, N)."""
    output_N = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token_M = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    input_K = tl.arange(0, BLOCK)
    mask_N, mask_M = output_N < num_outputs, token_M < num_tokens
    weight_at = weight_ptr + output_N[:, None].to(tl.int64) * row_stride + input_K[None, :]
    x_at = x_ptr + token_M[None, :].to(tl.int64) * row_stride + input_K[:, None]
    weight_scale_at, x_scale_at = weight_scale_ptr + output_N, x_scale_ptr + token_M
    total_NM = tl.zeros([OUTPUTS, TOKENS], dtype=tl.float32)
    for part in range(PARTS):
        # Do not carry `begin` through the loop: Triton 3.6 keeps its first value (tritongpu-remove-layout-conversions).
        begin = (tl.program_id(1) * PARTS + part) * blocks_per_part
        total_NM += _sum_of_part(
            *(weight_at, x_at, weight_scale_at, x_scale_at, mask_N, mask_M),
            *(begin, tl.minimum(begin + blocks_per_part, num_blocks)),
            *(num_outputs, x_scale_stride, BLOCK, BLOCKS_PER_SCALE),
        )
    if BIASED:
        total_NM += tl.load(bias_ptr + output_N, mask=mask_N, other=0.0)[:, None]
    row_M = tl.program_id(1).to(tl.int64) * num_tokens + token_M
    out_at = out_ptr + row_M[None, :] * num_outputs + output_N[:, None]
    tl.store(out_at, total_NM.to(out_ptr.dtype.element_ty), mask=mask_N[:, None] & mask_M[None, :])


@dataclass(frozen=True)
class E4m3Weight:
    """A weight as the product reads it: one byte per weight, and a float32 scale per group.

    block: inputs that share a scale of the activations. group_size: inputs that share a scale of the weight, one or
    more blocks. per_token: all inputs of a token share a scale instead; `block` is what is multiplied at once.
    """

    value_NK: torch.Tensor  # float8_e4m3fn
    scale_GN: torch.Tensor
    block: int
    group_size: int
    num_inputs: int
    per_token: bool = False

    @property
    def num_bytes(self) -> int:
        return self.value_NK.numel() + 4 * self.scale_GN.numel()

    @classmethod
    def repack(cls, weight: LinearWeight, device: torch.device) -> "E4m3Weight | None":
        """Round on `device` as `fp8.as_multiplied` defines it; None for an unsupported weight."""
        served = as_multiplied(weight, device)
        if served is None:
            return None
        rounded, block = served
        per_token = block >= rounded.in_features
        block = BLOCK if per_token else block
        missing = -rounded.in_features % block
        value_NK = torch.nn.functional.pad(rounded.value_NK.to(device).view(torch.uint8), (0, missing))
        return cls(
            value_NK.contiguous().view(torch.float8_e4m3fn),
            rounded.scales_NG.to(device, torch.float32).t().contiguous(),
            block,
            min(rounded.block[1], rounded.in_features + missing),
            rounded.in_features,
            per_token,
        )

    @property
    def input_block(self) -> int:
        """Number of inputs of a token that share a scale."""
        return power_of_two(self.value_NK.shape[1]) if self.per_token else self.block

    def inputs_for(self, x_MK: torch.Tensor) -> Fp8Inputs:
        """Allocate memory for inputs, rounded as the product reads them."""
        return Fp8Inputs.for_tokens(x_MK, self.value_NK.shape[1], self.input_block)


@dataclass(frozen=True)
class Fp8Tile:
    """Tile of a program: outputs x tokens, warps and stages."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int


def tile_for(num_tokens: int, parts: int, block: int, target: CompileTarget) -> Fp8Tile:
    """Return the tile of a product.

    It has up to 64 tokens if a tile of 128 would not fit into registers: with several parts it holds the sums of a
    block, of a part and of all parts. 64 outputs x 128 tokens by 4 warps would allow two programs per multiprocessor,
    but reads (outputs + tokens) / (outputs * tokens) bytes per product, half as many again.
    """
    max_tokens = 128 if target.has_wgmma and parts == 1 else 64
    tokens = min(max_tokens, power_of_two(num_tokens, 16))
    outputs, num_warps = (64, 4) if tokens <= 32 else (128, 8)
    stages = (target.max_shared_bytes - 8192) // ((outputs + tokens) * block)
    return Fp8Tile(outputs, tokens, num_warps, max(2, min(4, stages)))


def parts_of(num_outputs: int, num_blocks: int, block: int, target: CompileTarget) -> int:
    """Return the number of parts of a weight's inputs: enough for two programs per multiprocessor with few tokens, but
    at least 512 inputs each. It ignores the number of tokens, because the order of sums depends on it."""
    wanted = 2 * target.num_multiprocessors // -(-num_outputs // 64)
    per_part = -(-num_blocks // max(1, min(wanted, num_blocks * block // 512)))
    return -(-num_blocks // per_part)


def fp8_launches(
    x: Fp8Inputs,
    weight: E4m3Weight,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    target: CompileTarget,
) -> list[Launch]:
    """Return the launches of out = x @ weight.T + bias: the product, and the sum of its parts if they are separate.

    bias_N is float32.
    """
    num_tokens, block = x.num_tokens, weight.block
    num_outputs, row_stride = weight.value_NK.shape
    num_blocks = row_stride // block
    parts = parts_of(num_outputs, num_blocks, block, target)
    tile = tile_for(num_tokens, parts, block, target)
    # Separate parts are written and read again, 8 bytes per token and output: only if few next to the weight.
    is_split = 1 < parts <= row_stride // (16 * num_tokens)
    product_MN = out_MN
    if is_split:
        product_MN = torch.empty(parts, num_tokens, num_outputs, dtype=torch.float32, device=out_MN.device)
    product = Launch(
        _multiply,
        (-(-num_outputs // tile.outputs), parts if is_split else 1, -(-num_tokens // tile.tokens)),
        (
            *(weight.value_NK, x.value_MK, weight.scale_GN, x.scale_BM, bias_N, product_MN),
            *(num_tokens, num_outputs, num_blocks, row_stride, -(-num_blocks // parts)),
            0 if weight.per_token else x.scale_BM.stride(0),
        ),
        {
            "BLOCK": block,
            "BLOCKS_PER_SCALE": -(-weight.group_size // block),
            "OUTPUTS": tile.outputs,
            "TOKENS": tile.tokens,
            "PARTS": 1 if is_split else parts,
            "BIASED": bias_N is not None and not is_split,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return [product, *([add_parts_launch(product_MN, bias_N, out_MN)] if is_split else [])]


class Fp8Linear:
    """Linear y = rounded x @ weight.T + bias, with the same order of sums for every number of tokens.

    cublas: allows any order of sums, and uses its products for the weights that it supports; the bias is then added to
    rounded outputs.

    `add_rms_norm` and `gate_mul` implement `InputKernels`, for outputs that only this linear reads: if its inputs are
    whole blocks, they round them in the same launch, to the same bits.
    """

    def __init__(
        self,
        weight: E4m3Weight,
        bias_N: torch.Tensor | None,
        cublas: ScaledMm | None = None,
    ) -> None:
        device = weight.value_NK.device
        self.target = CompileTarget.from_device(device)
        self.weight = weight
        self.bias_N = None if bias_N is None else bias_N.to(device, torch.float32)
        num_outputs, num_inputs = weight.value_NK.shape
        self._is_fused = num_inputs == weight.num_inputs and weight.input_block <= _MAX_FUSED_BLOCK
        fits = weight.per_token or weight.block == weight.group_size == BLOCK
        self.cublas = cublas if fits and num_outputs % 16 == 0 else None
        if self.cublas is not None:
            self.cublas.probe(weight.value_NK, weight.scale_GN)

    def __call__(self, x: torch.Tensor | Fp8Inputs) -> torch.Tensor:
        rounded = self.round(x) if isinstance(x, torch.Tensor) else x
        y_MN = self._by_cublas(rounded)
        if y_MN is not None:
            return y_MN
        weight = self.weight
        out_MN = weight.value_NK.new_empty((rounded.num_tokens, len(weight.value_NK)), dtype=rounded.dtype)
        if rounded.num_tokens:
            for launch in fp8_launches(rounded, weight, self.bias_N, out_MN, self.target):
                launch.run()
        return out_MN

    def round(self, x_MK: torch.Tensor) -> Fp8Inputs:
        """Round inputs in a separate launch."""
        rounded = self.weight.inputs_for(x_MK)
        if len(x_MK):
            rounding_launch(x_MK, rounded).run()
        return rounded

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor | Fp8Inputs, torch.Tensor]:
        if not self._is_fused:
            return elementwise.add_rms_norm(x_TH, residual_TH, weight_H, eps)
        rounded = self.weight.inputs_for(x_TH)
        if len(x_TH):
            elementwise.add_rms_norm_launch(x_TH, residual_TH, weight_H, eps, rounded).run()
        return rounded, residual_TH

    def gate_mul(self, gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor | Fp8Inputs:
        if not self._is_fused:
            return elementwise.gate_mul(gate_up_T2F, activation)
        rounded = self.weight.inputs_for(gate_up_T2F)
        if len(gate_up_T2F):
            elementwise.gate_mul_launch(gate_up_T2F, activation, rounded).run()
        return rounded

    def _by_cublas(self, x: Fp8Inputs) -> torch.Tensor | None:
        """Return the product by cuBLAS; None if Triton must compute it."""
        cublas, weight = self.cublas, self.weight
        if cublas is None or x.num_tokens < cublas.min_tokens or not cublas.supports(weight.value_NK):
            return None
        assert x.dtype == cublas.dtype
        y_MN = cublas(x.value_MK, x.scale_BM, weight.value_NK, weight.scale_GN)
        if y_MN is None:
            return None
        y_MN = y_MN[: x.num_tokens]
        return y_MN if self.bias_N is None else (y_MN + self.bias_N).to(x.dtype)


def fp8_linears(device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> dict[str, RoundedLinears]:
    """Return `Kernels.rounded`; empty on a GPU that does not multiply fp8. deterministic: do not use cuBLAS."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return {}
    per_block, per_token = (None if deterministic else ScaledMm.on(device, dtype, each) for each in (False, True))

    def prepare(weight: LinearWeight) -> Linear | None:
        packed = E4m3Weight.repack(weight, device)
        if packed is None:
            return None
        return Fp8Linear(packed, weight.bias_N, per_token if packed.per_token else per_block)

    backend = "Triton" if per_token is None else "Triton for few tokens, cuBLAS for many"
    return {"fp8": RoundedLinears(prepare, f"{backend}, fp8 inputs and weights")}
