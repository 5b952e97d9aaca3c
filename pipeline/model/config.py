"""`ModelConfig`: fields that describe a decoder, and one small function per family that fills them from config.json.

Family names occur only here and in `checkpoints/model_values.py`, which has their defaults. Decoder code branches on
fields. Unsupported architectures and options are rejected here by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints.model_values import CONFIG, model_values, quantization_options
from pipeline.errors import ModelError
from pipeline.kernels.cache import head_bytes
from pipeline.model.rope import Rope
from pipeline.roofline.cost_model import AWQ, DENSE, DecoderSize, Weights
from pipeline.weights.config_fields import Fields
from pipeline.weights.formats import QuantFormat, is_int4, read_format

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU feed-forward."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    windows: tuple[int | None, ...]  # a layer's sliding window in tokens; None: full attention
    dtype: torch.dtype
    quantization: QuantFormat | None  # None: dense linears
    num_classes: int | None = None  # of a sequence classification head, which replaces the one over the vocabulary

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes per token of a KV cache of this type: the model's, or FP8."""
        return 2 * self.num_layers * self.num_kv_heads * head_bytes(self.head_dim, dtype)

    @property
    def size(self) -> DecoderSize:
        """Sizes for the cost model (`pipeline.roofline`)."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return DecoderSize(self.hidden_size, self.intermediate_size, self.num_layers, *heads, self.vocab_size)

    def weights_on_card(self, activation_dtype: str = "auto") -> Weights:
        """Return the form of the linears for the cost model: 4-bit integers stay packed, all others are computed in 16
        bits; with fp8 activations, quantized weights are one byte each."""
        if self.quantization is None:
            return DENSE
        form, group_size = AWQ if is_int4(self.quantization) else DENSE, self.quantization.group_size
        fp8 = activation_dtype.startswith("fp8")
        if fp8 or form.int4:
            return replace(form, group_size=group_size or self.hidden_size, fp8=fp8)
        return form

    def num_parameters(self) -> int:
        """Return the number of parameters of linears and embeddings, without norms and biases."""
        return self.num_linear_parameters() + self.size.head_parameters * (1 if self.tie_embeddings else 2)

    def num_linear_parameters(self) -> int:
        """Return the number of parameters of the layers' linears."""
        return self.size.linear_parameters


def _llama(f: Fields, layers: int) -> dict[str, Any]:
    bias, mlp = f.flag("attention_bias"), f.flag("mlp_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp, "qk_norm": False, "windows": (None,) * layers}


def _mistral(f: Fields, layers: int) -> dict[str, Any]:
    window = None if f.values.get("sliding_window") is None else f.integer("sliding_window", 1, 1 << 31)
    return {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False, "windows": (window,) * layers}


def _qwen2(f: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False, "windows": _qwen_windows(f, layers)}


def _qwen3(f: Fields, layers: int) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": False, "qk_norm": True, "windows": _qwen_windows(f, layers)}


def _qwen_windows(f: Fields, layers: int) -> tuple[int | None, ...]:
    types, supported = f.values.get("layer_types"), ("sliding_attention", "full_attention")
    if types is not None and (
        not isinstance(types, list) or len(types) != layers or any(t not in supported for t in types)
    ):
        raise f.refuse("layer_types", f"{layers} entries, each of {supported}")
    first = f.integer("max_window_layers", 0, 1 << 20)
    if not f.flag("use_sliding_window") or f.values.get("sliding_window") is None:
        return (None,) * layers
    window = f.integer("sliding_window", 1, 1 << 31)
    if types is None:
        return tuple(window if layer >= first else None for layer in range(layers))
    return tuple(window if t == "sliding_attention" else None for t in types)


FAMILIES: dict[str, Callable[[Fields, int], dict[str, Any]]] = {"llama": _llama, "mistral": _mistral, "qwen2": _qwen2,
                                                                 "qwen3": _qwen3}  # fmt: skip
"""Functions that return the fields in which families differ, by model_type."""


_ON_A_SERVER = (
    "A server can run other models (docs/servers.md); in the job file: engine: {backend: {serve: [vllm, serve, MODEL]}}"
)


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


def _config_of(values: dict[str, Any], path: Path) -> ModelConfig:
    f = Fields(values, path)
    try:
        family = f.one_of("model_type", sorted(FAMILIES))
    except ModelError as refused:
        raise ModelError(f"{refused}. {_ON_A_SERVER}") from None
    f.one_of("hidden_act", ("silu", "swish"))  # two names of one function
    hidden = f.integer("hidden_size", 1, 1 << 17)
    heads = f.integer("num_attention_heads", 1, 1 << 12)
    kv_heads = f.integer("num_key_value_heads", 1, 1 << 12, default=heads)
    layers = f.integer("num_hidden_layers", 1, 1 << 12)
    if values.get("head_dim") is None and hidden % heads:
        raise f.refuse("num_attention_heads", f"a divisor of hidden_size = {hidden}, since there is no head_dim")
    head_dim = f.integer("head_dim", 2, 1 << 12, default=hidden // heads)
    if heads % kv_heads:
        raise f.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    if head_dim % 2:
        raise f.refuse("head_dim", "an even number")
    dtype = f.one_of("dtype" if values.get("dtype") is not None else "torch_dtype", DTYPES, default="float32")
    max_position = f.integer("max_position_embeddings", 1, 1 << 24)
    quantization = quantization_options(path.parent, values)
    rope = Rope.from_config(values, path, max_position)
    num_classes = None
    architectures = values.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if any(str(name).endswith("ForSequenceClassification") for name in named):
        names = class_names(values)
        num_classes = len(names) if names is not None else f.integer("num_labels", 1, 1 << 20, default=2)
    return ModelConfig(
        vocab_size=f.integer("vocab_size", 1, 1 << 24),
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size", 1, 1 << 20),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=f.number("rms_norm_eps"),
        max_position=max_position,
        rope=rope,
        tie_embeddings=f.flag("tie_word_embeddings"),
        dtype=DTYPES[dtype],
        quantization=None if quantization is None else read_format(*quantization),
        num_classes=num_classes,
        **FAMILIES[family](f, layers),
    )
