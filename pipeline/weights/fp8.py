"""Reader of checkpoints with float8_e4m3fn weights.

Layout: `weight` (N, K) float8_e4m3fn, and its scales in float32, float16, bfloat16 or float8_e8m0fnu: as
`weight_scale_inv` (N/b, K/b), rounded up, for blocks of b x b (DeepSeek, transformers' `FineGrainedFP8Config`; named
after the inverse of what the weight was divided by), or as `weight_scale`, () or (1,) for the whole weight, (N,) or
(N, 1) for one per output. weight = value * scale. Scales of activations (`activation_scheme: static`) are ignored:
activations are rounded with scales of their own values (`kernels/activations/fp8.py`), which saturate no value.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.weights.config_fields import Fields
from pipeline.weights.packed import Fp8Weight, LinearWeight
from pipeline.weights.tensor_reader import FLOATS, StoredLinear

SCALES = ("weight_scale_inv", "weight_scale")
SCALE_TYPES = (*FLOATS, torch.float8_e8m0fnu)
CACHE_SCALES = ("k_scale", "v_scale", "q_scale")
"""Scales of a KV cache, which a checkpoint may have without quantized weights. Ours are made for each token."""
ACTIVATION_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True)
class Fp8Format:
    """Validated quantization_config of an fp8 checkpoint. `block` None: one scale per weight or per output."""

    block: tuple[int, int] | None
    bits: int = 8
    has_activations: bool = True
    activations: str | None = "fp8"
    has_codes: bool = False
    unused: tuple[str, ...] = ACTIVATION_SCALES

    @property
    def group_size(self) -> int | None:
        return None if self.block is None else self.block[1]

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "Fp8Format":
        """Read the `quantization_config` of `path`. Raises ModelError naming an unsupported field."""
        options = Fields(config, path, "quantization_config")
        options.one_of("quant_method", ("fp8",))
        options.one_of("fmt", ("e4m3",), "e4m3")
        options.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        for name in ("modules_to_not_convert", "ignored_layers"):
            options.names(name)  # only checked: the type of such a weight shows that it is not quantized
        return cls(block_of(options, "weight_block_size"))

    def __str__(self) -> str:
        return fp8_text(self.block)

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read one linear; dense if its weight has no scales. Raises ModelError if it does not fit the layout."""
        for suffix in SCALES:
            if suffix in linear:
                return read_float8(linear, suffix, self.block)
        return linear.dense()


def fp8_text(block: tuple[int, int] | None) -> str:
    """Describe the scales of fp8 weights."""
    return "fp8 (e4m3)" if block is None else f"fp8 (e4m3), blocks of {block[0]}x{block[1]}"


def block_of(options: Fields, name: str) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a block; None without such a key."""
    block = options.values.get(name)
    if block is None:
        return None
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= 1 << 17 and size % 8 == 0 for size in block):
        raise options.refuse(name, "two multiples of 8, such as [128, 128]")
    return block[0], block[1]


def read_float8(linear: StoredLinear, scale: str, block: tuple[int, int] | None) -> Fp8Weight:
    """Read one linear with its scales in `prefix`.<scale>; `block` as in `Fp8Format`."""
    n, k = linear.shape_NK
    value_NK = linear.read("weight", [(n, k)], [torch.float8_e4m3fn])
    if bool(((value_NK.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise linear.refuse("weight", "contains NaN")
    shapes = [(), (1,), (1, 1), (n,), (n, 1)] if block is None else [(-(-n // block[0]), -(-k // block[1]))]
    scales = linear.scales(scale, shapes, SCALE_TYPES)
    if block is not None:
        return Fp8Weight(value_NK, scales, block, linear.bias_N)
    return Fp8Weight(value_NK, scales.view(-1, 1), (n if scales.numel() == 1 else 1, k), linear.bias_N)
