"""GGUF files of tiny random models, written by the `gguf` package, each with its dense twin in safetensors.

Names of tensors are those of the package's own table (`get_tensor_name_map`), not the product's.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.model_folders import VOCAB

_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of the float16 scales in a block, for types that the package does not quantize to."""
_ARCHITECTURES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


def packed(weight: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks (..., bytes) and their values (..., K) in float32: of random blocks of `_HALVES`' types."""
    quant = GGMLQuantizationType[kind]
    if kind not in _HALVES:
        blocks = quantize(weight, quant)
        return blocks, dequantize(blocks, quant).reshape(weight.shape)
    block, size = GGML_QUANT_SIZES[quant]
    raw = rng.integers(0, 256, (weight.size // block, size), dtype=np.uint8)
    for start in _HALVES[kind]:
        scale = rng.uniform(0.4, 1.0, (len(raw), 1)) * {"Q6_K": 3e-5, "Q3_K": 3e-4, "Q2_K": 2e-3}.get(kind, 1e-4)
        raw[:, start : start + 2] = scale.astype(np.float16).view(np.uint8)
    raw[: len(raw) // 9, _HALVES[kind][0]] = 0  # also tiny scales
    raw[: len(raw) // 9, _HALVES[kind][0] + 1] = 0
    raw = raw.reshape(*weight.shape[:-1], -1)
    return raw, dequantize(raw, quant).reshape(weight.shape).astype(np.float32)


def _interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a head as llama.cpp's converter does: pairs of rotated values become neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_pair(
    plain: Path,
    file: Path,
    dense: Path,
    kind_of: Callable[[str], str],
    seed: int = 0,
    num_files: int = 1,
    split: str = "gpt-2",
) -> None:
    """Write the checkpoint in `plain` as GGUF, and in `dense` as safetensors with the values of the GGUF file.

    kind_of: the type of a matrix, by its name in GGUF. split: the rule that splits texts before byte pairs are merged.
    """
    rng, config = np.random.default_rng(seed), json.loads((plain / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    options = {"split_max_tensors": 6} if num_files > 1 else {}
    writer = GGUFWriter(file, architecture, **options)
    _write_header(writer, config, architecture)
    if architecture.startswith("gemma"):
        _write_gemma_tokenizer(writer, plain)
    else:
        _write_tokenizer(writer, plain, split)
    values = {name: value for path in plain.glob("*.safetensors") for name, value in load_file(path).items()}
    for stem, suffix, members in _stored(values):
        array = np.stack([values[member].float().numpy() for member in members])
        array = array if len(members) > 1 else array[0]
        in_gguf = names.get_name(stem)
        assert in_gguf is not None, stem
        part, is_norm = in_gguf.split(".")[-1], architecture.startswith("gemma") and in_gguf.endswith("_norm")
        num_heads = heads.get(part) if architecture == "llama" else None
        array = array if num_heads is None else _interleaved(array, num_heads)
        array = array + 1 if is_norm else array
        kind = kind_of(in_gguf) if suffix == "weight" and array.ndim > 1 and "gate_inp" not in in_gguf else "F32"
        blocks, kept = packed(np.ascontiguousarray(array, dtype=np.float32), kind, rng)
        writer.add_tensor(f"{in_gguf}.{suffix}", blocks, raw_dtype=GGMLQuantizationType[kind])
        kept = kept - 1 if is_norm else kept
        kept = torch.from_numpy(np.ascontiguousarray(kept if num_heads is None else _in_halves(kept, num_heads)))
        values |= dict(zip(members, kept.unbind() if len(members) > 1 else [kept], strict=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.copytree(plain, dense, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(values, dense / "model.safetensors", {"format": "pt"})


def _stored(values: dict[str, torch.Tensor]) -> list[tuple[str, str, list[str]]]:
    """Return the tensors of a GGUF file: name and suffix in the package's table, and those of `values` that it holds,
    several if they are of experts."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(values, key=lambda name: int((re.findall(r"experts\.(\d+)", name) or [0])[0])):
        stem, _, suffix = name.rpartition(".")
        found.setdefault((re.sub(r"experts\.\d+\.", "experts.", stem), suffix), []).append(name)
    return [(stem, suffix, members) for (stem, suffix), members in found.items()]


def _write_header(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "norm_epsilon" in config:
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_string(f"{architecture}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        factor = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        logarithm = np.log(factor) / np.log(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + logarithm)))
        for kind in ("short", "long"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            writer.add_float32(f"{architecture}.{name}", config[name])
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return the divisors of the frequencies, as llama.cpp's converter computes them."""
    frequency = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelength, original = 2 * np.pi / frequency, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / wavelength - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    is_short, is_long = wavelength < original / high, wavelength > original / low
    return np.where(is_short, 1.0, np.where(is_long, rope["factor"], between)).astype(np.float32)


def _write_tokenizer(writer: GGUFWriter, plain: Path, split: str) -> None:
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    by_id = {index: text for text, index in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts = [special.get(index, by_id.get(index, f"[unused{index}]")) for index in range(VOCAB)]
    kinds = [
        TokenType.CONTROL if index in special else TokenType.NORMAL if index in by_id else TokenType.UNUSED
        for index in range(VOCAB)
    ]
    texts[-1] = texts[254] + texts[255]
    kinds[-1] = TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{texts[254]} {texts[255]}"])  # transformers needs one
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)


def _write_gemma_tokenizer(writer: GGUFWriter, plain: Path) -> None:
    """Write one of sentencepiece: bytes, special tokens and some characters."""
    texts = ["<pad>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(254)), "<eos>"]
    kinds = [TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN, *[TokenType.BYTE] * 254, TokenType.CONTROL]
    letters = [chr(code) for code in range(ord("A"), ord("A") + VOCAB - len(texts))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts + letters)
    writer.add_token_scores([0.0] * len(texts) + [-float(index) for index in range(len(letters))])
    writer.add_token_types(kinds + [TokenType.NORMAL] * len(letters))
    for name, index in (("bos", 1), ("eos", 257), ("unk", 2), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(False)
