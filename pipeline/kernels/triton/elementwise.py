"""Elementwise kernels of a layer on a GPU: three launches, and two more where attention and feed-forward are
followed by norms. They implement `contract.Kernels`.

Everything is computed in float32 and rounded once, except the residual: its norm reads the rounded residual that is
stored. Norms and gated values are rounded once more, to e4m3, for linears that read them as `Fp8Inputs`. Suffixes are
those of `kernels/contract.py`. In a kernel, names that end in `_ptr` are addresses of tensors, names in capitals are
compile-time constants.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false
# It does not understand functions made by `triton.jit`.

import torch
import triton
import triton.language as tl

from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.routing import CLAMP, CLAMPED_ALPHA
from pipeline.kernels.triton.attention.fp8_cache import codes_of, scales_of
from pipeline.kernels.triton.fp8_rounding import Fp8Inputs, store_rounded
from pipeline.kernels.triton.launch import Launch, cache_arguments, power_of_two

_HEADS = 8  # heads per program of norm_rope_write
_WIDTH = 1024  # outputs per program of gate_mul
_CLAMP, _CLAMPED_ALPHA = tl.constexpr(CLAMP), tl.constexpr(CLAMPED_ALPHA)


@triton.jit(do_not_specialize=["scale_stride"])
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    value_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    scale_stride,
    width,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the norm to x if BLOCK is 0, else rounded to value_ptr and scale_ptr, with a scale per BLOCK inputs."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    x_at = x_ptr + token * x_stride + column
    residual_at = residual_ptr + token * residual_stride + column
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    total = x + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    total = total.to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, total, mask=inside)
    total = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(total * total, axis=0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    norm = (total * factor * weight).to(x_ptr.dtype.element_ty)
    if BLOCK == 0:
        tl.store(x_at, norm, mask=inside)
    else:
        norm_BK = tl.reshape(norm.to(tl.float32), (WIDTH // BLOCK, BLOCK))
        store_rounded(norm_BK, token, 0, value_ptr, scale_ptr, scale_stride, width, WIDTH // BLOCK, BLOCK)


@triton.jit
def _rms_norm(x_ptr, weight_ptr, x_stride, width, eps, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    inside = column < width
    x_at = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + column
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    norm = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    tl.store(x_at, norm.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed(low, high, norm_ptr, pair, inside, eps, HEAD_DIM: tl.constexpr):
    """Divide halves of heads (float32) by their root mean square and multiply by the weight."""
    factor = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + eps)
    weight_low = tl.load(norm_ptr + pair, mask=inside, other=0.0).to(tl.float32)
    weight_high = tl.load(norm_ptr + HEAD_DIM // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    return low * factor[:, None] * weight_low[None, :], high * factor[:, None] * weight_high[None, :]


@triton.jit
def _norm_rope_write(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    q_ptr,
    qkv_stride,
    cos_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    HALF: tl.constexpr = HEAD_DIM // 2
    inside = pair < HALF
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)

    source = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM + pair[None, :]
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside[None, :]
    raw_low = tl.load(source, mask=mask, other=0.0)
    raw_high = tl.load(source + HALF, mask=mask, other=0.0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if NORMED:
        q_low, q_high = _normed(low, high, q_norm_ptr, pair, inside, eps, HEAD_DIM)
        k_low, k_high = _normed(low, high, k_norm_ptr, pair, inside, eps, HEAD_DIM)
        low = tl.where(is_query[:, None], q_low, k_low)
        high = tl.where(is_query[:, None], q_high, k_high)
    cos = tl.load(cos_ptr + token * cos_stride + pair, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * cos_stride + pair, mask=inside, other=0.0)[None, :]
    turned_low = (low * cos - high * sin).to(q_ptr.dtype.element_ty)
    turned_high = (high * cos + low * sin).to(q_ptr.dtype.element_ty)

    q_at = q_ptr + token * NUM_HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + pair[None, :]
    query_mask = is_query[:, None] & inside[None, :]
    tl.store(q_at, turned_low, mask=query_mask)
    tl.store(q_at + HALF, turned_high, mask=query_mask)

    slot = tl.load(slot_ptr + token)
    k_head, v_head = slot * NUM_KV_HEADS + (head - NUM_HEADS), slot * NUM_KV_HEADS + (head - NUM_HEADS - NUM_KV_HEADS)
    if IS_FP8:
        kept_low = tl.where(is_value[:, None], raw_low, turned_low).to(tl.float32)
        kept_high = tl.where(is_value[:, None], raw_high, turned_high).to(tl.float32)
        scale, inverse = scales_of(kept_low, kept_high)
        key_low, key_high = codes_of(kept_low, inverse), codes_of(kept_high, inverse)
        value_low, value_high = key_low, key_high
    else:
        key_low, key_high, value_low, value_high = turned_low, turned_high, raw_low, raw_high
    if slot >= 0:
        key_mask = is_key[:, None] & inside[None, :]
        k_at = k_cache_ptr + k_head[:, None] * HEAD_DIM + pair[None, :]
        tl.store(k_at, key_low, mask=key_mask)
        tl.store(k_at + HALF, key_high, mask=key_mask)
        value_mask = is_value[:, None] & inside[None, :]
        v_at = v_cache_ptr + v_head[:, None] * HEAD_DIM + pair[None, :]
        tl.store(v_at, value_low, mask=value_mask)
        tl.store(v_at + HALF, value_high, mask=value_mask)
        if IS_FP8:
            scale_at = slot // BLOCK * BLOCK * NUM_KV_HEADS + (head - NUM_HEADS) * BLOCK + slot % BLOCK
            tl.store(k_scale_ptr + scale_at, scale, mask=is_key)
            tl.store(v_scale_ptr + scale_at - NUM_KV_HEADS * BLOCK, scale, mask=is_value)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return the activation of `gate`, multiplied as `Kernels.gate_mul` defines it; all float32.

    gelu(x) is approximated by x / (1 + exp(-2 c (x + 0.044715 x^3))), with c = sqrt(2 / pi).
    """
    if ACTIVATION == "clamped_swiglu":
        # Comparisons keep NaN, which `tl.minimum` may drop.
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
        power = gate * _CLAMPED_ALPHA
    elif ACTIVATION == "gelu_tanh":
        power = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    else:
        power = gate
    return gate / (1.0 + tl.exp(-power)) * up


@triton.jit(do_not_specialize=["scale_stride"])
def _gate_mul(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    gate_up_stride,
    scale_stride,
    width,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Write to out_ptr if BLOCK is 0, else rounded to out_ptr and scale_ptr, with a scale per BLOCK outputs."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    gate_at = gate_up_ptr + token * gate_up_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    product = gated(gate, up, ACTIVATION).to(gate_up_ptr.dtype.element_ty)
    if BLOCK == 0:
        tl.store(out_ptr + token * width + column, product, mask=inside)
    else:
        first_block = tl.program_id(1) * (WIDTH // BLOCK)
        product_BK = tl.reshape(product.to(tl.float32), (WIDTH // BLOCK, BLOCK))
        store_rounded(product_BK, token, first_block, out_ptr, scale_ptr, scale_stride, width, WIDTH // BLOCK, BLOCK)


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set `x_TH` to the norm and `residual_TH` to the sum, in place."""
    if len(x_TH):
        add_rms_norm_launch(x_TH, residual_TH, weight_H, eps).run()
    return x_TH, residual_TH


def add_rms_norm_launch(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    rounded: Fp8Inputs | None = None,
) -> Launch:
    """Return the launch. If `rounded` is given, the norm is written there instead of to x, in whole blocks."""
    num_tokens, width = x_TH.shape
    block = power_of_two(width, 16)
    out = (None, None) if rounded is None else (rounded.value_MK, rounded.scale_BM)
    strides = x_TH.stride(0), residual_TH.stride(0), 0 if rounded is None else rounded.scale_BM.stride(0)
    return Launch(
        _add_rms_norm,
        (num_tokens,),
        (x_TH, residual_TH, weight_H, *out, *strides, width, eps),
        {"WIDTH": block, "BLOCK": 0 if rounded is None else rounded.block},
        num_warps=min(16, max(1, block // 512)),
    )


def norm_rope_write(
    qkv_TMD: torch.Tensor,
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: LayerCache,
    slot_mapping_T: torch.Tensor,
) -> torch.Tensor:
    """Implement `Kernels.norm_rope_write`. The cache and the heads of a token must be contiguous.

    A token with a negative slot writes nothing to the cache.
    """
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    q_TND = qkv_TMD.new_empty(num_tokens, num_all_heads - 2 * cache.k_CBKD.shape[2], head_dim)
    if num_tokens:
        norm_rope_write_launch(qkv_TMD, cos_TD2, sin_TD2, qk_norm_D, eps, cache, slot_mapping_T, q_TND).run()
    return q_TND


def norm_rope_write_launch(
    qkv_TMD: torch.Tensor,
    cos_TD2: torch.Tensor,
    sin_TD2: torch.Tensor,
    qk_norm_D: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cache: LayerCache,
    slot_mapping_T: torch.Tensor,
    q_TND: torch.Tensor,
) -> Launch:
    num_tokens, num_all_heads, head_dim = qkv_TMD.shape
    assert qkv_TMD.stride()[1:] == (head_dim, 1)
    assert cos_TD2.stride() == sin_TD2.stride()
    q_norm_D, k_norm_D = qk_norm_D or (None, None)
    outputs = *cache_arguments(cache), slot_mapping_T, q_TND
    strides = qkv_TMD.stride(0), cos_TD2.stride(0)
    return Launch(
        _norm_rope_write,
        (num_tokens, -(-num_all_heads // _HEADS)),
        (qkv_TMD, cos_TD2, sin_TD2, q_norm_D, k_norm_D, *outputs, *strides, eps),
        {
            "NUM_HEADS": q_TND.shape[1],
            "NUM_KV_HEADS": cache.k_CBKD.shape[2],
            "HEAD_DIM": head_dim,
            "BLOCK": cache.k_CBKD.shape[1],
            "PAIRS": power_of_two(head_dim // 2),
            "HEADS": _HEADS,
            "NORMED": qk_norm_D is not None,
            "IS_FP8": cache.k_CBKD.dtype == FP8,
        },
    )


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    if len(x_TH):
        rms_norm_launch(x_TH, weight_H, eps).run()
    return x_TH


def rms_norm_launch(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> Launch:
    num_tokens, width = x_TH.shape
    assert x_TH.stride(1) == 1
    block = power_of_two(width, 16)
    arguments, warps = (x_TH, weight_H, x_TH.stride(0), width, eps), min(16, max(1, block // 512))
    return Launch(_rms_norm, (num_tokens,), arguments, {"WIDTH": block}, num_warps=warps)


def gate_mul(gate_up_T2F: torch.Tensor, activation: str) -> torch.Tensor:
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_tokens, width)
    if num_tokens:
        gate_mul_launch(gate_up_T2F, activation, out_TF).run()
    return out_TF


def gate_mul_launch(gate_up_T2F: torch.Tensor, activation: str, out: torch.Tensor | Fp8Inputs) -> Launch:
    """Return the launch. `out` is (T, F), or the rounded outputs in whole blocks."""
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    if isinstance(out, torch.Tensor):
        out_TF, scale_BM, scale_stride, block = out, None, 0, 0
    else:
        out_TF, scale_BM, scale_stride, block = out.value_MK, out.scale_BM, out.scale_BM.stride(0), out.block
    width_per_program = max(_WIDTH, block)
    return Launch(
        _gate_mul,
        (num_tokens, -(-width // width_per_program)),
        (gate_up_T2F, out_TF, scale_BM, gate_up_T2F.stride(0), scale_stride, width),
        {"WIDTH": width_per_program, "BLOCK": block, "ACTIVATION": activation},
        num_warps=max(4, width_per_program // 1024),
    )
