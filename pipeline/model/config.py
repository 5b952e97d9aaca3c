"""`ModelConfig`: fields that describe a decoder, read from config.json. Unsupported options are rejected by name."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from pipeline.checkpoints.quantizer_files import CONFIG, quantization_options
from pipeline.errors import ConfigError, ModelError
from pipeline.kernels.activations.act_quant import NOT_ROUNDED, Activations
from pipeline.kernels.cache import head_bytes
from pipeline.model.config_values import model_values
from pipeline.model.families import FAMILIES, Family, FamilyFields
from pipeline.model.layer_spec import GATED, Heads, LayerSpec, TensorNames
from pipeline.model.rope import Rope
from pipeline.model.unsupported import ON_A_SERVER, UNSUPPORTED
from pipeline.roofline.cost_model import AWQ, DENSE, DecoderSize, DeltaSize, ExpertSize, Weights
from pipeline.weights.config_fields import Fields
from pipeline.weights.formats import (
    BLOCK,
    QuantFormat,
    bytes_on_gpu,
    declares_fp8_cache,
    has_only_experts,
    has_small_blocks,
    is_int4,
    linear_forms,
    quantizes_linears,
    read_format,
)

StoredParts = list[tuple[str, int, int]]
"""Linears of a checkpoint: name, outputs, inputs."""
_Fused = tuple[tuple[str, ...], tuple[int, ...], int]  # names, outputs of each, inputs

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: `layers`, and what all layers share.

    norm_kind: RMSNorm or LayerNorm. norm_offset: added to the stored weights of norms. embedding_scale: factor of the
    input embeddings. rounds_embedding_scale: the factor is rounded to the type of the embeddings, in which the model
    was trained. logit_scale: factor of the logits. logit_softcap: bound of the logits by softcap * tanh(logit /
    softcap); 0: none. num_classes: of a sequence classification head, which replaces the one over the vocabulary.
    num_unused_layers: layers that the checkpoint has after these, to draft tokens (MTP). has_fp8_cache: the checkpoint
    declares a KV cache in fp8.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    names: TensorNames
    dtype: torch.dtype
    quantization: QuantFormat | None  # None: dense linears
    num_classes: int | None = None
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    num_unused_layers: int = 0
    has_fp8_cache: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """Ropes of the layers, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    def for_length(self, max_model_len: int) -> "ModelConfig":
        """Return the config with the rotary positions for sequences of up to `max_model_len` tokens."""
        return replace(self, layers=tuple(replace(x, rope=x.rope.for_length(max_model_len)) for x in self.layers))

    def local(self, num_ranks: int) -> "ModelConfig":
        """Return the config of each rank's share when `num_ranks` GPUs compute each layer together: heads, widths of
        feed-forwards and experts, and vocabulary (rounded up) are divided. Fewer KV heads than ranks are replicated.

        Raises ConfigError if the model cannot be divided so.
        """
        if num_ranks == 1:
            return self
        if (reason := self._undivided(num_ranks)) is not None:
            fits = [str(size) for size in range(1, 65) if size == 1 or self._undivided(size) is None]
            raise ConfigError(
                f"engine.tensor_parallel_size = {num_ranks}: {reason}. This model allows {', '.join(fits)}"
            )
        return replace(
            self,
            vocab_size=-(-self.vocab_size // num_ranks),
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
            intermediate_size=self.intermediate_size // num_ranks,
            layers=tuple(layer.local(num_ranks) for layer in self.layers),
        )

    def _undivided(self, num_ranks: int) -> str | None:
        """Return why the model cannot be divided over this number of ranks, if it cannot."""
        if any(layer.qk_norm == "full" for layer in self.layers):
            return "its norms of queries and keys go over all heads, which would be on different GPUs"
        if any(layer.mixer or layer.output_gate for layer in self.layers):
            return "layers with states (Gated DeltaNet), or with gates of attention, are not divided"
        if any(layer.experts and layer.experts.own_norms for layer in self.layers):
            return "norms of its experts' outputs need whole sums, which would be on different GPUs"
        if self.num_heads % num_ranks:
            return f"its {self.num_heads} query heads are not divisible by it"
        for count in dict.fromkeys(self.heads(layer).num_kv_heads for layer in range(self.num_layers)):
            if count % num_ranks and num_ranks % count:
                return f"its {count} KV heads can neither be divided nor replicated evenly"
        widths = {self.intermediate_size} if any(layer.experts is None for layer in self.layers) else set()
        widths |= {width for layer in self.layers if layer.experts for width in layer.experts.widths}
        odd = [width for width in sorted(widths) if width % num_ranks]
        return f"feed-forward widths of {odd[0]} are not divisible by it" if odd else None

    def heads(self, layer: int) -> Heads:
        """Return the shape of a layer's keys and values; no heads if it keeps a state instead."""
        spec = self.layers[layer]
        return Heads(0, self.head_dim) if spec.mixer else spec.heads or Heads(self.num_kv_heads, self.head_dim)

    def linears(self, layer: int) -> dict[str, StoredParts]:
        """Return the linears that the checkpoint stores for a layer, except those of its router and its experts, by the
        one they are part of here. A feed-forward of a layer with experts is the shared expert."""
        names, spec, experts = self.names, self.layers[layer], self.layers[layer].experts
        num_kv_heads, head_dim = self.heads(layer)
        q, kv = self.num_heads * head_dim, num_kv_heads * head_dim
        qkv = (*names.qkv[:2], names.qkv[1]) if spec.v_is_k else names.qkv
        gated_q = 2 * q if spec.output_gate else q
        parts = {"qkv": (qkv, (gated_q, kv, kv), self.hidden_size), "o": ((names.o,), (self.hidden_size,), q)}
        if (delta := spec.mixer) is not None:
            qkvz, ba = (delta.num_channels, delta.num_outputs), (delta.num_value_heads,) * 2
            parts = {
                "qkv": (names.delta_qkvz, qkvz, self.hidden_size),
                "ba": (names.delta_ba, ba, self.hidden_size),
                "o": ((names.delta_out,), (self.hidden_size,), delta.num_outputs),
            }
        if experts is None:
            parts |= self._feed_forward(names.gate_up, names.down, spec, self.intermediate_size)
        elif experts.shared_width:
            parts |= self._expert(names.shared, spec, experts.shared_width)
        return self._stored(layer, parts)

    def expert_linears(self, layer: int, expert: int) -> dict[str, StoredParts]:
        """Return the linears of one expert like `linears`."""
        spec = self.layers[layer]
        assert spec.experts is not None
        return self._stored(layer, self._expert(self.names.expert.format(expert), spec, spec.experts.width))

    def _expert(self, prefix: str, spec: LayerSpec, width: int) -> dict[str, _Fused]:
        gate_up = tuple(f"{prefix}{name}" for name in self.names.expert_gate_up)
        return self._feed_forward(gate_up, f"{prefix}{self.names.expert_down}", spec, width)

    def _feed_forward(self, gate_up: tuple[str, ...], down: str, spec: LayerSpec, width: int) -> dict[str, _Fused]:
        return {
            "gate_up": (gate_up, (width,) * (1 + spec.is_gated), self.hidden_size),
            "down": ((down,), (self.hidden_size,), width),
        }

    def _stored(self, layer: int, parts: dict[str, _Fused]) -> dict[str, StoredParts]:
        prefix = self.names.layer.format(layer)
        return {
            linear: [
                (f"{prefix}{name}", rows, inputs)
                for name, rows in zip(stored, outputs if len(stored) == len(outputs) else (sum(outputs),), strict=True)
            ]
            for linear, (stored, outputs, inputs) in parts.items()
        }

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes per token of a KV cache of this type: the model's, or FP8."""
        heads = [self.heads(layer) for layer in range(self.num_layers)]
        return sum(2 * num_kv_heads * head_bytes(head_dim, dtype) for num_kv_heads, head_dim in heads)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a sequence's states. dtype: of the model."""
        return sum(layer.mixer.state_bytes(dtype.itemsize) for layer in self.layers if layer.mixer is not None)

    @property
    def size(self) -> DecoderSize:
        """Sizes for the cost model (`pipeline.roofline`)."""
        windows = tuple(layer.window for layer in self.layers)
        return DecoderSize(
            self.hidden_size,
            self.intermediate_size,
            self.num_layers,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.vocab_size,
            is_gated=self.layers[0].is_gated,
            windows=windows if any(windows) else (),
            kv_heads_and_dims=tuple(self.heads(layer) for layer in range(self.num_layers))
            if any(layer.heads for layer in self.layers)
            else (),
            experts=self._expert_size(),
            delta=self._delta_size(),
            output_gate=any(layer.output_gate for layer in self.layers),
        )

    def _delta_size(self) -> DeltaSize | None:
        found = [layer.mixer for layer in self.layers if layer.mixer is not None]
        if not found:
            return None
        first, input_bytes = found[0], self.dtype.itemsize
        qkvz, ba = first.num_channels + first.num_outputs, 2 * first.num_value_heads
        return DeltaSize(len(found), qkvz, ba, first.num_outputs, first.state_bytes(input_bytes))

    def _expert_size(self) -> ExpertSize | None:
        found = [layer.experts for layer in self.layers if layer.experts is not None]
        if not found:
            return None
        first = found[0]
        return ExpertSize(len(found), first.num_experts, first.routing.top_k, first.width, first.shared_width)

    def weights_on_card(self, activations: Activations = NOT_ROUNDED) -> Weights:
        """Return the form of the linears for the cost model: 4-bit integers and fp8 stay packed, others are computed in
        16 bits; with fp8 activations for all of them, they are one byte each. Experts are as `bytes_on_gpu` says."""
        if self.quantization is None:
            return DENSE
        form = replace(AWQ if is_int4(self.quantization) else DENSE, expert_bytes=self.expert_bytes_on_gpu)
        if has_only_experts(self.quantization):
            return form
        group_size, is_fp8 = self.quantization.group_size, linear_forms(self.quantization) == {"fp8"}
        if activations.dtype == "fp8" and activations.cover(self.quantization):
            return replace(form, group_size=(group_size if is_fp8 else None) or self.hidden_size, fp8=True)
        if is_fp8 and not has_small_blocks(self.quantization, BLOCK):
            return replace(form, packed_bits=8)
        return form if form.packed_bits is None else replace(form, group_size=group_size or self.hidden_size)

    @property
    def expert_bytes_on_gpu(self) -> float:
        """Bytes of an expert's weight on a GPU (`bytes_on_gpu`)."""
        widths = {layer.experts.width for layer in self.layers if layer.experts is not None}
        return bytes_on_gpu(self.quantization, (self.hidden_size, *widths))

    def num_parameters(self) -> int:
        """Return the number of a checkpoint's parameters of linears and embeddings, without norms and biases."""
        shared = [self.heads(index) for index, layer in enumerate(self.layers) if layer.v_is_k]
        twice = self.hidden_size * sum(num_kv_heads * head_dim for num_kv_heads, head_dim in shared)
        return self.num_linear_parameters() - twice + self.num_embedding_parameters()

    def num_embedding_parameters(self) -> int:
        """Return the number of parameters of the embeddings, including the output embedding if it is not tied."""
        positions = self.max_position * self.hidden_size if self.names.position else 0
        return positions + self.size.head_parameters * (1 if self.tie_embeddings else 2)

    def parameters_text(self) -> str:
        """Describe the number of parameters, also of those that compute a token if there are experts."""
        total, size = self.num_parameters(), self.size
        text = f"{total / 1e6:,.1f} million parameters"
        if size.experts is None:
            return text
        active = total - size.expert_parameters + size.active_expert_parameters
        return f"{text}, of which a token uses {active / 1e6:,.1f} million"

    def num_linear_parameters(self) -> int:
        """Return the number of parameters of the layers' linears, as loaded: of `LayerSpec.v_is_k` twice."""
        return self.size.linear_parameters


def read_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises ModelError naming an invalid or unsupported field."""
    path = folder / CONFIG
    try:
        return _config_of(model_values(folder), path)
    except RecursionError:  # raised when formatting a value that is nested as deeply as the parser allows
        raise ModelError(f"{path}: nested too deeply for a model's config.json") from None


def class_names(values: dict[str, Any]) -> list[str] | None:
    """Return the class names of a classification head from the values of config.json; None if it has none."""
    names = values.get("id2label")
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(len(names)))):
        return None
    return [str(names[str(number)]) for number in range(len(names))] if names else None


def _family_of(fields: Fields) -> Family:
    model_type = str(fields.values.get("model_type"))
    if model_type in UNSUPPORTED:
        raise ModelError(
            f"{fields.path}: model_type = {model_type!r} is not supported: {UNSUPPORTED[model_type]}. {ON_A_SERVER}"
        )
    try:
        return FAMILIES[fields.one_of("model_type", sorted(FAMILIES))]
    except ModelError as refused:
        raise ModelError(f"{refused}. {ON_A_SERVER}") from None


def _config_of(values: dict[str, Any], path: Path) -> ModelConfig:
    family = _family_of(Fields(values, path))
    f = FamilyFields(values, path)
    dtype = f.one_of("dtype" if values.get("dtype") is not None else "torch_dtype", DTYPES, default="float32")
    quantization = quantization_options(path.parent, values)
    num_classes = None
    architectures = values.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if any(str(name).endswith("ForSequenceClassification") for name in named):
        names = class_names(values)
        num_classes = len(names) if names is not None else f.integer("num_labels", 1, 1 << 20, default=2)
    described = family.describe(f)
    described.setdefault("norm_eps", f.number("rms_norm_eps"))
    if "intermediate_size" not in described:
        described["intermediate_size"] = f.integer("intermediate_size", 1, 1 << 20)
    found = ModelConfig(
        **described,
        vocab_size=f.integer("vocab_size", 1, 1 << 24),
        hidden_size=f.hidden,
        num_heads=f.heads,
        num_kv_heads=f.kv_heads,
        head_dim=f.head_dim,
        max_position=f.max_position,
        tie_embeddings=f.flag("tie_word_embeddings"),
        names=family.names,
        dtype=DTYPES[dtype],
        quantization=read_format(*quantization) if quantization and quantizes_linears(quantization[0]) else None,
        has_fp8_cache=quantization is not None and declares_fp8_cache(quantization[0]),
        num_classes=num_classes,
    )
    if family.names.is_transposed and found.quantization is not None:
        raise f.refuse("quantization_config", "null, because quantized weights of this family are not supported")
    if any(layer.is_gated and layer.activation not in GATED for layer in found.layers):
        raise f.refuse("hidden_act", f"{' or '.join(GATED)}, for a feed-forward with a gate")
    return found
