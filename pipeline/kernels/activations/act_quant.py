"""Linears whose inputs are rounded first (`engine.activation_dtype`): the oracle, and its selection per weight.

`fp8.py` and `int8.py` define the rounding and which weights they support exactly.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from pipeline.errors import ConfigError
from pipeline.kernels.activations import fp8, int8
from pipeline.kernels.contract import Kernels
from pipeline.kernels.linears import Linear, RoundedLinears
from pipeline.weights.formats import QuantFormat, form_of, linear_forms
from pipeline.weights.packed import GroupIntWeight, LinearWeight


@dataclass(frozen=True)
class ActQuantScheme:
    """One way to round the inputs of linears.

    as_multiplied(weight): the weight, and the inputs of a token that share a scale; None if the weight is unsupported.
    rounded(x_MK, block): the inputs after rounding, in float32.
    forms: the supported weights, of `linear_forms`. weights: the same for display. supports_groups: of weights.
    """

    as_multiplied: Callable[[LinearWeight], tuple[LinearWeight, int] | None]
    rounded: Callable[[torch.Tensor, int], torch.Tensor]
    forms: frozenset[str]
    weights: str
    supports_groups: Callable[[int | None], bool] = lambda group_size: True

    def supports(self, quantization: QuantFormat | None) -> bool:
        """Return whether some linears are quantized in a form that is supported."""
        return (
            quantization is not None
            and bool(linear_forms(quantization) & self.forms)
            and self.supports_groups(quantization.group_size)
        )


ACT_QUANT_SCHEMES = {
    "fp8": ActQuantScheme(
        fp8.as_multiplied, fp8.rounded, frozenset({"int4", "int8", "fp8", "codes"}), "quantized weights"
    ),
    "int8": ActQuantScheme(
        *(int8.as_multiplied, int8.rounded, frozenset({"int4", "int8"}), "4- and 8-bit weights"),
        supports_groups=int8.supports_groups,
    ),
}
"""Keys are values of `engine.activation_dtype`."""


@dataclass(frozen=True)
class Activations:
    """Rounding of activations in an engine. dtype: a key of ACT_QUANT_SCHEMES, or "none". forms: weights, of
    `linear_forms`, whose inputs are rounded."""

    dtype: str = "none"
    forms: frozenset[str] = frozenset()

    @classmethod
    def for_all_weights(cls, dtype: str) -> "Activations":
        """Return the rounding of the inputs of all weights that support `dtype`."""
        return cls(dtype, ACT_QUANT_SCHEMES[dtype].forms)

    def cover(self, quantization: QuantFormat | None) -> bool:
        """Return whether the inputs of all quantized linears are rounded, of which there are some."""
        if not self.forms or not linear_forms(quantization) <= self.forms:
            return False
        return ACT_QUANT_SCHEMES[self.dtype].supports(quantization)


NOT_ROUNDED = Activations()


def resolve_activations(
    requested: str, quantization: QuantFormat | None, native: Collection[str], deterministic: bool
) -> Activations:
    """Return the rounding for `engine.activation_dtype`. native: types that the device multiplies.

    "auto" is what the checkpoint declares, if it is native and the engine need not be deterministic. Raises ConfigError
    if no linear in this format supports another `requested` type.
    """
    if requested == "auto":
        declared = "" if quantization is None else quantization.activations or ""
        if declared not in native or deterministic or not ACT_QUANT_SCHEMES[declared].supports(quantization):
            return NOT_ROUNDED
        return Activations(declared, frozenset({declared}))
    if requested == "none":
        return NOT_ROUNDED
    if not ACT_QUANT_SCHEMES[requested].supports(quantization):
        weights = "16- or 32-bit weights" if quantization is None else f"the model's weights ({quantization})"
        raise ConfigError(
            f"engine.activation_dtype = {requested!r}: not supported by {weights}. Use an {requested} checkpoint or "
            "one of 4-bit integers in groups of 32, 64 or multiples of 128 (AWQ, GPTQ; `pipeline quantize` makes "
            "them), quantize a 16-bit one on load with model.quantization: fp8 or int8, or leave the key at auto"
        )
    return Activations.for_all_weights(requested)


_UNSUPPORTED = {
    "fp8": "needs compute capability 8.9 or newer (L4, L40S, H100, H200, B200), and {name} has {capability}; set it to "
    "auto, or set engine.kernels: reference to measure its effect on outputs, slowly",
    "int8": "runs on CPUs only, not on {name}; set it to auto or fp8",
}


class ActQuantLinear:
    """The oracle: the weight's linear in float32, on rounded inputs."""

    def __init__(
        self, weight: LinearWeight, block: int, rounding: ActQuantScheme, prepare: Callable[[LinearWeight], Linear]
    ) -> None:
        self.rounding, self.block, self.input_order_K = rounding, block, None
        if isinstance(weight, GroupIntWeight):
            self.input_order_K = weight.input_order_K
            weight = replace(weight, input_order_K=None)
        self.linear = prepare(weight)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        in_order = x_MK if self.input_order_K is None else x_MK[:, self.input_order_K.to(x_MK.device)]
        return self.linear(self.rounding.rounded(in_order, self.block)).to(x_MK.dtype)


def act_quant_oracles(prepare: Callable[[LinearWeight], Linear], backends: str) -> dict[str, RoundedLinears]:
    """Return the oracle of each rounding, built on the float32 linears that `prepare` makes."""

    def rounded_linear(dtype: str, rounding: ActQuantScheme) -> RoundedLinears:
        def prepare_rounded(weight: LinearWeight) -> Linear | None:
            served = rounding.as_multiplied(weight)
            return None if served is None else ActQuantLinear(*served, rounding, prepare)

        description = f"{backends}, inputs rounded to {dtype} first: measures quality, not faster"
        return RoundedLinears(prepare_rounded, description)

    return {dtype: rounded_linear(dtype, rounding) for dtype, rounding in ACT_QUANT_SCHEMES.items()}


class ActQuantLinears:
    """`Kernels.prepare_linear` that rounds activations for the weights that support it, and counts both kinds."""

    def __init__(
        self, activations: Activations, linears: RoundedLinears, other: Callable[[LinearWeight], Linear]
    ) -> None:
        self.activations, self._linears, self._other = activations, linears, other
        self.num_rounded = self.num_all = 0

    def __call__(self, weight: LinearWeight) -> Linear:
        self.num_all += 1
        linear = self._linears.prepare(weight) if form_of(weight) in self.activations.forms else None
        if linear is None:
            return self._other(weight)
        self.num_rounded += 1
        return linear


def with_act_quant(kernels: Kernels, activations: Activations, device: torch.device) -> Kernels:
    """Return the kernels with linears that round activations as given, for the weights that support it.

    Raises ConfigError if the device does not support the type.
    """
    dtype = activations.dtype
    linears = kernels.rounded.get(dtype)
    if linears is None:
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        reason = _UNSUPPORTED[dtype].format(name=torch.cuda.get_device_name(device), capability=capability)
        raise ConfigError(f"engine.activation_dtype = {dtype!r}: {reason}")
    prepare = ActQuantLinears(activations, linears, kernels.prepare_linear)
    weights = ACT_QUANT_SCHEMES[dtype].weights
    linear = f"{weights}: {linears.backends}; others: {kernels.backends['linear']}"
    return replace(kernels, prepare_linear=prepare, backends=kernels.backends | {"linear": linear})
