"""Quantized linears in the formats of other engines: named tensors, and their description in config.json.

GPTQ, as AutoGPTQ and GPTQModel write it ("gptq", version 1): `qweight` (K/8, N) int32, value i of a word is input
8 row + i; `qzeros` (G, N/8) int32, packed along outputs, with the zero minus 1 (version 1's convention); `scales`
(G, N) float16; `g_idx` (K) int32.

compressed-tensors "pack-quantized" (vllm-project/compressed-tensors): `weight_packed` (N, K bits / 32) int32, value i
of a word is input i of that word; `weight_scale` (N, G); `weight_shape` (2). Integers are stored unsigned, increased by
2^(bits - 1). "float-quantized": `weight` (N, K) float8_e4m3fn and `weight_scale` (N, 1).
"""

from typing import Any, Literal, NamedTuple

import torch

from pipeline.quantize.grid import FloatLinear, IntLinear


class LinearNames(NamedTuple):
    """Names of linears. quantized: in a layer, those that together are one linear here. kept: patterns of the names of
    others, which stay as they are; the head does too."""

    quantized: list[list[str]]
    kept: list[str]


def gptq_tensors(linear: IntLinear) -> dict[str, torch.Tensor]:
    zero_GN = torch.full_like(linear.scales_NG.T, 2 ** (linear.bits - 1) - 1, dtype=torch.uint8)
    return {
        "qweight": pack(linear.q_NK, linear.bits).T.contiguous(),
        "qzeros": pack(zero_GN, linear.bits),
        "scales": linear.scales_NG.T.contiguous(),
        "g_idx": linear.group_K.clone(),  # fused linears share one tensor, which safetensors does not allow
    }


def gptq_config(bits: int, group_size: int, act_order: bool, damping: float, names: LinearNames) -> dict[str, Any]:
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": True, "desc_act": act_order,
        "damp_percent": damping, "true_sequential": False, "lm_head": False, "checkpoint_format": "gptq",
    }  # fmt: skip
    if not names.kept:
        return config
    dynamic = {f"-:{pattern}": {} for pattern in names.kept}  # read by GPTQModel; the other key by transformers
    return config | {"dynamic": dynamic, "modules_in_block_to_quantize": names.quantized}


def compressed_tensors(linear: IntLinear) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": pack(linear.q_NK, linear.bits),
        "weight_scale": linear.scales_NG.contiguous(),
        "weight_shape": torch.tensor(linear.q_NK.shape, dtype=torch.int64),
    }


def compressed_floats(linear: FloatLinear) -> dict[str, torch.Tensor]:
    return {"weight": linear.value_NK.contiguous(), "weight_scale": linear.scales_N1.contiguous()}


def compressed_config(
    kind: Literal["int", "float"], bits: int, group_size: int | None, names: LinearNames
) -> dict[str, Any]:
    """Return the quantization_config of a compressed-tensors checkpoint. group_size None: one scale per output."""
    weights = {
        "num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel" if group_size is None else "group",
        "group_size": group_size, "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:{pattern}" for pattern in names.kept)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def pack(values_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned values (R, C) into int32 words (R, C bits / 32), the first value in the lowest bits."""
    per_word = 32 // bits
    shift_i = bits * torch.arange(per_word, dtype=torch.int64, device=values_RC.device)
    words = (values_RC.long().view(len(values_RC), -1, per_word) << shift_i).sum(-1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)
