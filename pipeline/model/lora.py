"""LoRA adapters in PEFT's layout: y += B A x, with a scale, next to each linear. The base weights stay as they are.

Weights of adapters are fused as those of linears are: the parts' A are stacked, and each part's B is placed on its own
outputs. Steps without adapters compute the plain layers. Shape suffixes: T tokens, K inputs, N outputs, R ranks.
"""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from pipeline.checkpoints.adapters import ADAPTER_WEIGHTS
from pipeline.checkpoints.file_checks import checked_file
from pipeline.errors import ModelError
from pipeline.kernels.adapters import AdapterTokens, Lora, LowRankUpdate
from pipeline.kernels.contract import Kernels
from pipeline.kernels.linears import InputKernels, Linear
from pipeline.model.adapter_config import AdapterConfig, read_adapter_config
from pipeline.model.config import ModelConfig
from pipeline.model.load import PREFIXES, Checkpoint, output_rows

_PEFT = "base_model.model."
_TENSOR = re.compile(rf"{re.escape(_PEFT)}(.+)\.lora_[AB]\.weight")
# Parts of the names of unsupported tensors, and what they adapt.
_UNSUPPORTED = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding": "adapters of embeddings are not supported",
    "embed_tokens": "adapters of embeddings are not supported",
    "lm_head": "adapters of the output embedding are not supported",
    "experts": "adapters of experts are not supported",
    ".bias": "biases of an adapter are not supported",
}

LayerUpdates = dict[str, LowRankUpdate]
"""Updates of a layer, by linear of `ModelConfig.linears`."""


def read_adapter(folder: Path, config: ModelConfig) -> list[LayerUpdates]:
    """Return the updates of each layer of a model, in float32 on the host. Raises ModelError if the adapter has
    unsupported options or tensors, or belongs to a model of other shapes."""
    options = read_adapter_config(folder)
    try:
        stored = Checkpoint(folder, files=[checked_file(folder / ADAPTER_WEIGHTS)])
    except FileNotFoundError:
        raise ModelError(f"{folder}: has no {ADAPTER_WEIGHTS}") from None
    modules = _modules(stored, config)
    if not modules:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS}: has no tensors")
    layers = []
    for index in range(config.num_layers):
        updates: LayerUpdates = {}
        for linear, parts in config.linears(index).items():
            read = [_read_part(stored, options, modules.get(name), name, shape) for name, *shape in parts]
            if any(part is not None for part in read):
                updates[linear] = _fused(read, [rows for _, rows, _ in parts])
            if linear in updates and (rows_N := output_rows(config, index, linear)) is not None:
                updates[linear] = updates[linear].select_outputs(rows_N)
        layers.append(updates)
    stored.finish()
    return layers


def _modules(stored: Checkpoint, config: ModelConfig) -> dict[str, str]:
    """Return the name in PEFT of each adapted linear, by its name in `ModelConfig.linears`."""
    known = {name for index in range(config.num_layers) for ps in config.linears(index).values() for name, *_ in ps}
    found: dict[str, str] = {}
    for tensor in sorted(stored.home):
        match = _TENSOR.fullmatch(tensor)
        ends = [match[1].removeprefix(prefix) for prefix in PREFIXES if match and match[1].startswith(prefix)]
        name = next((end for end in ends if end in known), None)
        if match is None or name is None:
            reason = next((text for part, text in _UNSUPPORTED.items() if part in tensor), "")
            raise ModelError(
                f"{stored.home[tensor]}: tensor {tensor}: {reason or 'belongs to no linear of the base model'}"
            )
        found[name] = match[1]
    return found


def _read_part(
    stored: Checkpoint, options: AdapterConfig, module: str | None, name: str, shape_NK: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A (R, K) and the scaled B (N, R) of a stored linear, or None if the adapter leaves it as it is."""
    if module is None:
        if options.is_target(name):
            raise ModelError(
                f"{stored.folder / ADAPTER_WEIGHTS}: tensors of {name} are missing; target_modules contains it"
            )
        return None
    rank, (rows, inputs) = options.rank_of(module), shape_NK
    a_RK = stored.read_float(f"{_PEFT}{module}.lora_A.weight", (rank, inputs)).float()
    b_NR = stored.read_float(f"{_PEFT}{module}.lora_B.weight", (rows, rank)).float()
    return a_RK, b_NR * options.scale_of(module)


def _fused(parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None], rows: Sequence[int]) -> LowRankUpdate:
    """Stack the A of linears that read the same input, and place each B on its own outputs."""
    read = [part for part in parts if part is not None]
    b_NR = torch.zeros(sum(rows), sum(len(a_RK) for a_RK, _ in read))
    row = column = 0
    for part, num_rows in zip(parts, rows, strict=True):
        if part is not None:
            rank = len(part[0])
            b_NR[row : row + num_rows, column : column + rank] = part[1]
            column += rank
        row += num_rows
    return LowRankUpdate(torch.cat([a_RK for a_RK, _ in read]), b_NR)


class AdaptableLayer(Protocol):
    """The linears of `DecoderLayer`, and the kernels that compute their inputs."""

    kernels: Kernels
    qkv: Linear
    ba: Linear | None
    o: Linear
    gate_up: Linear | None
    down: Linear | None
    before_qkv: InputKernels
    before_gate_up: InputKernels
    before_down: InputKernels


L = TypeVar("L", bound=AdaptableLayer)


@dataclass(frozen=True)
class _LoraLinear:
    """A linear and the updates of a step's adapters."""

    base: Linear
    lora: Lora
    tokens: AdapterTokens

    def __call__(self, x_TK: Any) -> torch.Tensor:
        y_TN = self.base(x_TK)
        self.lora(y_TN, x_TK, self.tokens)
        return y_TN


class Adapters:
    """All adapters of a decoder, on its device. A step selects them by their index."""

    def __init__(self, adapters: Sequence[Sequence[LayerUpdates]], kernels: Kernels, device: torch.device) -> None:
        """adapters: as `read_adapter` returns them."""
        self.num_adapters, self.device = len(adapters), device
        self._layers = [
            {
                name: kernels.prepare_lora([updates.get(name) for updates in each])
                for name in {name for updates in each for name in updates}
            }
            for each in zip(*adapters, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(lora.num_bytes for layer in self._layers for lora in layer.values())

    def adapted(self, layers: Sequence[L], adapter_T: np.ndarray, row_R: np.ndarray) -> list[L]:
        """Return the layers for a step. adapter_T: each token's adapter; -1: none. row_R: the tokens for which the last
        layer computes more than keys and values."""
        tokens = last_tokens = AdapterTokens(adapter_T, self.num_adapters, self.device)
        if len(row_R) < len(adapter_T):
            last_tokens = AdapterTokens(adapter_T[row_R], self.num_adapters, self.device)
        return [
            _adapted(layer, loras, tokens, last_tokens if layer is layers[-1] else tokens)
            for layer, loras in zip(layers, self._layers, strict=True)
        ]


def _adapted(layer: L, loras: Mapping[str, Lora], tokens: AdapterTokens, out_tokens: AdapterTokens) -> L:
    """Return a copy of a layer with adapters. out_tokens: tokens whose queries attend."""
    adapted, kernels = copy(layer), layer.kernels
    # Adapters read inputs that are not rounded; linears that round theirs then do so themselves.
    adapted.before_qkv = adapted.before_gate_up = adapted.before_down = kernels
    if "qkv" in loras:
        adapted.qkv = _LoraLinear(layer.qkv, loras["qkv"], tokens)
    if "ba" in loras and layer.ba is not None:
        adapted.ba = _LoraLinear(layer.ba, loras["ba"], tokens)
    if "o" in loras:
        adapted.o = _LoraLinear(layer.o, loras["o"], out_tokens)
    if "gate_up" in loras and layer.gate_up is not None:
        adapted.gate_up = _LoraLinear(layer.gate_up, loras["gate_up"], out_tokens)
    if "down" in loras and layer.down is not None:
        adapted.down = _LoraLinear(layer.down, loras["down"], out_tokens)
    return adapted
