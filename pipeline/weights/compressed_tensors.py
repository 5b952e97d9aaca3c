"""Reader of compressed-tensors checkpoints (llm-compressor).

Layouts for K inputs, N outputs, G groups (compressed-tensors, `compressors/`), by the `format` of a group of linears:
`pack-quantized`: `weight_packed` (N, K/p) int32, p = 32 / bits integers per word from the lowest bits on, each
increased by half its range; `weight_scale` (N, G), `weight_shape` (N, K) as two integers; if not symmetric,
`weight_zero_point` (N/p, G) int32, packed the same way along N; `weight_g_idx` (K,) int32, the group of each input, if
inputs were ordered by activation.
`int-quantized`: `weight` (N, K) int8, `weight_scale`, and `weight_zero_point` as int8.
`float-quantized`: `weight` (N, K) float8_e4m3fn and its scales, as in `fp8.py`.
`naive-quantized`: one of these two, by the weights' `type`.
`nvfp4-pack-quantized`, `mxfp4-pack-quantized`: `weight_packed` (N, K/2) uint8 and scales as in `fp4.py`; NVFP4's scales
are divided by `weight_global_scale` (1,).
weight = (q - zero) * scale. G is 1 for one scale per output; a scale for the whole weight is (1,).

Scales of activations are ignored: 8-bit activations are rounded with scales of their own values
(`kernels/activations/`), 4-bit ones not at all.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ModelError
from pipeline.weights.config_fields import Fields
from pipeline.weights.fp4 import MX_GROUP, NV_GROUP, read_mxfp4, read_nvfp4
from pipeline.weights.fp8 import ACTIVATION_SCALES, block_of, fp8_text, read_float8
from pipeline.weights.packed import GroupIntWeight, LinearWeight
from pipeline.weights.tensor_reader import StoredLinear, groups_text, input_order, unpack_words

PACKED, INTEGERS, FLOATS8, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FP4 = {NVFP4: ("tensor_group", NV_GROUP), MXFP4: ("group", MX_GROUP)}  # strategy and group size
FORMATS = (PACKED, INTEGERS, FLOATS8, NAIVE, *FP4)  # naive: 8-bit integers or floats without rounded activations
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class Scheme:
    """Storage of one group of linears. `group_size` None: one scale per output, or for the whole weight.

    `activations`: their declared type, fp8, int8 or another. `targets` are module names, patterns ("re:...") or the
    class of all linears.
    """

    format: str
    bits: int
    symmetric: bool
    group_size: int | None
    block: tuple[int, int] | None
    activations: str | None
    targets: "Modules"

    @property
    def form(self) -> str:
        """See `formats.linear_forms`."""
        return "codes" if self.format in FP4 else "fp8" if self.format == FLOATS8 else f"int{self.bits}"


@dataclass(frozen=True)
class Modules:
    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def rank(self, prefix: str) -> int:
        """Rank a match as compressed-tensors does: 0 by name, 1 by pattern, 2 as a linear, 3 none."""
        if prefix in self.names:
            return 0
        if any(pattern.match(prefix) for pattern in self.patterns):
            return 1
        return 2 if "Linear" in self.names else 3


@dataclass(frozen=True)
class CompressedFormat:
    """Validated quantization_config of a compressed-tensors checkpoint."""

    schemes: tuple[Scheme, ...]
    ignored: Modules
    unused: tuple[str, ...] = (*ACTIVATION_SCALES, "input_global_scale")

    @property
    def bits(self) -> int:
        return max(scheme.bits for scheme in self.schemes)

    @property
    def group_size(self) -> int | None:
        sizes = [scheme.block[1] if scheme.block is not None else scheme.group_size for scheme in self.schemes]
        return None if None in sizes else min(size for size in sizes if size is not None)

    @property
    def has_activations(self) -> bool:
        return any(scheme.activations is not None for scheme in self.schemes)

    @property
    def activations(self) -> str | None:
        for form in ("fp8", "int8"):
            if {scheme.activations for scheme in self.schemes if scheme.form == form} == {form}:
                return form
        return None

    @property
    def has_codes(self) -> bool:
        return any(scheme.format in FP4 for scheme in self.schemes)

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "CompressedFormat":
        """Read the `quantization_config` of `path`. Raises ModelError naming an unsupported field."""
        options = Fields(config, path, "quantization_config")
        options.one_of("quant_method", ("compressed-tensors",))
        options.one_of("quantization_status", ("compressed", "frozen"), "compressed")
        if options.section("sparsity_config").values.get("format", "dense") != "dense":
            raise options.refuse("sparsity_config", "none, or the format dense: sparse weights are not supported")
        if options.section("transform_config").values.get("config_groups"):
            raise options.refuse("transform_config", "none: transforms of activations are not supported")
        groups = options.section("config_groups")
        if not groups.values:
            raise options.refuse("config_groups", "at least one group")
        default = config.get("format")
        schemes = tuple(_scheme(groups.section(name), default) for name in groups.values)
        return cls(schemes, _modules(options, "ignore"))

    def __str__(self) -> str:
        kinds = dict.fromkeys(_scheme_text(scheme) for scheme in self.schemes)
        return f"compressed-tensors {' and '.join(kinds)}"

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read one linear; dense if the checkpoint has no quantized tensors of that name.

        Raises ModelError if a tensor's type or shape does not fit the scheme and the linear's shape.
        """
        if "weight_packed" not in linear and "weight_scale" not in linear:
            return linear.dense()
        scheme = min(self.schemes, key=lambda scheme: scheme.targets.rank(linear.prefix))
        if scheme.targets.rank(linear.prefix) == 3 or self.ignored.rank(linear.prefix) < 2:
            raise ModelError(f"{linear.prefix}: stored quantized, but quantization_config has no scheme for it")
        if scheme.format == FLOATS8:
            return read_float8(linear, "weight_scale", scheme.block)
        if scheme.format == NVFP4:
            return read_nvfp4(linear, "weight_packed", "weight_global_scale", divides=True)
        if scheme.format == MXFP4:
            return read_mxfp4(linear)
        size, half = linear.group_size(scheme.group_size), 1 << (scheme.bits - 1)
        if scheme.format == PACKED:
            q_NK = _packed(linear, scheme.bits)
        else:
            q_NK = _to_unsigned(linear.read("weight", [linear.shape_NK], [torch.int8]), half)
        shapes = _group_shapes(linear, size)
        scales_NG = _by_group(linear.scales("weight_scale", shapes), shapes[0])
        zeros_NG = torch.full_like(scales_NG, half)
        if not scheme.symmetric or "weight_zero_point" in linear:
            zeros_NG = _zeros(linear, shapes, scheme)
        order_K = None
        if "weight_g_idx" in linear:
            group_K = linear.read("weight_g_idx", [linear.shape_NK[1:]], [torch.int32, torch.int64])
            if not bool((group_K == -1).all()):  # -1: never set
                order_K = input_order(group_K, size, f"{linear.prefix}.weight_g_idx")
            q_NK = q_NK if order_K is None else q_NK[:, order_K].contiguous()
        return GroupIntWeight(q_NK, scales_NG, zeros_NG, size, linear.bias_N, scheme.bits, order_K)


def _scheme(group: Fields, default_format: object) -> Scheme:
    given = {key: value for key, value in group.values.items() if value is not None}
    inner = Fields({"format": default_format} | given, group.path, group.key_path)
    form = inner.one_of("format", FORMATS)
    weights = inner.section("weights")
    is_fp4 = form in FP4
    is_float = form == FLOATS8 or (form == NAIVE and weights.values.get("type") == "float")
    weights.one_of("type", ("float",) if is_float or is_fp4 else ("int",), "int")
    bits = weights.one_of("num_bits", (4, 8) if form == PACKED else (4,) if is_fp4 else (8,))
    strategies = FP4[form][:1] if is_fp4 else STRATEGIES if is_float else STRATEGIES[:3]
    strategy = weights.one_of("strategy", strategies, "tensor")
    if is_fp4:
        weights.one_of("group_size", FP4[form][1:])
    if is_float and strategy == "group":
        raise weights.refuse("strategy", "tensor, channel or block for weights in fp8")
    if weights.values.get("dynamic") not in (None, False):
        raise weights.refuse("dynamic", "false")
    return Scheme(
        FLOATS8 if is_float else form,
        bits,
        weights.one_of("symmetric", (True, False), True),
        weights.group_size() if strategy in ("group", "tensor_group") else None,
        block_of(weights, "block_structure") if strategy == "block" else None,
        _activations(inner.section("input_activations")),
        _modules(inner, "targets"),
    )


def _activations(options: Fields) -> str | None:
    if not options.values:
        return None
    form = {"float": "fp", "int": "int"}.get(str(options.values.get("type")), "int")
    return f"{form}{options.values.get('num_bits', 8)}"


def _modules(options: Fields, name: str) -> Modules:
    texts = options.names(name)
    patterns = [text.removeprefix("re:") for text in texts if text.startswith("re:")]
    return Modules(frozenset(texts), tuple(options.pattern(name, text) for text in patterns))


def _scheme_text(scheme: Scheme) -> str:
    if scheme.format == FLOATS8:
        return fp8_text(scheme.block)
    kind = scheme.format.removesuffix("-pack-quantized") if scheme.format in FP4 else f"int{scheme.bits}"
    return f"{kind}, {groups_text(scheme.group_size)}"


def _packed(linear: StoredLinear, bits: int) -> torch.Tensor:
    (n, k), parts = linear.shape_NK, 32 // bits
    stored = linear.read("weight_shape", [(2,)], [torch.int64, torch.int32]).tolist()
    if tuple(stored) != linear.shape_NK:
        raise linear.refuse("weight_shape", f"is {tuple(stored)}, expected {linear.shape_NK}")
    return unpack_words(linear.read("weight_packed", [(n, -(-k // parts))]), bits)[:, :k].contiguous()


def _to_unsigned(signed: torch.Tensor, half: int) -> torch.Tensor:
    return (signed.to(torch.int16) + half).to(torch.uint8)


def _group_shapes(linear: StoredLinear, size: int) -> list[tuple[int, ...]]:
    """Return (N, G), and the other shapes in which one value per output or per weight may be stored."""
    n, groups = linear.shape_NK[0], linear.shape_NK[1] // size
    return [(n, groups), *([(), (1,), (1, 1), (n,)] if groups == 1 else [])]


def _by_group(values: torch.Tensor, shape_NG: tuple[int, ...]) -> torch.Tensor:
    return values.expand(shape_NG[0], 1).contiguous() if values.numel() == 1 else values.view(shape_NG)


def _zeros(linear: StoredLinear, shapes: list[tuple[int, ...]], scheme: Scheme) -> torch.Tensor:
    """Read the zeros (N, G) as float32, unsigned like the weights. Older files store int8, even if symmetric."""
    (n, groups), half = shapes[0], 1 << (scheme.bits - 1)
    packed = (-(-n * scheme.bits // 32), groups)
    zeros = linear.tensors.read(f"{linear.prefix}.weight_zero_point")
    if zeros.dtype == torch.int32 and tuple(zeros.shape) == packed:
        zeros_NG = unpack_words(zeros.t(), scheme.bits)[:, :n].t()
    elif zeros.dtype == torch.int8 and tuple(zeros.shape) in shapes:
        zeros_NG = _by_group(_to_unsigned(zeros, half), shapes[0])
    else:
        found = f"found {tuple(zeros.shape)} {zeros.dtype}"
        raise linear.refuse("weight_zero_point", f"{found}, expected {packed} torch.int32 or {shapes[0]} torch.int8")
    if scheme.symmetric and bool((zeros_NG != half).any()):
        raise linear.refuse("weight_zero_point", "not zero, but quantization_config says symmetric")
    return zeros_NG.to(torch.float32).contiguous()
