"""What to make of a plain checkpoint, by which of five methods, and whether that can be made of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoints.model_values import model_values, quantization_options
from pipeline.errors import ConfigError, ModelError
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.load import as_stored
from pipeline.quantize import layouts
from pipeline.quantize.gptq import DAMPING

Method = Literal["awq", "gptq", "rtn", "int8", "fp8"]
WITHOUT_GROUPS = ("int8", "fp8")  # a scale for each output
CALIBRATED = ("awq", "gptq")
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Recipe:
    """What to make. awq: int4 with zeros, scaled by what inputs are large, by autoawq. gptq: int4, each layer's outputs
    kept. rtn: int4, to the nearest. int8, fp8: to the nearest, a scale for each output, no groups.

    Raises ConfigError for what does not go together.
    """

    method: Method
    group_size: int = 128
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ConfigError(f"--group-size {self.group_size}: expected one of {', '.join(map(str, GROUP_SIZES))}")
        if self.act_order and self.method != "gptq":
            raise ConfigError(f"--act-order: only gptq has an order of inputs, not {self.method}")

    @property
    def bits(self) -> int:
        return 8 if self.method in WITHOUT_GROUPS else 4

    def quantization_config(self) -> dict[str, Any]:
        """What config.json says of the weights; of awq, autoawq says it."""
        if self.method == "gptq":
            return layouts.gptq_config(self.bits, self.group_size, self.act_order, DAMPING)
        group_size = None if self.method in WITHOUT_GROUPS else self.group_size
        return layouts.compressed_config("float" if self.method == "fp8" else "int", self.bits, group_size)


def check_plain(source: Path) -> ModelConfig:
    """The model's fields. Raises ModelError when its weights are quantized already."""
    found = quantization_options(source, model_values(source))
    if found is not None:
        options, path = found
        raise ModelError(
            f"{source}: is quantized already ({options.get('quant_method') or 'quantization_config'} in {path.name}); "
            "what it lost does not come back: take the checkpoint in 16 or 32 bit that it was made from"
        )
    return as_stored(read_config(source), source)


def check_shapes(source: Path, config: ModelConfig, recipe: Recipe) -> None:
    """Raises ModelError for a model that `recipe` cannot be made of: groups are of whole inputs, words of whole
    outputs, and autoawq looks at 64 outputs at a time."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_dim,
    }
    if recipe.method not in WITHOUT_GROUPS:
        for name, width in widths.items():
            if width % recipe.group_size:
                fits = [f"; --group-size {size} does" for size in GROUP_SIZES if width % size == 0]
                raise ModelError(
                    f"{source}: {name} = {width} does not divide into groups of {recipe.group_size}{''.join(fits[-1:])}"
                )
    at_once = 64 if recipe.method == "awq" else 8
    widths["num_key_value_heads * head_dim"] = config.num_kv_heads * config.head_dim
    for name, width in widths.items():
        if width % at_once:
            raise ModelError(f"{source}: {name} = {width} does not divide by {at_once}, which {recipe.method} needs")
