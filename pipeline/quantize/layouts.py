"""Quantized linears in the formats of other engines: named tensors, and their description in config.json.

AWQ, as AutoAWQ writes it (version "gemm"), for 4 bits: `qweight` (K, N/8) int32, `qzeros` (G, N/8) int32, `scales`
(G, N) float16; value i of a word is output ORDER[i] of its eight.

compressed-tensors "pack-quantized" (vllm-project/compressed-tensors), for 8 bits: `weight_packed` (N, K/4) int32, value
i of a word is input i of that word; `weight_scale` (N, 1); `weight_shape` (2). Integers are stored unsigned, increased
by 128. "float-quantized": `weight` (N, K) float8_e4m3fn and `weight_scale` (N, 1).

4-bit integers have zero points. vLLM's Marlin kernels take them from this layout and from compressed-tensors, not from
GPTQ's; transformers 5.23 refuses the packed `weight_zero_point` of compressed-tensors.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch

from pipeline.quantize.grid import FloatLinear, IntLinear
from pipeline.weights.awq import ORDER


def awq_tensors(linear: IntLinear) -> dict[str, torch.Tensor]:
    def packed(values_NX: torch.Tensor) -> torch.Tensor:
        return pack(values_NX.T.unflatten(1, (-1, 8))[..., list(ORDER)].flatten(1), linear.bits)

    return {
        "qweight": packed(linear.q_NK),
        "qzeros": packed(linear.zeros_NG),
        "scales": linear.scales_NG.T.contiguous(),
    }


def awq_config(group_size: int, kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of an AWQ checkpoint. kept: ends or beginnings of the names of linears that stay
    as they are; the head does too."""
    return {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size, "zero_point": True,
        "modules_to_not_convert": list(kept) or None,
    }  # fmt: skip


def compressed_tensors(linear: IntLinear) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": pack(linear.q_NK, linear.bits),
        "weight_scale": linear.scales_NG.contiguous(),
        "weight_shape": torch.tensor(linear.q_NK.shape, dtype=torch.int64),
    }


def compressed_floats(linear: FloatLinear) -> dict[str, torch.Tensor]:
    return {"weight": linear.value_NK.contiguous(), "weight_scale": linear.scales_N1.contiguous()}


def compressed_config(kind: Literal["int", "float"], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config of a compressed-tensors checkpoint in 8 bits; `kept` as in `awq_config`."""
    weights = {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False,
        "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(f"re:.*{re.escape(name)}" for name in kept)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def pack(values_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned values (R, C) into int32 words (R, C bits / 32), the first value in the lowest bits."""
    per_word = 32 // bits
    shift_i = bits * torch.arange(per_word, dtype=torch.int64, device=values_RC.device)
    words = (values_RC.long().view(len(values_RC), -1, per_word) << shift_i).sum(-1)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)
