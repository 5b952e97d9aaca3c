"""GPTQ checkpoints (AutoGPTQ, GPTQModel, auto-round, transformers) -> packed weights.

Layout (GPTQModel, `gptqmodel/nn_modules/qlinear/torch.py`) for K inputs, N outputs, groups of g, p = 32 / bits values a
word from its lowest bits on: `qweight` (K/p, N) int32, word r of an output its inputs p r to p r + p - 1;
`qzeros` (K/g, N/p) int32, the outputs side by side; `scales` (K/g, N); `g_idx` (K,) int32, the group of each input,
which is not k // g where the inputs were quantized in the order of their activations (`desc_act`).
weight = (q - z) * scale.

Zeros: of `checkpoint_format: gptq_v2` as they are; of `gptq`, the older one, z - 1 in every place. GPTQModel takes 1
from each place of the whole word, borrowing, so adding it the same way gives back a z of 0 too.
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
ONE_IN_EACH_PLACE = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Override:
    """Other bits or groups for the linears whose name `pattern` matches from its start (GPTQModel's `dynamic`)."""

    pattern: re.Pattern[str]
    bits: int
    group_size: int | None


@dataclass(frozen=True)
class GptqFormat:
    """The quantization_config of a GPTQ checkpoint, checked. `group_size` None: one group of all inputs."""

    bits: int
    group_size: int | None
    desc_act: bool
    checkpoint_format: str
    overrides: tuple[Override, ...] = ()
    has_activations: bool = False
    unused: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "GptqFormat":
        """Read the `quantization_config` of `path`. Raises ModelError naming the field that is not served."""
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
        """One linear: dense where the checkpoint has no quantized tensors of that name.

        Raises ModelError when a tensor's type or shape is not the layout's for the linear's shape, or when groups are
        not of one size.
        """
        if not any(suffix in linear for suffix in SUFFIXES):
            return linear.dense()
        bits, group_size = self._scheme(linear.prefix)
        (n, k), parts = linear.shape_NK, 32 // bits
        size = linear.group_size(group_size)
        if n % parts or k % parts:
            raise ModelError(f"{linear.prefix}: {n} outputs and {k} inputs do not divide into packs of {parts}")
        qweight = linear.take("qweight", [(k // parts, n)])
        qzeros = linear.take("qzeros", [(k // size, n // parts)])
        scales_GN = linear.scales("scales", [(k // size, n)])
        if self.checkpoint_format == "gptq":
            qzeros = qzeros + ONE_IN_EACH_PLACE[bits]  # in int32, a carry out of the word is lost
        q_NK = unpack_words(qweight.t(), bits)
        order_K = None
        if self.desc_act or "g_idx" in linear:
            order_K = input_order(linear.take("g_idx", [(k,)]), size, f"{linear.prefix}.g_idx")
        if linear.bias_N is None and "bias" in linear and bool(linear.tensors.take(f"{linear.prefix}.bias").any()):
            raise linear.refuse("bias", "not zero, where this architecture has no bias")  # AutoGPTQ adds one of zeros
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
        """Bits and group size: those of the first pattern that matches, as GPTQModel takes them."""
        for own in self.overrides:
            if own.pattern.match(prefix):
                return own.bits, own.group_size
        return self.bits, self.group_size


def _overrides(dynamic: Fields, bits: int, group_size: int | None) -> tuple[Override, ...]:
    """Patterns that begin with "-:" are of linears left as they are, which the tensors say too."""
    found = []
    for text in dynamic.values:
        if text.startswith("-:"):
            continue
        own = dynamic.section(text)
        pattern = dynamic.pattern("patterns", text.removeprefix("+:"))
        own_group = own.group_size() if "group_size" in own.values else group_size
        found.append(Override(pattern, own.one_of("bits", BITS, bits), own_group))
    return tuple(found)
