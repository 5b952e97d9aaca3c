"""The supported families: for each `model_type` one function that describes its layers, its defaults and its names.

Family names occur only here, in `unsupported.py` and in `config_values.py`. Everything else branches on the fields of
`LayerSpec` and `ModelConfig`. Imports no torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, get_args

from pipeline.kernels.delta_shape import MAX_LAG, NUM_INPUTS, DeltaNet
from pipeline.kernels.routing import CLAMP, CLAMPED_ALPHA, Routing
from pipeline.model.layer_spec import Activation, ExpertSpec, Heads, LayerSpec, TensorNames
from pipeline.model.rope import NO_ROPE, Rope
from pipeline.model.unsupported import ON_A_SERVER
from pipeline.weights.config_fields import Fields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ACTIVATIONS: dict[str, Activation] = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


class FamilyFields(Fields):
    """Values of a config.json with the fields that all families share."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        super().__init__(values, path)
        self.hidden = self.integer("hidden_size", 1, 1 << 17)
        self.heads = self.integer("num_attention_heads", 1, 1 << 12)
        self.kv_heads = self.integer("num_key_value_heads", 1, 1 << 12, default=self.heads)
        self.layers = self.integer("num_hidden_layers", 1, 1 << 12)
        self.max_position = self.integer("max_position_embeddings", 1, 1 << 24)
        if values.get("head_dim") is None and self.hidden % self.heads:
            raise self.refuse(
                "num_attention_heads", f"a divisor of hidden_size = {self.hidden}, since there is no head_dim"
            )
        self.head_dim = self.integer("head_dim", 2, 1 << 12, default=self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise self.refuse("num_key_value_heads", f"a divisor of num_attention_heads = {self.heads}")
        if self.head_dim % 2:
            raise self.refuse("head_dim", "an even number")

    def spec(self, **fields: Any) -> LayerSpec:
        """Return a layer as in Llama without biases, but for `fields`."""
        return LayerSpec(**{"scale": self.head_dim**-0.5, "activation": self.activation()} | fields)

    def alike(self, spec: LayerSpec) -> dict[str, Any]:
        """Return the layers of a model whose layers are all alike."""
        return {"layers": (spec,) * self.layers}

    def rope(self, **values: Any) -> Rope:
        """Return the options of rotary positions. values: replace those of config.json."""
        return Rope.from_config(self.values | values, self.path, self.max_position, self.head_dim)

    def ropes_by_type(self, local_theta: float) -> dict[str, Rope]:
        """Return the rope of each layer type: from `rope_parameters` by type, or from the older keys, of which
        `rope_scaling` applies to full attention. local_theta: default for sliding attention."""
        given, scaling = self.section("rope_parameters"), self.section("rope_scaling").values
        if any(not isinstance(value, dict) for value in given.values.values() if value is not None):
            raise self.refuse("rope_parameters", f"objects under {FULL} and {SLIDING}")
        theta, scalings = {FULL: self.values["rope_theta"], SLIDING: local_theta}, {FULL: scaling, SLIDING: {}}
        return {
            kind: self.rope(
                rope_theta=theta[kind], rope_scaling=None, rope_parameters=given.section(kind).values | scalings[kind]
            )
            for kind in (FULL, SLIDING)
        }

    def layer_types(self, default: Callable[[int], bool], other: str = SLIDING) -> list[str]:
        """Return the attention of each layer. default: whether a layer has full attention if there is no list. other:
        the type of the other layers."""
        types = self.values.get("layer_types")
        if types is None:
            return [FULL if default(layer) else other for layer in range(self.layers)]
        if not isinstance(types, list) or len(types) != self.layers or any(t not in (other, FULL) for t in types):
            raise self.refuse("layer_types", f"{self.layers} entries, each of {(other, FULL)}")
        return types

    def window(self) -> int | None:
        return None if self.values.get("sliding_window") is None else self.integer("sliding_window", 1, 1 << 31)

    def experts(self, spec: LayerSpec, dense: Collection[int] = (), **fields: Any) -> tuple[LayerSpec, ...]:
        """Return the layers of a model with experts, all like `spec`. dense: layers without experts. fields: of
        `ExpertSpec` and `Routing`."""
        routing: dict[str, Any] = {"top_k": self.integer("num_experts_per_tok", 1, 1 << 10)}
        routing |= {field.name: fields.pop(field.name) for field in dataclass_fields(Routing) if field.name in fields}
        width = fields.pop("width", None) or self.integer("intermediate_size", 1, 1 << 20)
        experts = ExpertSpec(self.integer("num_experts", 1, 1 << 14), width, Routing(**routing), **fields)
        if experts.routing.top_k > experts.num_experts:
            raise self.refuse("num_experts_per_tok", f"at most the number of experts, {experts.num_experts}")
        return tuple(spec if layer in dense else replace(spec, experts=experts) for layer in range(self.layers))

    def activation(self) -> Activation:
        """Return the activation of the feed-forward."""
        known: dict[str, Activation] = {name: name for name in get_args(Activation)} | _ACTIVATIONS
        return known[self.one_of("hidden_act", known)]

    def optional(self, key: str) -> float:
        """Return a positive number; 0 if it is null or absent."""
        return 0.0 if self.values.get(key) is None else self.number(key)


@dataclass(frozen=True)
class Family:
    """describe(fields) -> the fields of `ModelConfig` that differ from its defaults, always with `layers`.

    defaults: values of keys that a config.json may leave out, except defaults of None. keys: the family's own names of
    keys, by the common name.
    """

    describe: Callable[[FamilyFields], dict[str, Any]]
    defaults: Mapping[str, Any]
    names: TensorNames = field(default_factory=TensorNames)
    keys: Mapping[str, str] = field(default_factory=dict)


def _llama(f: FamilyFields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    return f.alike(f.spec(rope=f.rope(), qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias")))


def _mistral(f: FamilyFields) -> dict[str, Any]:
    return f.alike(f.spec(rope=f.rope(), window=f.window()))


def _qwen2(f: FamilyFields) -> dict[str, Any]:
    return {"layers": _qwen_layers(f, f.spec(rope=f.rope(), qkv_bias=True))}


def _qwen3(f: FamilyFields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    return {"layers": _qwen_layers(f, f.spec(rope=f.rope(), qkv_bias=bias, o_bias=bias, qk_norm="head"))}


def _qwen_layers(f: FamilyFields, spec: LayerSpec) -> tuple[LayerSpec, ...]:
    first = f.integer("max_window_layers", 0, 1 << 20)
    types = f.layer_types(lambda layer: layer < first)
    return _windowed((spec,) * f.layers, types, f.window() if f.flag("use_sliding_window") else None)


def _gemma(f: FamilyFields) -> dict[str, Any]:
    return _gemma_fields(f, (replace(f.spec(rope=f.rope()), activation="gelu_tanh"),) * f.layers)


def _gemma2(f: FamilyFields) -> dict[str, Any]:
    return _gemma_sandwich(f, dict.fromkeys((FULL, SLIDING), f.rope()), lambda layer: layer % 2 == 1)


def _gemma3(f: FamilyFields) -> dict[str, Any]:
    pattern = f.integer("sliding_window_pattern", 1, 1 << 12)
    ropes = f.ropes_by_type(f.number("rope_local_base_freq"))
    return _gemma_sandwich(f, ropes, lambda layer: (layer + 1) % pattern == 0, qk_norm="head")


def _gemma_sandwich(
    f: FamilyFields, ropes: dict[str, Rope], is_full: Callable[[int], bool], **fields: Any
) -> dict[str, Any]:
    scale, softcap = f.number("query_pre_attn_scalar") ** -0.5, f.optional("attn_logit_softcapping")
    fields |= {"scale": scale, "softcap": softcap, "post_norm": True}
    full = f.spec(rope=ropes[FULL], **fields)
    sliding = replace(full, rope=ropes[SLIDING], window=f.window())
    layers = tuple(full if kind == FULL else sliding for kind in f.layer_types(is_full))
    return _gemma_fields(f, layers) | {"logit_softcap": f.optional("final_logit_softcapping")}


def _gemma_fields(f: FamilyFields, layers: tuple[LayerSpec, ...]) -> dict[str, Any]:
    if f.values.get("use_bidirectional_attention"):
        raise f.refuse("use_bidirectional_attention", f"false, because encoders are not supported. {ON_A_SERVER}")
    bias = f.flag("attention_bias")
    biased = tuple(replace(spec, qkv_bias=bias, o_bias=bias) for spec in layers)
    scale = {"embedding_scale": f.hidden**0.5, "rounds_embedding_scale": True}
    return {"layers": biased, "norm_offset": 1.0} | scale


def _gemma4(f: FamilyFields) -> dict[str, Any]:
    """The last layer has full attention, whatever `layer_types` has for it. Layers of full attention have heads of
    their own size."""
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if f.integer(key, 0, 1 << 20):
            reason = "layers that share keys and values, or have inputs of their own, are not supported (E2B, E4B)"
            raise f.refuse(key, f"0, because {reason}. {ON_A_SERVER}")
    if f.values.get("use_bidirectional_attention") not in (None, "vision"):  # "vision" is causal for text
        reason = "encoders are not supported"
        raise f.refuse("use_bidirectional_attention", f'null or "vision", because {reason}. {ON_A_SERVER}')
    types = [*f.layer_types(lambda layer: (layer + 1) % 6 == 0)[:-1], FULL]
    layers = tuple(_gemma4_layer(f, own, kind) for own, kind in zip(_gemma4_heads(f, types), types, strict=True))
    if f.flag("enable_moe_block"):
        width, shared_width = (f.integer(key, 1, 1 << 20) for key in ("moe_intermediate_size", "intermediate_size"))
        fields = {"width": width, "shared_width": shared_width, "own_norms": True, "expert_scale": True}
        layers = tuple(replace(each, experts=f.experts(each, **fields)[0].experts) for each in layers)
    scale = {"embedding_scale": f.hidden**0.5, "rounds_embedding_scale": True}
    return {"layers": layers, "logit_softcap": f.optional("final_logit_softcapping")} | scale


def _gemma4_heads(f: FamilyFields, types: Sequence[str]) -> list[dict[str, Any]]:
    """Return head_dim and num_key_value_heads of each layer, where they differ from the model's: as `per_layer_config`
    has them, else the keys for layers of full attention."""
    if "per_layer_config" in f.values:
        given = f.section("per_layer_config")
        keys = {key.lstrip("0") or "0": key for key in given.values}
        own = [given.section(keys.pop(str(layer))).values if str(layer) in keys else {} for layer in range(f.layers)]
        if keys or any(values.keys() - {"head_dim", "num_key_value_heads"} for values in own):
            raise f.refuse("per_layer_config", "only head_dim and num_key_value_heads, by number of the layer")
        return own
    full = {"head_dim": f.integer("global_head_dim", 2, 1 << 12)}
    if f.flag("attention_k_eq_v") and f.values.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = f.values["num_global_key_value_heads"]
    return [full if kind == FULL else {} for kind in types]


def _gemma4_layer(f: FamilyFields, own: dict[str, Any], kind: str) -> LayerSpec:
    """Return a layer without experts. own: its values that replace those of config.json."""
    each = FamilyFields(f.values | own, f.path)
    heads = Heads(each.kv_heads, each.head_dim) if (each.kv_heads, each.head_dim) != (f.kv_heads, f.head_dim) else None
    ropes = f.section("rope_parameters").values or _GEMMA4_ROPES
    rope = each.rope(rope_scaling=None, rope_parameters=Fields(ropes, f.path, "rope_parameters").section(kind).values)
    window, bias = f.integer("sliding_window", 1, 1 << 31), f.flag("attention_bias")
    return f.spec(
        rope=replace(rope, head_dim=heads and heads.head_dim),
        scale=1.0,
        heads=heads,
        window=None if kind == FULL else window,
        post_norm=True,
        qk_norm="head",
        v_norm=True,
        v_is_k=kind == FULL and f.flag("attention_k_eq_v"),
        residual_scale=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def _gpt2(f: FamilyFields) -> dict[str, Any]:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        f.one_of(key, (False,))
    scale = f.head_dim**-0.5 if f.flag("scale_attn_weights") else 1.0
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True)
    spec = f.spec(rope=NO_ROPE, scale=scale, is_gated=False, **biases)
    return f.alike(spec) | {
        "norm_kind": "layer",
        "intermediate_size": f.integer("intermediate_size", 1, 1 << 20, default=4 * f.hidden),
    }


def _phi3(f: FamilyFields) -> dict[str, Any]:
    options = f.section("rope_scaling").values or f.section("rope_parameters").values
    if options.get("rope_type", options.get("type")) in ("su", "yarn"):  # earlier names of longrope
        options = options | {"rope_type": "longrope"}
    return f.alike(f.spec(rope=f.rope(rope_scaling=options), window=f.window()))


def _olmo2(f: FamilyFields) -> dict[str, Any]:
    return {"layers": _olmo_layers(f, {FULL: f.rope()}, [FULL] * f.layers)}


def _olmo3(f: FamilyFields) -> dict[str, Any]:
    types = f.layer_types(lambda layer: (layer + 1) % 4 == 0)
    return {"layers": _olmo_layers(f, f.ropes_by_type(f.values["rope_theta"]), types)}


def _olmo_layers(f: FamilyFields, ropes: dict[str, Rope], types: list[str]) -> tuple[LayerSpec, ...]:
    bias = f.flag("attention_bias")
    spec = f.spec(rope=ropes[FULL], pre_norm=False, post_norm=True, qk_norm="full", qkv_bias=bias, o_bias=bias)
    return tuple(spec if kind == FULL else replace(spec, rope=ropes[SLIDING], window=f.window()) for kind in types)


def _granite(f: FamilyFields) -> dict[str, Any]:
    """The residual multiplier r scales what each layer adds. Here the residual is 1 / r times as large instead, which
    norms undo, except for their epsilon."""
    bias, residual = f.flag("attention_bias"), f.number("residual_multiplier")
    spec = f.spec(rope=f.rope(), scale=f.number("attention_multiplier"), qkv_bias=bias, o_bias=bias,
                  mlp_bias=f.flag("mlp_bias"))  # fmt: skip
    return f.alike(spec) | {
        "embedding_scale": f.number("embedding_multiplier") / residual,
        "norm_eps": f.number("rms_norm_eps") / residual**2,
        "logit_scale": 1 / f.number("logits_scaling"),
    }


def _smollm3(f: FamilyFields) -> dict[str, Any]:
    interval, bias = f.integer("no_rope_layer_interval", 1, 1 << 12), f.flag("attention_bias")
    has_rope = f.values.get("no_rope_layers")  # 1: with rope
    if has_rope is None:
        has_rope = [int((layer + 1) % interval != 0) for layer in range(f.layers)]
    if not isinstance(has_rope, list) or len(has_rope) != f.layers or any(each not in (0, 1) for each in has_rope):
        raise f.refuse("no_rope_layers", f"{f.layers} entries, each 0 or 1")
    window = f.window() if f.flag("use_sliding_window") else None
    types = f.layer_types(lambda layer: bool(has_rope[layer]))
    spec = f.spec(rope=f.rope(), qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias"))
    return {
        "layers": tuple(
            replace(spec, rope=spec.rope if rotated else NO_ROPE, window=window if kind == SLIDING else None)
            for rotated, kind in zip(has_rope, types, strict=True)
        )
    }


def _exaone4(f: FamilyFields) -> dict[str, Any]:
    """A model with windows has no rotary positions in its layers of full attention."""
    window = f.window()
    types = f.layer_types(lambda layer: (layer + 1) % f.integer("sliding_window_pattern", 1, 1 << 12) == 0)
    rotated = f.spec(rope=f.rope(), pre_norm=False, post_norm=True, qk_norm="head", window=window)
    full = rotated if window is None else replace(rotated, rope=NO_ROPE, window=None)
    return {"layers": tuple(full if kind == FULL else rotated for kind in types)}


def _glm4(f: FamilyFields) -> dict[str, Any]:
    rope = replace(f.rope(), interleaved=True)
    return f.alike(f.spec(rope=rope, post_norm=True, qkv_bias=f.flag("attention_bias")))


def _ernie4_5(f: FamilyFields) -> dict[str, Any]:
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), f.flag("use_bias"))
    return f.alike(f.spec(rope=replace(f.rope(), interleaved=True), **biases))


def _starcoder2(f: FamilyFields) -> dict[str, Any]:
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), f.flag("use_bias"))
    spec = f.spec(rope=f.rope(), window=f.window(), is_gated=False, **biases)
    return f.alike(spec) | {"norm_kind": "layer"}


def _seed_oss(f: FamilyFields) -> dict[str, Any]:
    biases = {key: f.flag(name) for key, name in _SEED_BIASES.items()}
    return f.alike(f.spec(rope=f.rope(), **biases))


def _internlm3(f: FamilyFields) -> dict[str, Any]:
    if f.values["attention_bias"] != f.values["mlp_bias"]:
        raise f.refuse("mlp_bias", "the value of attention_bias")
    return _llama(f)


def _arcee(f: FamilyFields) -> dict[str, Any]:
    (spec,) = {*_llama(f)["layers"]}
    return f.alike(replace(spec, is_gated=False))


def _mixtral(f: FamilyFields) -> dict[str, Any]:
    return {"layers": f.experts(f.spec(rope=f.rope(), window=f.window()))}


def _olmoe(f: FamilyFields) -> dict[str, Any]:
    if f.values.get("clip_qkv") is not None:
        raise f.refuse("clip_qkv", "null, because clipped queries, keys and values are not supported")
    bias = f.flag("attention_bias")
    spec = f.spec(rope=f.rope(), qk_norm="full", qkv_bias=bias, o_bias=bias)
    return {"layers": f.experts(spec, renormalize=f.flag("norm_topk_prob"))}


def _qwen2_moe(f: FamilyFields) -> dict[str, Any]:
    shared = f.integer("shared_expert_intermediate_size", 0, 1 << 20)
    spec, first = f.spec(rope=f.rope(), qkv_bias=f.flag("qkv_bias")), f.integer("max_window_layers", 0, 1 << 20)
    types = f.layer_types(lambda layer: layer % 2 == 1 or layer >= first)
    return _qwen_experts(f, spec, types, shared_width=shared, shared_gate=bool(shared))


def _qwen3_moe(f: FamilyFields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    spec = f.spec(rope=f.rope(), qk_norm="head", qkv_bias=bias, o_bias=bias)
    return _qwen_experts(f, spec, [SLIDING] * f.layers)


def _qwen_experts(f: FamilyFields, spec: LayerSpec, types: list[str], **fields: Any) -> dict[str, Any]:
    dense, step = f.values.get("mlp_only_layers") or [], f.integer("decoder_sparse_step", 1, 1 << 12)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise f.refuse("mlp_only_layers", "a list of layers")
    dense = {*dense, *(layer for layer in range(f.layers) if (layer + 1) % step)}
    width, norm = f.integer("moe_intermediate_size", 1, 1 << 20), f.flag("norm_topk_prob")
    layers = f.experts(spec, dense, width=width, renormalize=norm, **fields)
    return {"layers": _windowed(layers, types, f.window() if f.flag("use_sliding_window") else None)}


def _qwen3_5(f: FamilyFields) -> dict[str, Any]:
    return {"layers": _delta_layers(f, (_gated_attention(f),) * f.layers)} | {"norm_offset": 1.0}


def _qwen3_5_moe(f: FamilyFields) -> dict[str, Any]:
    shared = f.integer("shared_expert_intermediate_size", 1, 1 << 20)
    described = _qwen_experts(f, _gated_attention(f), [FULL] * f.layers, shared_width=shared, shared_gate=True)
    return described | {"layers": _delta_layers(f, described["layers"]), "norm_offset": 1.0}


def _gated_attention(f: FamilyFields) -> LayerSpec:
    bias = f.flag("attention_bias")
    return f.spec(rope=f.rope(), qk_norm="head", output_gate=True, qkv_bias=bias, o_bias=bias)


def _delta_layers(f: FamilyFields, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with a Gated DeltaNet in place of attention in those of the type LINEAR."""
    key_heads, value_heads = (f.integer(f"linear_num_{kind}_heads", 1, 1 << 12) for kind in ("key", "value"))
    key_dim, value_dim = (f.integer(f"linear_{kind}_head_dim", 1, 1 << 10) for kind in ("key", "value"))
    if value_heads % key_heads:
        raise f.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads = {key_heads}")
    f.one_of("hidden_act", ("silu", "swish"))  # also that of the convolution
    width = f.integer("linear_conv_kernel_dim", 1, NUM_INPUTS - MAX_LAG)
    delta = DeltaNet(key_heads, value_heads, key_dim, value_dim, width)
    interval = f.integer("full_attention_interval", 1, 1 << 12)
    types = f.layer_types(lambda layer: (layer + 1) % interval == 0, LINEAR)
    if FULL not in types:
        raise f.refuse("layer_types", f"a layer of {FULL}, because a KV cache without layers is not supported")
    pairs = zip(layers, types, strict=True)
    return tuple(
        replace(each, mixer=delta, qkv_bias=False, o_bias=False) if kind == LINEAR else each for each, kind in pairs
    )


def _windowed(layers: Sequence[LayerSpec], types: list[str], window: int | None) -> tuple[LayerSpec, ...]:
    """Return the layers with a window in those of the type SLIDING."""
    pairs = zip(layers, types, strict=True)
    return tuple(replace(each, window=window if kind == SLIDING else None) for each, kind in pairs)


def _glm4_moe(f: FamilyFields) -> dict[str, Any]:
    bias, norm = f.flag("attention_bias"), "head" if f.flag("use_qk_norm") else "none"
    spec = f.spec(rope=f.rope(), qk_norm=norm, qkv_bias=bias)
    width = f.integer("moe_intermediate_size", 1, 1 << 20)
    layers = f.experts(
        spec,
        range(f.integer("first_k_dense_replace", 0, 1 << 12)),
        width=width,
        scoring="sigmoid",
        renormalize=f.flag("norm_topk_prob"),
        scale=f.number("routed_scaling_factor"),
        num_groups=f.integer("n_group", 1, 1 << 10),
        top_groups=f.integer("topk_group", 1, 1 << 10),
        choice_bias=True,
        shared_width=width * f.integer("n_shared_experts", 0, 1 << 10),
    )
    return {"layers": layers, "num_unused_layers": f.integer("num_nextn_predict_layers", 0, 1 << 10)}


def _gpt_oss(f: FamilyFields) -> dict[str, Any]:
    for key, value in ("swiglu_alpha", CLAMPED_ALPHA), ("swiglu_limit", CLAMP):
        f.one_of(key, (value,))
    bias, types = f.flag("attention_bias"), f.layer_types(lambda layer: layer % 2 == 1)
    spec = f.spec(rope=f.rope(), sinks=True, qkv_bias=bias, o_bias=bias, mlp_bias=True, activation="clamped_swiglu")
    return {"layers": _windowed(f.experts(spec, router_bias=True), types, f.window())}


_SEED_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}
_ALL = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}  # fmt: skip
_QWEN2 = _ALL | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
                 "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
                 "max_window_layers": 28}  # fmt: skip
_GEMMA = _ALL | {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
                 "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
                 "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}  # fmt: skip
_GEMMA2 = _GEMMA | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
                    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                    "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
_GEMMA4_ROPES = {FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                 SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
_MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                   "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                   "llama_4_scaling_beta": 0.1}  # fmt: skip
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                 "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
_QWEN_MOE = _ALL | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
                    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
                    "max_window_layers": 28, "decoder_sparse_step": 1, "norm_topk_prob": False}  # fmt: skip
_DELTA = {"head_dim": 256, "num_attention_heads": 16, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
          "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
          "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}  # fmt: skip
_DELTA_MOE = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
              "norm_topk_prob": True}  # fmt: skip
_OLMO2 = _ALL | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
_GEMMA2_NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")
_PLAIN_MLP = TensorNames(gate_up=("mlp.up_proj",))

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, _ALL),
    "mistral": Family(_mistral, _ALL | {"intermediate_size": 14336, "num_key_value_heads": 8,
                                        "max_position_embeddings": 131072, "sliding_window": 4096}),
    "qwen2": Family(_qwen2, _QWEN2),
    "qwen3": Family(_qwen3, _QWEN2 | {"head_dim": 128}),
    "gemma": Family(_gemma, _GEMMA),
    "gemma2": Family(_gemma2, _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                     _GEMMA2_NAMES, {"hidden_act": "hidden_activation"}),
    "gemma3_text": Family(_gemma3, _GEMMA2 | {"vocab_size": 262208, "max_position_embeddings": 131072,
                                              "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
                                              "sliding_window_pattern": 6},
                          _GEMMA2_NAMES, {"hidden_act": "hidden_activation"}),
    "gemma4_text": Family(
        _gemma4,
        _GEMMA2 | {"vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 131072,
                   "sliding_window": 512, "global_head_dim": 512, "attention_k_eq_v": False, "enable_moe_block": False,
                   "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 256},
        TensorNames(mlp_norm="pre_feedforward_layernorm", router="router.proj", expert="experts.{}.", shared="mlp.",
                    packed_experts="by_outputs"),
        {"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
    ),
    "gpt2": Family(
        _gpt2,
        {"vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "max_position_embeddings": 1024, "hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
         "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        TensorNames(embedding="wte", position="wpe", final_norm="ln_f", layer="h.{}.", attn_norm="ln_1",
                    qkv=("attn.c_attn",), o="attn.c_proj", mlp_norm="ln_2", gate_up=("mlp.c_fc",),
                    down="mlp.c_proj", is_transposed=True),
        {"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
         "num_attention_heads": "n_head", "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
         "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"},
    ),
    "phi3": Family(
        _phi3,
        _ALL | {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    ),
    "olmo2": Family(_olmo2, _OLMO2),
    "olmo3": Family(_olmo3, _OLMO2 | {"rope_theta": 500000.0, "sliding_window": 4096}),
    "granite": Family(_granite, _ALL | {"embedding_multiplier": 1.0, "residual_multiplier": 1.0,
                                        "attention_multiplier": 1.0, "logits_scaling": 1.0}),
    "smollm3": Family(_smollm3, _ALL | {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
                                        "num_attention_heads": 16, "num_key_value_heads": 4,
                                        "max_position_embeddings": 32768, "rope_theta": 2e6,
                                        "use_sliding_window": False, "no_rope_layer_interval": 4,
                                        "tie_word_embeddings": True}),
    "ministral3": Family(_mistral, _ALL | {"vocab_size": 131072, "intermediate_size": 14336, "num_hidden_layers": 34,
                                           "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                                           "max_position_embeddings": 262144, "rope_parameters": _MINISTRAL_ROPE}),
    "exaone4": Family(_exaone4, _ALL | {"vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
                                        "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}),
    "glm4": Family(
        _glm4,
        _ALL | {"vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
                "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
                "partial_rotary_factor": 0.5, "attention_bias": True},
        TensorNames(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm",
                    gate_up=("mlp.gate_up_proj",)),
    ),
    "ernie4_5": Family(_ernie4_5, _ALL | {"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
                                          "num_hidden_layers": 18, "num_attention_heads": 16, "head_dim": 128,
                                          "num_key_value_heads": 2, "max_position_embeddings": 131072,
                                          "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "use_bias": False,
                                          "tie_word_embeddings": True}),
    "starcoder2": Family(
        _starcoder2,
        _ALL | {"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
                "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
                "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "use_bias": True, "tie_word_embeddings": True},
        TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
        {"rms_norm_eps": "norm_epsilon"},
    ),
    "seed_oss": Family(_seed_oss, _ALL | {"vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64,
                                          "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
                                          "max_position_embeddings": 524288, "attention_bias": True,
                                          "attention_out_bias": False}),
    "arcee": Family(_arcee, _ALL | {"hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2",
                                    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, _PLAIN_MLP),
    "mixtral": Family(
        _mixtral,
        _ALL | {"intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                "rope_theta": 1e6, "max_position_embeddings": 131072, "num_experts": 8, "num_experts_per_tok": 2},
        TensorNames(router="block_sparse_moe.gate", expert="block_sparse_moe.experts.{}.",
                    expert_gate_up=("w1", "w3"), expert_down="w2"),
    ),
    "qwen2_moe": Family(_qwen2_moe, _QWEN_MOE | {"num_key_value_heads": 16, "num_attention_heads": 16,
                                                 "moe_intermediate_size": 1408, "intermediate_size": 5632,
                                                 "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
                                                 "num_experts": 60, "qkv_bias": True}),
    "qwen3_moe": Family(_qwen3_moe, _QWEN_MOE | {"num_key_value_heads": 4, "num_attention_heads": 32,
                                                 "moe_intermediate_size": 768, "intermediate_size": 6144,
                                                 "num_experts_per_tok": 8, "num_experts": 128}),
    "qwen3_5_text": Family(_qwen3_5, _ALL | _DELTA | {"vocab_size": 248320, "intermediate_size": 12288,
                                                     "num_key_value_heads": 4}),
    "qwen3_5_moe_text": Family(
        _qwen3_5_moe,
        _QWEN_MOE | _DELTA | _DELTA_MOE | {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts": 256,
                                           "num_experts_per_tok": 8, "intermediate_size": 512},
        TensorNames(packed_experts="by_outputs"),
    ),
    "qwen3_next": Family(
        _qwen3_5_moe,
        _QWEN_MOE | _DELTA | _DELTA_MOE | {"num_hidden_layers": 48, "intermediate_size": 5632, "num_experts": 512,
                                           "num_experts_per_tok": 10},
        TensorNames(packed_experts="by_outputs", delta_qkvz=("linear_attn.in_proj_qkvz",),
                    delta_ba=("linear_attn.in_proj_ba",), delta_by_key_head=True),
    ),
    "olmoe": Family(_olmoe, _ALL | {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
                                    "num_hidden_layers": 16, "num_attention_heads": 16, "rms_norm_eps": 1e-5,
                                    "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8,
                                    "norm_topk_prob": False}),
    "glm4_moe": Family(
        _glm4_moe,
        _ALL | {"vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
                "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8,
                "n_shared_experts": 1, "num_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
                "num_nextn_predict_layers": 1},
        TensorNames(shared="mlp.shared_experts."),
    ),
    "gpt_oss": Family(
        _gpt_oss,
        _ALL | {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
                "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
                "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True, "num_experts": 128,
                "num_experts_per_tok": 4, "swiglu_alpha": CLAMPED_ALPHA, "swiglu_limit": CLAMP,
                "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE},
        TensorNames(router="mlp.router", packed_experts="by_inputs"),
    ),
    "internlm3": Family(_internlm3, _ALL | {"vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48,
                                        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
                                        "rms_norm_eps": 1e-5},
                        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
}  # fmt: skip
"""By model_type."""
