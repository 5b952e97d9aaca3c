"""All launches of a model's steps, on tensors without memory: compiling them needs no GPU."""

from dataclasses import dataclass, replace

import torch

from pipeline.kernels.attention_input import CapturedStates
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.delta_net import DeltaWeights, StateCache
from pipeline.kernels.delta_shape import DeltaNet
from pipeline.kernels.triton.attention.cascade_metadata import CascadeMetadata, CascadeShape
from pipeline.kernels.triton.attention.converted_cache import convert_launch
from pipeline.kernels.triton.attention.decode import decode_launches
from pipeline.kernels.triton.attention.decode_metadata import DecodeMetadata, max_queries_of
from pipeline.kernels.triton.attention.prefill import PrefillMetadata, prefill_launch
from pipeline.kernels.triton.attention.scatter import scatter_launch
from pipeline.kernels.triton.delta_net import delta_net_launches
from pipeline.kernels.triton.elementwise import (
    add_rms_norm_launch,
    gate_mul_launch,
    norm_rope_write_launch,
    rms_norm_launch,
)
from pipeline.kernels.triton.fp8_rounding import Fp8Inputs, rounding_launch
from pipeline.kernels.triton.launch import CompileTarget, Launch, power_of_two
from pipeline.kernels.triton.linear import e4m3
from pipeline.kernels.triton.linear.e4m3 import TiledE4m3
from pipeline.kernels.triton.linear.fixed_order import fixed_launches
from pipeline.kernels.triton.linear.fp8 import MIN_CAPABILITY, E4m3Weight, fp8_launches
from pipeline.kernels.triton.linear.int4 import (
    BLOCK,
    CHUNK,
    TiledInt4,
    adjacent_inputs,
    dequantize_launch,
    int4_launches,
)
from pipeline.kernels.triton.sampling.argmax import greedy_launches
from pipeline.kernels.triton.sampling.sample import sample_launches

_META = torch.device("meta")
_BLOCKS, _BLOCK, _TABLE = 1024, 64, 128


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that the kernels depend on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool = False
    group_size: int = 128  # of 4-bit weights


def launches_of(
    shape: ModelShape,
    dtype: torch.dtype,
    target: CompileTarget,
    window: int | None = None,
    num_tokens: int = 512,
    with_fp8_cache: bool = False,
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> dict[str, Launch]:
    """Return launches by name, for layers with this window, over a cache in `dtype` or in FP8. int4 and fp8 kernels
    have the minimal tokens, and the maximal ones of one tile. softcap, with_sinks: of attention."""

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=_META)

    x_TH, norm_H, norm_D = empty(num_tokens, shape.hidden_size), empty(shape.hidden_size), empty(shape.head_dim)
    qkv_TMD = empty(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    angle_TD2 = empty(num_tokens, shape.head_dim // 2, dtype=torch.float32)
    norms = (norm_D, norm_D) if shape.qk_norm else None
    of_cache = FP8 if with_fp8_cache else dtype
    cache = LayerCache.allocate(_BLOCKS, _BLOCK, shape.num_kv_heads, shape.head_dim, of_cache, _META)
    slot_T = empty(num_tokens, dtype=torch.int64)
    q_TND = empty(num_tokens, shape.num_heads, shape.head_dim)
    rope = norm_rope_write_launch(qkv_TMD, angle_TD2, angle_TD2, norms, 1e-5, cache, slot_T, q_TND)
    gate_up_T2F = empty(num_tokens, 2 * shape.intermediate_size)
    out_TF = empty(num_tokens, shape.intermediate_size)
    fused = {
        "add_rms_norm": add_rms_norm_launch(x_TH, x_TH, norm_H, 1e-5),
        "rms_norm": rms_norm_launch(x_TH, norm_H, 1e-5),
        "rms_norm, float32 weight": rms_norm_launch(x_TH, norm_H.float(), 1e-5),
        "norm_rope_write": rope,
        "gate_mul": gate_mul_launch(gate_up_T2F, "silu", out_TF),
        "gate_mul, gelu": gate_mul_launch(gate_up_T2F, "gelu_tanh", out_TF),
        "gate_mul, clamped": gate_mul_launch(gate_up_T2F, "clamped_swiglu", out_TF),
    }
    logits_TV, chosen_2T = empty(num_tokens, shape.vocab_size), empty(2, num_tokens, dtype=torch.int64)
    parts, whole = greedy_launches(logits_TV, chosen_2T)
    sampling_params_5T = empty(5, num_tokens, dtype=torch.float64)
    sampling = {"greedy, parts": parts, "greedy, whole": whole}
    products = (
        _int4(shape, dtype, target)
        | _e4m3(shape, dtype, target)
        | fp8_launches_of(shape, dtype, target)
        | _fixed(shape, dtype, target)
    )
    sampling["sample, parts"], sampling["sample"] = sample_launches(logits_TV, sampling_params_5T, chosen_2T)
    table_SM = empty(256, _TABLE, dtype=torch.int32)
    fused["scatter"] = scatter_launch(slot_T, table_SM, table_SM, table_SM)
    if with_fp8_cache:
        read = LayerCache.allocate(_BLOCKS, _BLOCK, shape.num_kv_heads, shape.head_dim, dtype, _META)
        fused["convert"] = convert_launch(cache, table_SM[0], read, target)
    sinks_N = empty(shape.num_heads, dtype=torch.float32) if with_sinks else None
    attention = _attention(shape, q_TND, cache, window, (0.1, softcap, sinks_N, target))
    return fused | attention | products | sampling


def delta_net_launches_of(shape: DeltaNet, dtype: torch.dtype, num_tokens: int = 512) -> dict[str, Launch]:
    """Return the launches of a Gated DeltaNet, with a token of each sequence."""
    heads, weights = shape.num_value_heads, torch.empty(shape.conv_width, shape.num_channels, device=_META)
    of_heads = (torch.empty(heads, device=_META),) * 2
    delta = DeltaWeights(shape, weights, *of_heads, torch.empty(shape.value_dim, device=_META))
    cache = StateCache.allocate(num_tokens, shape, dtype, _META)
    widths = shape.num_channels + shape.num_outputs, 2 * heads, shape.num_outputs
    qkvz_TX, ba_TX, out_TX = (torch.empty(num_tokens, width, dtype=dtype, device=_META) for width in widths)
    states = CapturedStates(torch.empty(4, num_tokens, dtype=torch.int64, device=_META), 1)
    recur, keep = delta_net_launches(qkvz_TX, ba_TX, delta, 1e-6, cache, states, out_TX)
    return {"delta_net": recur, "delta_net, inputs": keep}


def _attention(
    shape: ModelShape,
    q_TND: torch.Tensor,
    cache: LayerCache,
    window: int | None,
    options: tuple[float, float, torch.Tensor | None, CompileTarget],
) -> dict[str, Launch]:
    """Return launches; `options` are the last arguments of `decode_launches`."""
    target, found = options[-1], {}
    for num_queries in sorted({1, max_queries_of(shape.num_heads // shape.num_kv_heads, shape.head_dim)}):
        work = DecodeMetadata.allocate(
            *(256, _TABLE, _BLOCK, shape.num_heads, shape.num_kv_heads, shape.head_dim, _META, target),
            num_queries=num_queries,
            window=window,
            is_fp8=cache.k_CBKD.dtype == FP8,
        )
        sums, join = decode_launches(q_TND, cache, q_TND, work, *options)
        found |= {f"decode, {num_queries} queries": sums, f"decode, {num_queries} queries, join": join}
        if window is None:
            cascade = CascadeShape.for_steps(512, shape.num_heads, shape.num_kv_heads, shape.head_dim, target)
            numbers = [torch.empty(size, dtype=torch.int32, device=_META) for size in cascade.sizes]
            shared = replace(work, cascade=CascadeMetadata.for_steps(cascade, numbers))
            first, behind, _ = decode_launches(q_TND, cache, q_TND, shared, *options)
            found |= {"cascade": first, f"decode behind a cascade, {num_queries} queries": behind}
    numbers = (
        torch.empty(sizes, dtype=torch.int32, device=_META) for sizes in ((64, 2), (257,), (256,), (256, _TABLE))
    )
    work = PrefillMetadata(window, *numbers)
    return found | {"prefill": prefill_launch(q_TND, cache, q_TND, work, *options)}


def _int4(shape: ModelShape, dtype: torch.dtype, target: CompileTarget) -> dict[str, Launch]:
    num_outputs, num_inputs, group = shape.hidden_size, shape.intermediate_size, shape.group_size
    chunks = -(-num_inputs // CHUNK)
    tiled = TiledInt4(
        torch.empty(chunks * CHUNK // BLOCK, num_outputs, BLOCK // 8, dtype=torch.int32, device=_META),
        torch.empty(chunks, num_outputs, CHUNK // min(group, BLOCK), 2, dtype=torch.float16, device=_META),
        num_inputs,
        adjacent_inputs(target),
    )
    weight_NK = torch.empty(num_outputs, num_inputs, dtype=dtype, device=_META)
    found = {"dequantize": dequantize_launch(tiled, weight_NK)}
    if group == 32:
        minima, x_1K = replace(tiled, has_minima=True), torch.empty(1, num_inputs, dtype=dtype, device=_META)
        found |= {"dequantize, minima": dequantize_launch(minima, weight_NK)}
        out_1N = torch.empty(1, num_outputs, dtype=dtype, device=_META)
        found |= {"int4, minima": int4_launches(x_1K, minima, None, out_1N, target)[0]}
    for num_tokens in (1, 64):
        x_MK = torch.empty(num_tokens, num_inputs, dtype=dtype, device=_META)
        out_MN = torch.empty(num_tokens, num_outputs, dtype=dtype, device=_META)
        names = f"int4, {num_tokens} tokens", f"int4, {num_tokens} tokens, join"
        found |= dict(zip(names, int4_launches(x_MK, tiled, None, out_MN, target)))
    return found


def _e4m3(shape: ModelShape, dtype: torch.dtype, target: CompileTarget) -> dict[str, Launch]:
    """Return launches of an fp8 weight with 16-bit activations."""
    num_outputs, num_inputs = shape.hidden_size, shape.intermediate_size
    blocks = -(-num_inputs // BLOCK)
    tiled = TiledE4m3(
        torch.empty(blocks, num_outputs, BLOCK // 4, dtype=torch.int32, device=_META),
        torch.empty(blocks, num_outputs, dtype=torch.float32, device=_META),
        num_inputs,
        adjacent_inputs(target),
    )
    weight_NK = torch.empty(num_outputs, num_inputs, dtype=dtype, device=_META)
    found = {"e4m3, dequantize": e4m3.dequantize_launch(tiled, weight_NK)}
    for num_tokens in (1, 64):
        x_MK = torch.empty(num_tokens, num_inputs, dtype=dtype, device=_META)
        out_MN = torch.empty(num_tokens, num_outputs, dtype=dtype, device=_META)
        names = f"e4m3, {num_tokens} tokens", f"e4m3, {num_tokens} tokens, join"
        found |= dict(zip(names, e4m3.e4m3_launches(x_MK, tiled, None, out_MN, target)))
    return found


def fp8_launches_of(shape: ModelShape, dtype: torch.dtype, target: CompileTarget) -> dict[str, Launch]:
    """Return launches of a narrow linear, whose inputs are cut into parts, and of a wide one, with scales of blocks and
    of tokens; none on older cards."""
    if target.capability < MIN_CAPABILITY:
        return {}
    narrow, wide = (shape.hidden_size, shape.intermediate_size), (2 * shape.intermediate_size, shape.hidden_size)
    found = {}
    for (num_outputs, num_inputs), num_tokens, name, group_size in (
        (narrow, 1, "fp8, 1 tokens", shape.group_size),
        (narrow, 512, "fp8, 512 tokens, parts in one program", shape.group_size),
        (wide, 64, "fp8, 64 tokens", shape.group_size),
        (wide, 512, "fp8, 512 tokens", shape.group_size),
        (narrow, 1, "fp8 per token, 1 tokens", narrow[1]),
        (wide, 512, "fp8 per token, 512 tokens", wide[1]),
    ):
        weight = E4m3Weight(
            torch.empty(num_outputs, num_inputs, dtype=torch.float8_e4m3fn, device=_META),
            torch.empty(num_inputs // group_size, num_outputs, dtype=torch.float32, device=_META),
            min(group_size, BLOCK),
            group_size,
            num_inputs,
            per_token=group_size == num_inputs,
        )
        x_MK = torch.empty(num_tokens, num_inputs, dtype=dtype, device=_META)
        out_MN = torch.empty(num_tokens, num_outputs, dtype=dtype, device=_META)
        rounded = weight.inputs_for(x_MK)
        found["fp8 per token, rounding" if weight.per_token else "fp8 rounding"] = rounding_launch(x_MK, rounded)
        found |= dict(zip((name, f"{name}, join"), fp8_launches(rounded, weight, None, out_MN, target)))
    return found | _rounding_ahead(shape, dtype)


def _rounding_ahead(shape: ModelShape, dtype: torch.dtype, num_tokens: int = 512) -> dict[str, Launch]:
    """Return norms and activations that round for the next linear: blocks of inputs, or all inputs of a token."""
    found = {}
    x_TH = torch.empty(num_tokens, shape.hidden_size, dtype=dtype, device=_META)
    gate_up_T2F = torch.empty(num_tokens, 2 * shape.intermediate_size, dtype=dtype, device=_META)
    for name, is_per_token in (("fp8", False), ("fp8 per token", True)):
        to_H, to_F = (
            Fp8Inputs.for_tokens(x_TH, width, power_of_two(width) if is_per_token else min(shape.group_size, BLOCK))
            for width in (shape.hidden_size, shape.intermediate_size)
        )
        found[f"add_rms_norm, {name}"] = add_rms_norm_launch(x_TH, x_TH, x_TH[0], 1e-5, to_H)
        found[f"gate_mul, {name}"] = gate_mul_launch(gate_up_T2F, "silu", to_F)
        found[f"gate_mul, gelu, {name}"] = gate_mul_launch(gate_up_T2F, "gelu_tanh", to_F)
    return found


def _fixed(shape: ModelShape, dtype: torch.dtype, target: CompileTarget) -> dict[str, Launch]:
    """Return products of fixed tiles: with inputs in parts, as separate programs or in turn, and whole."""
    found = {}
    for name, num_inputs, num_outputs, num_tokens in (
        ("fixed product, few tokens", shape.intermediate_size, shape.hidden_size, 1),
        ("fixed product, many tokens", shape.intermediate_size, shape.hidden_size, 512),
        ("fixed product, one part", shape.hidden_size, shape.vocab_size, 512),
    ):
        weight_NK = torch.empty(num_outputs, num_inputs, dtype=dtype, device=_META)
        x_MK = torch.empty(num_tokens, num_inputs, dtype=dtype, device=_META)
        out_MN = torch.empty(num_tokens, num_outputs, dtype=dtype, device=_META)
        found[name] = fixed_launches(x_MK, weight_NK, None, out_MN, target)[0]
    return found
