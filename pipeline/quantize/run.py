"""From a plain checkpoint to a quantized one in a new folder, by one of five methods."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pipeline import __version__
from pipeline.checkpoints.digest import model_digest
from pipeline.errors import ConfigError, ModelError
from pipeline.formatting import Remaining
from pipeline.model.config import ModelConfig, read_config, read_json
from pipeline.model.load import DERIVED, LayerWeights, WeightReader
from pipeline.quantize import layouts
from pipeline.quantize.folder import OutputFolder
from pipeline.quantize.gptq import DAMPING, gptq
from pipeline.quantize.grid import FloatLinear, IntLinear, round_to_nearest, to_float8
from pipeline.quantize.layers import FUSED, Calibration
from pipeline.weights.gptq import GptqFormat
from pipeline.weights.packed import DenseWeight

Method = Literal["awq", "gptq", "rtn", "int8", "fp8"]
WITHOUT_GROUPS = ("int8", "fp8")  # a scale for each output
CALIBRATED = ("awq", "gptq")
GROUP_SIZES = (32, 64, 128)

Say = Callable[[str], None]


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


def quantize(
    source: Path, out: Path, recipe: Recipe, texts: Sequence[Sequence[int]], device: torch.device, say: Say
) -> None:
    """Write the checkpoint in `source`, quantized by `recipe`, into the new folder `out`.

    texts: token ids to calibrate with, for awq and gptq. Raises ModelError for a source that is not plain or does not
    divide into groups, OutputError when something is in `out`.
    """
    values, config = read_json(source / "config.json"), check_plain(source)
    _check_shapes(source, config, recipe)
    output = OutputFolder(out, _identity(source, recipe, texts))
    if recipe.method == "awq":
        from pipeline.quantize.awq import quantize_by_autoawq

        quantization = quantize_by_autoawq(source, output.partial, recipe.group_size, texts, say)
    else:
        _Layers(source, config, recipe, output, say).run(texts, device)
        quantization = _quantization_config(recipe)
    output.finish(source, values | {"quantization_config": quantization})


def check_plain(source: Path) -> ModelConfig:
    """The model's fields. Raises ModelError when its weights are quantized already."""
    found = read_json(source / "config.json").get("quantization_config")
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise ModelError(
            f"{source}: is quantized already ({method or 'quantization_config'} in config.json); what it lost does not "
            "come back: take the checkpoint in 16 or 32 bit that it was made from"
        )
    return read_config(source)


def _check_shapes(source: Path, config: ModelConfig, recipe: Recipe) -> None:
    """Groups are of whole inputs, words of whole outputs, and autoawq looks at 64 outputs at a time."""
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


def _identity(source: Path, recipe: Recipe, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(np.array([len(ids), *ids], dtype=np.int64).tobytes())
    return {**asdict(recipe), "model": model_digest(source), "texts": digest.hexdigest(), "version": __version__}


def _quantization_config(recipe: Recipe) -> dict[str, Any]:
    if recipe.method == "gptq":
        return layouts.gptq_config(recipe.bits, recipe.group_size, recipe.act_order, DAMPING)
    group_size = None if recipe.method in WITHOUT_GROUPS else recipe.group_size
    return layouts.compressed_config("float" if recipe.method == "fp8" else "int", recipe.bits, group_size)


class _Layers:
    """One safetensors file a layer, in order, then one of all that is no layer, and the index."""

    def __init__(self, source: Path, config: ModelConfig, recipe: Recipe, output: OutputFolder, say: Say) -> None:
        self._reader, self._config = WeightReader(source, config), config
        self._recipe, self._output, self._say = recipe, output, say
        of = config.num_layers + 1
        self._files = [f"model-{i + 1:05d}-of-{of:05d}.safetensors" for i in range(of)]
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._rows = {
            "qkv": (heads, kv_heads, kv_heads),
            "o": (config.hidden_size,),
            "gate_up": (config.intermediate_size,) * 2,
            "down": (config.hidden_size,),
        }

    def run(self, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        done = sum(self._output.has(name) for name in self._files[:-1])
        if done:
            self._say(f"{done} of {self._config.num_layers} layers are there from an earlier run")
        told = Remaining(self._say, "layers", self._config.num_layers, first=done)
        embedding_VH = self._reader.embedding()
        calibration = None
        if self._recipe.method == "gptq":
            calibration = Calibration(self._config, embedding_VH, texts, device)
        for index, weights in enumerate(self._reader.layers()):
            linears = self._layer(index, weights, calibration, device)
            if calibration is not None and index + 1 < self._config.num_layers:
                calibration.advance(index, _with(weights, linears))
            told(index + 1)
        self._rest()
        self._index()

    def _layer(
        self, index: int, weights: LayerWeights, calibration: Calibration | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The values (N, K) that the layer's fused linears have now, where calibration goes on with them: read back
        where they are written, else made and written."""
        if self._output.has(self._files[index]):
            return self._read_back(index, weights) if calibration is not None else {}
        moments = {} if calibration is None else calibration.moments(index, weights)
        prefix = f"model.layers.{index}."
        replaced = {f"{prefix}{name}.weight" for names in FUSED.values() for name in names}
        kept = [n for n in self._reader.checkpoint.home if n.startswith(prefix) and n not in replaced]
        tensors = {name: self._reader.checkpoint.take(name) for name in kept if not name.endswith(DERIVED)}
        values: dict[str, torch.Tensor] = {}
        for field, names in FUSED.items():
            weight = getattr(weights, field)
            assert isinstance(weight, DenseWeight)
            linear = self._quantized(weight.weight_NK.to(device), moments.pop(field, None))
            ends = np.cumsum(self._rows[field]).tolist()
            for name, start, stop in zip(names, [0, *ends], ends):
                stored = self._stored(linear.rows(start, stop))
                tensors |= {f"{prefix}{name}.{suffix}": tensor for suffix, tensor in stored.items()}
            if calibration is not None and isinstance(linear, IntLinear):
                values[field] = linear.dequantize().cpu()
        self._output.write(self._files[index], tensors)
        return values

    def _quantized(self, weight_NK: torch.Tensor, moments_KK: torch.Tensor | None) -> IntLinear | FloatLinear:
        recipe, dtype = self._recipe, weight_NK.dtype
        if moments_KK is not None:  # float16 is the type that GPTQ's kernels take
            return gptq(weight_NK, moments_KK, recipe.bits, recipe.group_size, torch.float16, recipe.act_order)
        if recipe.method == "fp8":
            return to_float8(weight_NK, dtype)
        group_size = weight_NK.shape[1] if recipe.method in WITHOUT_GROUPS else recipe.group_size
        return round_to_nearest(weight_NK, recipe.bits, group_size, dtype)

    def _stored(self, linear: IntLinear | FloatLinear) -> dict[str, torch.Tensor]:
        if isinstance(linear, FloatLinear):
            return layouts.compressed_floats(linear)
        return layouts.gptq_tensors(linear) if self._recipe.method == "gptq" else layouts.compressed_tensors(linear)

    def _read_back(self, index: int, weights: LayerWeights) -> dict[str, torch.Tensor]:
        form = GptqFormat.from_config(_quantization_config(self._recipe), self._output.partial / "config.json")
        written = _Written(self._output.partial / self._files[index])
        values = {}
        for field, names in FUSED.items():
            shapes = [(rows, getattr(weights, field).in_features) for rows in self._rows[field]]
            prefixes = [f"model.layers.{index}.{name}" for name in names]
            biases = [written.take(f"{p}.bias") if f"{p}.bias" in written else None for p in prefixes]
            read = [form.read_linear(*each[:2], written, each[2]) for each in zip(prefixes, shapes, biases)]
            values[field] = torch.cat([linear.dequantize(torch.float32) for linear in read])
        return values

    def _rest(self) -> None:
        """Embeddings, the last norm and the head, as they are."""
        self._reader.final_norm()
        if not self._config.tie_embeddings:
            self._reader.lm_head()
        self._reader.finish()
        checkpoint = self._reader.checkpoint
        dropped = (*DERIVED, "lm_head.weight") if self._config.tie_embeddings else DERIVED
        names = [n for n in checkpoint.home if not n.startswith("model.layers.") and not n.endswith(dropped)]
        self._output.write(self._files[-1], {name: checkpoint.take(name) for name in names})

    def _index(self) -> None:
        weight_map, size = {}, 0
        for name in self._files:
            with safe_open(self._output.partial / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(key)
                    size += int(np.prod(tensor.get_shape())) * _BYTES[tensor.get_dtype()]
                    weight_map[key] = name
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (self._output.partial / "model.safetensors.index.json").write_text(text, encoding="utf-8")


class _Written:
    """The tensors of a file that this program wrote."""

    def __init__(self, path: Path) -> None:
        self._tensors = load_file(path)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def take_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensors[name].view(shape)


_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "F8_E4M3": 1}


def _with(weights: LayerWeights, values: Mapping[str, torch.Tensor]) -> LayerWeights:
    """The layer with these values in its linears."""
    return replace(weights, **{name: DenseWeight(w_NK, getattr(weights, name).bias_N) for name, w_NK in values.items()})
