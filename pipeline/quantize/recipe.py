"""Quantization recipes: the method and its options, and the checks that a checkpoint supports them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoints.file_checks import GGUF_TABLE
from pipeline.checkpoints.quantizer_files import quantization_options
from pipeline.errors import ConfigError, ModelError
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.config_values import model_values
from pipeline.model.load import as_stored
from pipeline.quantize import layouts

Method = Literal["awq", "gptq", "rtn", "int8", "fp8"]
WITHOUT_GROUPS = ("int8", "fp8")  # one scale per output
CALIBRATED = ("awq", "gptq")
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Recipe:
    """Quantization method and options.

    awq: int4, scaled by the magnitudes of inputs, by autoawq. gptq: int4 that preserves each layer's outputs. rtn:
    int4, to the nearest. int8, fp8: to the nearest, one scale per output, no groups. int4 has zero points.

    Raises ConfigError for another group size than GROUP_SIZES.
    """

    method: Method
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ConfigError(f"--group-size {self.group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")

    def quantization_config(self, kept: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of config.json; `kept` as in `layouts`. For awq, autoawq writes it instead."""
        if self.method in WITHOUT_GROUPS:
            return layouts.compressed_config("float" if self.method == "fp8" else "int", kept)
        return layouts.awq_config(self.group_size, kept)


def check_plain(source: Path) -> ModelConfig:
    """Return the model's fields. Raises ModelError if its weights are already quantized."""
    found = quantization_options(source, model_values(source))
    if found is not None:
        options, path = found
        raise ModelError(
            f"{source}: is already quantized ({options.get('quant_method') or 'quantization_config'} in {path.name}); "
            "use the 16- or 32-bit checkpoint that it was made from"
        )
    if (source / GGUF_TABLE).is_file():
        raise ModelError(f"{source}: is made of a GGUF file; use the safetensors checkpoint that it was made from")
    config = as_stored(read_config(source), source)
    if config.names.is_transposed or any(layer.heads or layer.v_norm for layer in config.layers):
        raise ModelError(f"{source}: models of this family cannot be quantized here yet; serve the 16-bit checkpoint")
    if config.size.experts is not None:
        raise ModelError(
            f"{source}: models with experts cannot be quantized here yet; use the 16-bit checkpoint, with "
            "`model.quantization: int4-rtn` to quantize it at load, or a checkpoint that is published quantized"
        )
    return config


def check_shapes(source: Path, config: ModelConfig, recipe: Recipe) -> None:
    """Raise ModelError if `recipe` does not support the model's sizes: inputs must be multiples of the group size, and
    outputs of the packing."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
    }
    delta = next((layer.mixer for layer in config.layers if layer.mixer is not None), None)
    if delta is not None:
        widths["linear_num_value_heads * linear_value_head_dim"] = delta.num_outputs
    if recipe.method not in WITHOUT_GROUPS:
        for name, width in widths.items():
            if width % recipe.group_size:
                fits = [f"; --group-size {size} works" for size in GROUP_SIZES if width % size == 0]
                raise ModelError(
                    f"{source}: {name} = {width} is not a multiple of --group-size {recipe.group_size}"
                    f"{''.join(fits[-1:])}"
                )
    multiple = 64 if recipe.method == "awq" else 8
    widths["num_key_value_heads * head_dim"] = config.num_kv_heads * config.head_dim
    if delta is not None:
        widths["linear_num_key_heads * linear_key_head_dim"] = delta.num_key_heads * delta.key_dim
    for name, width in widths.items():
        if width % multiple:
            raise ModelError(f"{source}: {name} = {width} is not a multiple of {multiple}, as {recipe.method} requires")
