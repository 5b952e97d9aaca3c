"""Quantization of a plain checkpoint layer by layer, with one layer in memory.

Written layers are kept: a later run reads their weights back and continues after them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pipeline.formatting import Remaining
from pipeline.kernels.select import keep_cpu_kernels_in
from pipeline.machine.caches import cpu_kernel_folder
from pipeline.model.config import ModelConfig, StoredParts
from pipeline.model.load import DERIVED, DRAFT_HEADS, ENCODERS, LayerWeights, WeightReader, output_rows
from pipeline.quantize import layouts
from pipeline.quantize.calibration import Calibration
from pipeline.quantize.checkpoint_writer import CheckpointWriter
from pipeline.quantize.gptq import gptq
from pipeline.quantize.grid import FloatLinear, IntLinear, round_to_nearest, to_float8
from pipeline.quantize.recipe import Recipe
from pipeline.weights.awq import AwqFormat
from pipeline.weights.packed import DenseWeight
from pipeline.weights.tensor_reader import StoredLinear

KEPT = ("ba",)
"""Linears of a layer that stay as they are, by their fields of `LayerWeights`: publishers leave these in 16 bits."""


class LayerWriter:
    """Writes one safetensors file per layer, in order, then one with all other tensors, and the index."""

    def __init__(
        self, source: Path, config: ModelConfig, recipe: Recipe, output: CheckpointWriter, log: Callable[[str], None]
    ) -> None:
        self._reader, self._config = WeightReader(source, config), config
        self._recipe, self._output, self._log = recipe, output, log
        num_files = config.num_layers + 1
        self._files = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]

    @cached_property
    def kept(self) -> list[str]:
        """Names of the linears that stay as they are, for the quantization_config."""
        config, layer = self._config, self._config.names.layer
        kept = [
            name.removeprefix(layer.format(index))
            for index in range(config.num_layers)
            for field, parts in config.linears(index).items()
            for name, _, _ in parts
            if field in KEPT
        ]
        for part in (*DRAFT_HEADS, *ENCODERS):
            if any(name.startswith(part) for name in self._reader.checkpoint.home):
                kept += [part.removeprefix("model.")[:-1], part[:-1]]  # vLLM drops the prefix, transformers does not
        return [*dict.fromkeys(kept)]

    def _linears(self, index: int) -> dict[str, StoredParts]:
        """Return the linears of a layer to quantize."""
        return {field: parts for field, parts in self._config.linears(index).items() if field not in KEPT}

    def run(self, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        done = sum(self._output.has(name) for name in self._files[:-1])
        if done:
            self._log(f"{done} of {self._config.num_layers} layers were written by an earlier run")
        progress = Remaining(self._log, "layers", self._config.num_layers, first=done)
        embedding_VH = self._reader.embedding().dequantize(torch.float32)
        calibration = None
        if self._recipe.method == "gptq":
            keep_cpu_kernels_in(cpu_kernel_folder(log=self._log))
            calibration = Calibration(self._config, embedding_VH, self._reader.position_embedding(), texts, device)
        for index, weights in enumerate(self._reader.layers()):
            linears = self._layer(index, weights, calibration, device)
            if calibration is not None and index + 1 < self._config.num_layers:
                calibration.advance(index, _with(weights, linears))
            progress(index + 1)
        self._rest()
        self._index()

    def _layer(
        self, index: int, weights: LayerWeights, calibration: Calibration | None, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Quantize and write a layer, or read it back if it is written. Return the values (N, K) of its fused linears
        if calibration needs them."""
        if self._output.has(self._files[index]):
            return self._read_back(index, weights) if calibration is not None else {}
        moments = {} if calibration is None else calibration.moments(index, weights)
        prefix, parts_of = self._reader.prefix, self._linears(index)
        replaced = {f"{prefix}{name}.weight" for parts in parts_of.values() for name, _, _ in parts}
        layer = f"{prefix}{self._config.names.layer.format(index)}"
        kept = [n for n in self._reader.checkpoint.home if n.startswith(layer) and n not in replaced]
        tensors = {name: self._reader.checkpoint.read(name) for name in kept if not name.endswith(DERIVED)}
        values: dict[str, torch.Tensor] = {}
        for field, parts in parts_of.items():
            weight = getattr(weights, field)
            assert isinstance(weight, DenseWeight)
            linear = self._quantized(weight.weight_NK.to(device), moments.pop(field, None))
            order_N = output_rows(self._config, index, field)
            row_N = torch.arange(weight.out_features) if order_N is None else torch.argsort(order_N)
            for (name, _, _), of_part in zip(parts, row_N.to(device).split([rows for _, rows, _ in parts])):
                stored = self._stored(linear.rows(of_part))
                tensors |= {f"{prefix}{name}.{suffix}": tensor for suffix, tensor in stored.items()}
            if calibration is not None and isinstance(linear, IntLinear):
                values[field] = linear.dequantize().cpu()
        self._output.write(self._files[index], tensors)
        return values

    def _quantized(self, weight_NK: torch.Tensor, moments_KK: torch.Tensor | None) -> IntLinear | FloatLinear:
        recipe, dtype = self._recipe, weight_NK.dtype
        if recipe.method == "fp8":
            return to_float8(weight_NK, dtype)
        if recipe.method == "int8":
            return round_to_nearest(weight_NK, 8, weight_NK.shape[1], dtype, symmetric=True)
        if moments_KK is None:
            return round_to_nearest(weight_NK, 4, recipe.group_size, torch.float16)
        return gptq(weight_NK, moments_KK, 4, recipe.group_size, torch.float16)

    def _stored(self, linear: IntLinear | FloatLinear) -> dict[str, torch.Tensor]:
        if isinstance(linear, FloatLinear):
            return layouts.compressed_floats(linear)
        return layouts.awq_tensors(linear) if linear.bits == 4 else layouts.compressed_tensors(linear)

    def _read_back(self, index: int, weights: LayerWeights) -> dict[str, torch.Tensor]:
        options = self._recipe.quantization_config(self.kept)
        form = AwqFormat.from_config(options, self._output.partial / "config.json")
        written = _Written(self._output.partial / self._files[index])
        values = {}
        for field, parts in self._linears(index).items():
            shapes = [(rows, inputs) for _, rows, inputs in parts]
            prefixes = [f"{self._reader.prefix}{name}" for name, _, _ in parts]
            biases = [written.read(f"{p}.bias") if f"{p}.bias" in written else None for p in prefixes]
            stored = [StoredLinear(p, shape, written, bias) for p, shape, bias in zip(prefixes, shapes, biases)]
            read = [form.read_linear(linear) for linear in stored]
            values_NK = torch.cat([linear.dequantize(torch.float32) for linear in read])
            order_N = output_rows(self._config, index, field)
            values[field] = values_NK if order_N is None else values_NK[order_N]
        return values

    def _rest(self) -> None:
        """Write embeddings, the last norm and the head unchanged."""
        self._reader.final_norm()
        self._reader.position_embedding()
        self._reader.class_head()
        if self._reader.has_vocabulary_head and not self._reader.ties_head:
            self._reader.lm_head()
        self._reader.finish()
        checkpoint = self._reader.checkpoint
        head = f"{self._reader.head_name}.weight"
        has_copy = self._reader.ties_head and self._reader.embedding_name != head
        dropped = (*DERIVED, head) if has_copy else DERIVED
        layers = f"{self._reader.prefix}{self._config.names.layer.partition('{')[0]}"
        names = [n for n in checkpoint.home if not n.startswith(layers) and not n.endswith(dropped)]
        self._output.write(self._files[-1], {name: checkpoint.read(name) for name in names})

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
    """Tensors of a file that an earlier run wrote. Implements `Tensors`."""

    def __init__(self, path: Path) -> None:
        self._tensors = load_file(path)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def read_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._tensors[name].view(shape)


_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "F8_E4M3": 1}


def _with(weights: LayerWeights, values: Mapping[str, torch.Tensor]) -> LayerWeights:
    """Return the layer with these values in its linears."""
    return replace(weights, **{name: DenseWeight(w_NK, getattr(weights, name).bias_N) for name, w_NK in values.items()})
