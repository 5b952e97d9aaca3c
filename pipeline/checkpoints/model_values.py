"""A model's config.json completed with its family's defaults, and its quantization options.

A missing key takes the value of the family's config class in transformers; a null stays null.
"""

from pathlib import Path
from typing import Any

from pipeline.checkpoints.file_checks import read_json
from pipeline.errors import ModelError

CONFIG = "config.json"
# The quantizers' own files, used before config.json held the options, with the quant_method that each implies.
QUANTIZER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # AutoGPTQ, AutoAWQ

_ALL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}  # fmt: skip
_LLAMA = _ALL | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048,
                 "attention_bias": False, "mlp_bias": False}  # fmt: skip
_MISTRAL = _ALL | {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
                   "max_position_embeddings": 131072, "sliding_window": 4096}  # fmt: skip
_QWEN2 = _ALL | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
                 "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
                 "max_window_layers": 28}  # fmt: skip
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False}
DEFAULTS: dict[object, dict[str, Any]] = {"llama": _LLAMA, "mistral": _MISTRAL, "qwen2": _QWEN2, "qwen3": _QWEN3}
"""model_type -> defaults of keys that a config.json may leave out, except defaults of None."""


def model_values(folder: Path) -> dict[str, Any]:
    """Return the values of `folder`/config.json, with the family's defaults for missing keys. Raises ModelError."""
    values = read_json(folder / CONFIG)
    return DEFAULTS.get(str(values.get("model_type")), {}) | values


def quantizer_file(folder: Path, values: dict[str, Any]) -> Path | None:
    """Return the quantizer's own file if config.json (`values`) has no quantization options. Raises ModelError if there
    are two such files."""
    if _in_config(values) is not None:
        return None
    found = [folder / name for name in QUANTIZER_FILES if (folder / name).is_file()]
    if len(found) > 1:
        names = " and ".join(file.name for file in found)
        raise ModelError(f"{folder}: {names} both describe the weights; keep the file of the quantizer that made them")
    return found[0] if found else None


def quantization_options(folder: Path, values: dict[str, Any]) -> tuple[dict[str, Any], Path] | None:
    """Return the quantization options and the file that holds them, or None if the weights are not quantized.

    values: of config.json, which takes precedence over the quantizer's own file. Raises ModelError.
    """
    options, path = _in_config(values), folder / CONFIG
    if options is not None and not isinstance(options, dict):
        raise ModelError(f"{path}: quantization_config = {options!r:.200}: expected an object")
    file = quantizer_file(folder, values)
    if file is not None:
        options, path = read_json(file), file
        implied = "awq" if "w_bit" in options else QUANTIZER_FILES[file.name]
        options = {"quant_method": implied} | options
    return None if options is None else (options, path)


def _in_config(values: dict[str, Any]) -> Any:
    options = values.get("quantization_config")
    return values.get("compression_config") if options is None else options  # the name in older compressed-tensors
