"""Which reader a checkpoint's `quantization_config` asks for. What is not here is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import ModelError
from pipeline.weights.awq import AwqFormat
from pipeline.weights.compressed_tensors import CompressedFormat
from pipeline.weights.fp8 import Fp8Format
from pipeline.weights.gptq import GptqFormat
from pipeline.weights.packed import LinearWeight
from pipeline.weights.round_to_nearest import RoundToNearest
from pipeline.weights.tensor_reader import StoredLinear


class QuantFormat(Protocol):
    """How the linears of a model are quantized, to read (`str`) and to read them with.

    `bits` of a weight, and the inputs that share a scale (None: all of an output's); the widest and the smallest where
    linears differ. `has_activations`: the checkpoint is made for activations in 8 bits. `unused`: last parts of the
    names of tensors that say nothing about weights.
    """

    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def has_activations(self) -> bool: ...
    @property
    def unused(self) -> tuple[str, ...]: ...

    def read_linear(self, linear: StoredLinear) -> LinearWeight: ...


READERS: dict[str, Callable[[dict[str, Any], Path], QuantFormat]] = {
    "awq": AwqFormat.from_config,
    "gptq": GptqFormat.from_config,
    "compressed-tensors": CompressedFormat.from_config,
    "fp8": Fp8Format.from_config,
}
"""quant_method -> the format that its options describe."""


def is_int4(quantization: QuantFormat | None) -> bool:
    """Whether linears are 4-bit integers, which have kernels of their own. Those of nf4 have 4 bits and are not."""
    is_codebook = isinstance(quantization, RoundToNearest) and quantization.method == "nf4"
    return quantization is not None and quantization.bits == 4 and not is_codebook


def read_format(config: dict[str, Any], path: Path) -> QuantFormat:
    """The format that the `quantization_config` in `path` describes. Raises ModelError for what is not served."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise ModelError(
            f"{path}: quantization_config.quant_method = {method!r:.200} is not served; served are "
            f"{', '.join(READERS)}, and 16- and 32-bit checkpoints, with model.quantization where they shall be made "
            "smaller while they are loaded"
        )
    return READERS[method](config, path)
