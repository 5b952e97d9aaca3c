"""Helpers of the format readers: tensors checked by name, unpacking of words, grouping of inputs.

Shapes: R rows, W words of 32 bits, N output features, K input features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.errors import ModelError
from pipeline.weights.packed import DenseWeight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
"""Types of MX formats' scales, which are powers of two: publishers store their exponents as uint8."""


class Tensors(Protocol):
    """Named tensors of a checkpoint, on the device on which they are unpacked.

    `take` raises ModelError for an unknown name, `read_float` also for another shape or a type other than FLOATS.
    """

    def __contains__(self, name: str) -> bool: ...
    def read(self, name: str) -> torch.Tensor: ...
    def read_float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class StoredLinear:
    """One linear of a checkpoint: `shape_NK` (outputs, inputs), and tensors named `prefix`.<suffix>."""

    prefix: str
    shape_NK: tuple[int, int]
    tensors: Tensors
    bias_N: torch.Tensor | None = None

    def __contains__(self, suffix: str) -> bool:
        return f"{self.prefix}.{suffix}" in self.tensors

    def dense(self) -> DenseWeight:
        """Read a linear that is not quantized."""
        return DenseWeight(self.tensors.read_float(f"{self.prefix}.weight", self.shape_NK), self.bias_N)

    def read(
        self, suffix: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype] = (torch.int32,)
    ) -> torch.Tensor:
        """Return a tensor. Raises ModelError if its shape or type is not one of those given."""
        tensor = self.tensors.read(f"{self.prefix}.{suffix}")
        if tuple(tensor.shape) not in shapes or tensor.dtype not in dtypes:
            raise self.refuse(
                suffix,
                f"found {tuple(tensor.shape)} {tensor.dtype}, expected {' or '.join(map(str, shapes))} in one of "
                f"{', '.join(str(d) for d in dtypes)}",
            )
        return tensor

    def scales(
        self, suffix: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype] = FLOATS
    ) -> torch.Tensor:
        """Return scales in float32, uint8 as in E8M0. Raises ModelError like `read`, and for infinities and NaN."""
        stored = self.read(suffix, shapes, dtypes)
        scales = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise self.refuse(suffix, "contains infinities or NaN, expected finite scales")
        return scales

    def group_size(self, given: int | None) -> int:
        """Return the inputs per group: all inputs if `given` is None. Raises ModelError if they do not divide
        evenly."""
        inputs = self.shape_NK[1]
        if given is not None and inputs % given:
            raise ModelError(f"{self.prefix}: {inputs} inputs are not a multiple of the group size {given}")
        return given or inputs

    def refuse(self, suffix: str, reason: str) -> ModelError:
        return ModelError(f"{self.prefix}.{suffix}: {reason}")


def unpack_words(word_RW: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack (R, W) int32 to (R, W * 32 / bits) uint8, the values of a word from its lowest bits on. bits: 4 or 8.

    Processors and GPUs are little-endian, like checkpoints.
    """
    byte_RB = word_RW.contiguous().view(torch.uint8)
    return byte_RB if bits == 8 else unpack_nibbles(byte_RB)


def unpack_nibbles(byte_RB: torch.Tensor) -> torch.Tensor:
    """Unpack (R, B) uint8 to (R, 2 B) uint8, the low half of a byte first.

    Temporarily takes 3 bytes per value on the bytes' device: a byte is spread over 16 bits, whose two bytes are its
    values.
    """
    pair_RB = byte_RB.to(torch.int16)
    pair_RB |= pair_RB << 4
    return pair_RB.bitwise_and_(0x0F0F).view(torch.uint8)


def unpack_words_transposed(word_RW: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Unpack (R, W) int32 of eight 4-bit values each to (8 W, R) uint8.

    Part i of a word, counted from its lowest bits, is its value order[i]. It transposes words, not values, of which
    there are eight times as many.
    """
    word_WR = word_RW.t().contiguous()
    value_WpR = torch.empty(len(word_WR), len(order), len(word_RW), dtype=torch.uint8, device=word_RW.device)
    for part, value in enumerate(order):
        value_WpR[:, value] = (word_WR >> (4 * part)).bitwise_and_(15)
    return value_WpR.view(-1, len(word_RW))


def input_order(group_K: torch.Tensor, group_size: int, name: str) -> torch.Tensor | None:
    """Return the inputs in the order of their groups, (K,) int64; None if that is their natural order.

    `group_K` has the group of each input. Raises ModelError unless each group has `group_size` inputs.
    """
    inputs = len(group_K)
    if torch.equal(group_K, torch.arange(inputs, dtype=group_K.dtype, device=group_K.device) // group_size):
        return None
    groups = inputs // group_size
    low, high = int(group_K.min()), int(group_K.max())
    if low < 0 or high >= groups or not bool((group_K.to(torch.int64).bincount(minlength=groups) == group_size).all()):
        raise ModelError(f"{name}: expected {group_size} inputs in each of the groups 0 to {groups - 1}")
    return group_K.to(torch.int64).argsort(stable=True)


def groups_text(group_size: int | None) -> str:
    """Describe the groups of weights."""
    return "a scale for each output" if group_size is None else f"groups of {group_size}"
