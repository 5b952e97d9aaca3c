"""Selection of the reader for a checkpoint's `quantization_config`. Other formats are rejected by name."""

from collections.abc import Callable, Iterable
from math import gcd
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import ModelError
from pipeline.weights.awq import AwqFormat
from pipeline.weights.compressed_tensors import CompressedFormat
from pipeline.weights.fp4 import Mxfp4Format
from pipeline.weights.fp8 import Fp8Format
from pipeline.weights.gguf import GgufFormat
from pipeline.weights.gptq import GptqFormat
from pipeline.weights.modelopt import ModelOptFormat
from pipeline.weights.packed import CodebookWeight, DenseWeight, Fp8Weight, GroupIntWeight, LinearWeight
from pipeline.weights.round_to_nearest import RoundToNearest
from pipeline.weights.tensor_reader import StoredLinear

BLOCK = 128  # on a GPU, scales cover at most this many inputs
CHUNK = 256  # on a GPU, the inputs of 4-bit integers are padded to whole chunks


class QuantFormat(Protocol):
    """Quantization of a model's linears: a description (`str`) and a reader.

    bits: of a weight. group_size: inputs that share a scale; None: all of an output's. If linears differ, these are the
    most bits and the smallest group. has_activations: the checkpoint is made for quantized activations. activations:
    their type, fp8 or int8, if it is that of weights, all of which declare it. has_codes: some linears are 4-bit codes,
    not integers. unused: suffixes of tensor names that do not concern weights.
    """

    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def has_activations(self) -> bool: ...
    @property
    def activations(self) -> str | None: ...
    @property
    def has_codes(self) -> bool: ...
    @property
    def unused(self) -> tuple[str, ...]: ...

    def read_linear(self, linear: StoredLinear) -> LinearWeight: ...


READERS: dict[str, Callable[[dict[str, Any], Path], QuantFormat]] = {
    "awq": AwqFormat.from_config,
    "gptq": GptqFormat.from_config,
    "compressed-tensors": CompressedFormat.from_config,
    "fp8": Fp8Format.from_config,
    "modelopt": ModelOptFormat.from_config,
    "mxfp4": Mxfp4Format.from_config,
    "gguf": GgufFormat.from_config,
}
"""Constructors of formats from their options, by quant_method."""


_REFUSED = {
    "squeezellm": "SqueezeLLM stores a table of values per output, and outliers as a sparse matrix",
    "quip": "QuIP rotates inputs and outputs of each linear",
    "quip_sharp": "QuIP# rotates inputs and outputs of each linear, and stores vectors of a lattice codebook",
    "aqlm": "AQLM stores sums of vectors of learned codebooks",
    "vptq": "VPTQ stores vectors of learned codebooks",
    "hqq": "HQQ stores zero points as floats",
    "bitsandbytes": "bitsandbytes has layouts of its own; for nf4 quantize at load, with `model.quantization: nf4`",
    "eetq": "EETQ stores int8 in the order of its GPU kernel",
    "exl2": "EXL2 mixes 2 to 8 bits in a linear",
    "exl3": "EXL3 stores trellis codes",
}
"""Formats without a reader by quant_method, and what they are."""


def is_int4(quantization: QuantFormat | None) -> bool:
    """Return whether linears are 4-bit integers, for which there are kernels."""
    return quantization is not None and quantization.bits == 4 and not quantization.has_codes


def has_only_experts(quantization: QuantFormat | None) -> bool:
    """Return whether all linears but those of experts are in 16 bits."""
    return isinstance(quantization, Mxfp4Format)


def linear_forms(quantization: QuantFormat | None) -> set[str]:
    """Return the forms of quantized linears, except those of experts: int4, int8, fp8 and codes (of 4 bits)."""
    match quantization:
        case None | Mxfp4Format():
            return set()
        case GgufFormat():
            return quantization.forms
        case CompressedFormat():
            return {scheme.form for scheme in quantization.schemes}
        case GptqFormat():
            return {f"int{each.bits}" for each in (quantization, *quantization.overrides)}
        case Fp8Format() | ModelOptFormat(has_codes=False) | RoundToNearest(method="fp8"):
            return {"fp8"}
        case _:
            return {"codes" if quantization.has_codes else f"int{quantization.bits}"}


def form_of(weight: LinearWeight) -> str | None:
    """Return the form of a weight as in `linear_forms`; None if it is not quantized."""
    match weight:
        case DenseWeight():
            return None
        case Fp8Weight():
            return "fp8"
        case CodebookWeight():
            return "codes"
        case GroupIntWeight():
            return f"int{weight.bits}"


def has_small_blocks(quantization: QuantFormat | None, num_inputs: int) -> bool:
    """Return whether weights are fp8 in blocks that end within BLOCK inputs once `num_inputs` of them are cut off."""
    if quantization is None or quantization.group_size is None or "fp8" not in linear_forms(quantization):
        return False
    return gcd(quantization.group_size, num_inputs) % BLOCK != 0


def bytes_on_gpu(quantization: QuantFormat | None, inputs: Iterable[int] = ()) -> float:
    """Return the bytes of an expert's weight on a GPU, including its share of the scales. inputs: numbers of inputs of
    its linears, which groups made on load divide. The products of experts read 4-bit integers, e2m1, and e4m3 in whole
    blocks of 128 inputs as stored; other weights are widened to 16 bits."""
    match quantization:
        case None | RoundToNearest(method="nf4") | GptqFormat(desc_act=True):
            return 2.0
        case GgufFormat():  # of types that differ, and with minima, which the products of experts do not read
            return 2.0
        case _ if "int8" in linear_forms(quantization) or has_small_blocks(quantization, BLOCK):
            return 2.0
        case RoundToNearest(method="int4-rtn"):
            padded = max((-(-num_inputs // CHUNK) * CHUNK / num_inputs for num_inputs in inputs), default=1.0)
            return padded * (0.5 + int4_group_bytes(quantization) / gcd(BLOCK, *inputs))
        case _:
            return quantization.bits / 8 + 4 / (quantization.group_size or BLOCK)


def int4_group_bytes(quantization: QuantFormat) -> int:
    """Return the bytes of the scale and zero point of a group of 4-bit integers on a GPU: 16 bits each, which hold a
    checkpoint's scales, but not exactly those that are made on load."""
    return 8 if isinstance(quantization, RoundToNearest) else 4


def declares_fp8_cache(config: dict[str, Any]) -> bool:
    """Return whether a `quantization_config` declares a KV cache in fp8: as `kv_cache_scheme` (compressed-tensors,
    Model Optimizer) or `kv_cache_quant_algo` (Model Optimizer's hf_quant_config.json)."""
    options = _options(config)
    scheme = options.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, dict) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return is_fp8 or options.get("kv_cache_quant_algo") == "FP8"


def quantizes_linears(config: dict[str, Any]) -> bool:
    """Return whether a `quantization_config` describes weights: some declare only a KV cache."""
    options = _options(config)
    return not declares_fp8_cache(config) or bool(options.get("config_groups") or options.get("quant_algo"))


def _options(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("quantization")
    return inner if isinstance(inner, dict) else config


def read_format(config: dict[str, Any], path: Path) -> QuantFormat:
    """Return the format of the `quantization_config` in `path`. Raises ModelError for an unsupported one."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        reason = f": {_REFUSED[method]}" if isinstance(method, str) and method in _REFUSED else ""
        raise ModelError(
            f"{path}: quantization_config.quant_method = {method!r:.200} is not supported{reason}; expected one of "
            f"{', '.join(READERS)}, or a 16- or 32-bit checkpoint, which `model.quantization: int4-rtn` quantizes at "
            "load, and `pipeline quantize` into a new checkpoint"
        )
    return READERS[method](config, path)
