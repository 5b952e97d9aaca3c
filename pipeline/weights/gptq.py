"""Reader of GPTQ checkpoints (AutoGPTQ, GPTQModel, auto-round, transformers).

Layout (GPTQModel, `gptqmodel/nn_modules/qlinear/torch.py`) for K inputs, N outputs, groups of g, p = 32 / bits values
per word from its lowest bits on: `qweight` (K/p, N) int32, word r of an output is its inputs p r to p r + p - 1;
`qzeros` (K/g, N/p) int32, packed along outputs; `scales` (K/g, N); `g_idx` (K,) int32, the group of each input, which
is not k // g if the inputs were quantized in the order of their activations (`desc_act`).
weight = (q - z) * scale.

Zeros: `checkpoint_format: gptq_v2` stores z, the older `gptq` stores z - 1. GPTQModel subtracts 1 from each value of
the whole word, with borrows, so adding it the same way also restores a z of 0.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ModelError
from pipeline.weights.config_fields import Fields
from pipeline.weights.packed import GroupIntWeight, LinearWeight
from pipeline.weights.tensor_reader import StoredLinear, groups_text, input_order, unpack_words

BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2")
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
ONE_PER_VALUE = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Override:
    """Other bits or group size for the linears whose name begins with a match of `pattern` (GPTQModel's `dynamic`)."""

    pattern: re.Pattern[str]
    bits: int
    group_size: int | None


@dataclass(frozen=True)
class GptqFormat:
    """Validated quantization_config of a GPTQ checkpoint. `group_size` None: one group of all inputs."""

    bits: int
    group_size: int | None
    desc_act: bool
    checkpoint_format: str
    overrides: tuple[Override, ...] = ()
    has_activations: bool = False
    activations: str | None = None
    has_codes: bool = False
    unused: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "GptqFormat":
        """Read the `quantization_config` of `path`. Raises ModelError naming an unsupported field."""
        options = Fields({"checkpoint_format": config.get("format"), **config}, path, "quantization_config")
        options.one_of("quant_method", ("gptq",))
        for name in ("is_marlin_format", "use_bitblas_format"):
            options.one_of(name, (False,), False)
        options.one_of("pack_dtype", ("int32",), "int32")
        bits, group_size = options.one_of("bits", BITS), options.group_size()
        return cls(
            bits,
            group_size,
            options.one_of("desc_act", (True, False), False),
            options.one_of("checkpoint_format", FORMATS, "gptq"),
            _overrides(options.section("dynamic"), bits, group_size),
        )

    def __str__(self) -> str:
        order = ", inputs ordered by activation" if self.desc_act else ""
        own = ", some linears otherwise" if self.overrides else ""
        return f"GPTQ int{self.bits}, {groups_text(self.group_size)}{order}{own}"

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read one linear; dense if the checkpoint has no quantized tensors of that name.

        Raises ModelError if a tensor's type or shape does not fit the layout and the linear's shape, or if groups
        differ in size.
        """
        if not any(suffix in linear for suffix in SUFFIXES):
            return linear.dense()
        bits, group_size = self._scheme(linear.prefix)
        (n, k), parts = linear.shape_NK, 32 // bits
        size = linear.group_size(group_size)
        if n % parts or k % parts:
            raise ModelError(f"{linear.prefix}: {n} outputs and {k} inputs: expected multiples of {parts}")
        qweight = linear.read("qweight", [(k // parts, n)])
        qzeros = linear.read("qzeros", [(k // size, n // parts)])
        scales_GN = linear.scales("scales", [(k // size, n)])
        if self.checkpoint_format == "gptq":
            qzeros = qzeros + ONE_PER_VALUE[bits]  # in int32, a carry out of the word is lost
        q_NK = unpack_words(qweight.t(), bits)
        order_K = None
        if self.desc_act or "g_idx" in linear:
            order_K = input_order(linear.read("g_idx", [(k,)]), size, f"{linear.prefix}.g_idx")
        if linear.bias_N is None and "bias" in linear and bool(linear.tensors.read(f"{linear.prefix}.bias").any()):
            raise linear.refuse("bias", "not zero, but this architecture has no bias")  # AutoGPTQ adds one of zeros
        return GroupIntWeight(
            q_NK if order_K is None else q_NK[:, order_K].contiguous(),
            scales_GN.t().contiguous(),
            unpack_words(qzeros, bits).t().to(torch.float32).contiguous(),
            size,
            linear.bias_N,
            bits,
            order_K,
        )

    def _scheme(self, prefix: str) -> tuple[int, int | None]:
        """Return bits and group size: those of the first pattern that matches, as in GPTQModel."""
        for override in self.overrides:
            if override.pattern.match(prefix):
                return override.bits, override.group_size
        return self.bits, self.group_size


def _overrides(dynamic: Fields, bits: int, group_size: int | None) -> tuple[Override, ...]:
    """Return the overrides. Patterns with "-:" mark linears that are not quantized, which their tensors show too."""
    found = []
    for text in dynamic.values:
        if text.startswith("-:"):
            continue
        section = dynamic.section(text)
        pattern = dynamic.pattern("patterns", text.removeprefix("+:"))
        own_group = section.group_size() if "group_size" in section.values else group_size
        found.append(Override(pattern, section.one_of("bits", BITS, bits), own_group))
    return tuple(found)
