"""Quantization options of a checkpoint: in config.json, or in the quantizer's own file."""

from pathlib import Path
from typing import Any

from pipeline.checkpoints.file_checks import read_json
from pipeline.errors import ModelError

CONFIG = "config.json"
# The quantizers' own files, used before config.json held the options, with the quant_method that each implies.
QUANTIZER_FILES = {
    "quantize_config.json": "gptq",  # AutoGPTQ
    "quant_config.json": "awq",  # AutoAWQ
    "hf_quant_config.json": "modelopt",  # NVIDIA's Model Optimizer
}


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
