"""Reader of GGUF checkpoints, llama.cpp's format, from the folders that `checkpoints/gguf_folder.py` makes.

Layouts of blocks of inputs, after ggml's `ggml-common.h` and `ggml-quants.c`; d and m are float16:
Q4_0: d, 32 nibbles; w = (q - 8) d. Q4_1: d, m, 32 nibbles; w = q d + m. Byte i of the nibbles has inputs i and i + 16.
Q5_0, Q5_1: the same with a word of fifth bits before the nibbles; Q5_0 subtracts 16. Q8_0: d, 32 signed bytes; w = q d.
Q2_K to Q6_K: 256 inputs in groups of 16 or 32 with integer scales of their own, which d multiplies, and minima, which m
multiplies; w = q d scale - m minimum (Q2_K, Q4_K, Q5_K), or w = q d scale with signed q (Q3_K, Q6_K).

Here each becomes unsigned integers with a scale and a zero point per group, in 4 bits if they fit, else in 8. A minimum
is a zero point of -minimum / scale, which is no integer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ModelError
from pipeline.weights.config_fields import Fields
from pipeline.weights.packed import GroupIntWeight, LinearWeight
from pipeline.weights.tensor_reader import StoredLinear

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_Integers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Integers (M, G, g) of M blocks, scales and zero points (M, G) in float32."""


@dataclass(frozen=True)
class BlockType:
    """Blocks of `block` inputs in `num_bytes` bytes each; `unpack` returns their integers, from (M, bytes) uint8."""

    block: int
    num_bytes: int
    bits: int
    group_size: int
    unpack: Callable[[torch.Tensor], _Integers]

    @property
    def is_fused(self) -> bool:
        """True if a GPU's fused kernels read the form."""
        return self.bits == 4 and self.group_size >= 32


@dataclass(frozen=True)
class GgufFormat:
    """Linears of a GGUF checkpoint.

    sizes: number of weights of the linears of all layers by type. embedding, head: types of the input and the output
    embedding. bits, group_size: of the quantized type of most weights.
    """

    sizes: dict[str, int]
    embedding: str
    head: str
    has_activations: bool = False
    activations: str | None = None
    has_codes: bool = False
    unused: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "GgufFormat":
        """Read the `quantization_config` of a folder that `gguf_folder` made. Raises ModelError for another."""
        fields, types = Fields(config, path, "quantization_config"), (*BLOCK_TYPES, *FLOAT_TYPES)
        sizes = config.get("sizes")
        if not isinstance(sizes, dict) or not all(name in types and type(n) is int for name, n in sizes.items()):
            raise fields.refuse("sizes", f"numbers of weights of types of {', '.join(types)}")
        return cls(sizes, fields.one_of("embedding", types), fields.one_of("head", types))

    @property
    def bits(self) -> int:
        return 8 if self._main is None else self._main.bits

    @property
    def group_size(self) -> int | None:
        return None if self._main is None else self._main.group_size

    @property
    def _main(self) -> BlockType | None:
        quantized = [name for name in self.sizes if name in BLOCK_TYPES]
        return BLOCK_TYPES[max(quantized, key=self.sizes.__getitem__)] if quantized else None

    @property
    def forms(self) -> set[str]:
        """Forms of the linears, as `weights.formats.linear_forms` names them."""
        return {f"int{BLOCK_TYPES[name].bits}" for name in self.sizes if name in BLOCK_TYPES}

    def mean(self, value_of: Callable[[BlockType | None], float]) -> float:
        """Return the mean of a value over all weights of linears, given that of each type; None: floats."""
        total = sum(number * value_of(BLOCK_TYPES.get(name)) for name, number in self.sizes.items())
        return total / max(1, sum(self.sizes.values()))

    def __str__(self) -> str:
        by_size = sorted(self.sizes, key=lambda name: -self.sizes[name])
        return f"GGUF {', '.join(by_size)}, embedding {self.embedding}"

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read one linear, see `read_gguf`."""
        return read_gguf(linear)


def read_gguf(linear: StoredLinear) -> LinearWeight:
    """Read a linear; dense if it is stored in floats. Raises ModelError if it does not fit the shape."""
    name = next((name for name in BLOCK_TYPES if name in linear), None)
    if name is None:
        return linear.dense()
    kind, (n, k) = BLOCK_TYPES[name], linear.shape_NK
    if k % kind.block:
        raise ModelError(f"{linear.prefix}: {k} inputs are not a multiple of the {kind.block} of a {name} block")
    raw = linear.read(name, [(n, k // kind.block * kind.num_bytes)], (torch.uint8,))
    q_MGg, scale_MG, zero_MG = kind.unpack(raw.reshape(-1, kind.num_bytes))
    scales = scale_MG.view(n, -1), zero_MG.view(n, -1)
    if not bool(torch.isfinite(scales[0]).all() & torch.isfinite(scales[1]).all()):
        raise linear.refuse(name, "contains infinities or NaN, expected finite scales")
    return GroupIntWeight(q_MGg.reshape(n, k), *scales, kind.group_size, linear.bias_N, kind.bits)


class GgufTensors:
    """Tensors of a folder that `gguf_folder` made, by the names that model families use.

    A quantized tensor `x.weight` has the name `x.<type>`: rows of blocks in uint8.
    """

    def __init__(self, folder: Path, table: dict[str, Any], names: Callable[[str], tuple[str, int | None]]) -> None:
        """table: contents of gguf.json. names: see `model.gguf_names`. Raises ModelError if a file is missing or cut
        off."""
        self._permuted, self._offset_norms = table["permuted_heads"], table["norms_have_offset"]
        self._files = [_mapped(folder / name, end) for name, end in table["files"].items()]
        self._home: dict[str, tuple[dict[str, Any], int | None]] = {}
        for tensor in table["tensors"]:
            stem, _, suffix = tensor["name"].rpartition(".")
            suffix = tensor["type"] if suffix == "weight" and tensor["type"] not in FLOAT_TYPES else suffix
            name, num_experts = names(stem)
            for expert in [None] if num_experts is None else range(num_experts):
                self._home[f"{name.format(expert)}.{suffix}"] = tensor, expert

    def keys(self) -> Iterator[str]:
        yield from self._home

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that shares memory with the file, unless its rows are in another order there."""
        tensor, expert = self._home[name]
        start, shape = tensor["start"], list(tensor["shape"])
        raw = self._files[tensor["file"]][start : start + tensor["num_bytes"]]
        kind = FLOAT_TYPES.get(tensor["type"])
        if kind is not None:
            values = (raw if start % kind.itemsize == 0 else raw.clone()).view(kind).view(shape)
        else:
            block = BLOCK_TYPES[tensor["type"]]
            values = raw.view(*shape[:-1], shape[-1] // block.block * block.num_bytes)
        if expert is not None:
            values = values[expert]
        num_heads = self._permuted.get(tensor["name"].split(".")[-2])
        if num_heads is not None:  # llama.cpp rotates pairs of neighbours, so its rows are interleaved
            return values.view(num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values - 1.0 if self._offset_norms and tensor["name"].endswith("_norm.weight") else values


def _mapped(path: Path, end: int) -> torch.Tensor:
    """Map a file that is at least `end` bytes long."""
    size = path.stat().st_size if path.is_file() else 0
    if size < end:
        raise ModelError(f"{path.resolve()}: {size:,} bytes, expected at least {end:,}: the file is missing or cut off")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _floats(raw_MB: torch.Tensor) -> torch.Tensor:
    """Read float16 values (M, B / 2) into float32."""
    return raw_MB.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw_MB: torch.Tensor) -> torch.Tensor:
    """Unpack bytes (M, B): the low halves of all of them, then the high halves."""
    return torch.cat([raw_MB & 15, raw_MB >> 4], dim=-1)


def _bits(raw_MB: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes (M, B) to (M, 8 / bits, B): the lowest `bits` bits of all of them first."""
    return torch.stack([(raw_MB >> at) & ((1 << bits) - 1) for at in range(0, 8, bits)], dim=1)


def _with_minimum(q_MGg: torch.Tensor, scale_MG: torch.Tensor, minimum_MG: torch.Tensor) -> _Integers:
    """Return the form of w = q scale + minimum. A group whose scale is 0 becomes integers 0, zero points -1 and the
    minimum as its scale."""
    is_flat_MG = scale_MG == 0
    zero_MG = torch.where(is_flat_MG, -1.0, -minimum_MG / torch.where(is_flat_MG, 1.0, scale_MG))
    q_MGg = torch.where(is_flat_MG.unsqueeze(-1), 0, q_MGg)
    return q_MGg.to(torch.uint8), torch.where(is_flat_MG, minimum_MG, scale_MG), zero_MG


def _with_zero(q_MGg: torch.Tensor, scale_MG: torch.Tensor, zero: int) -> _Integers:
    return q_MGg, scale_MG, torch.full_like(scale_MG, float(zero))


def _fifth_bits(raw_M4: torch.Tensor) -> torch.Tensor:
    """Return bit i of each word (M, 32), as bit 4."""
    return (_bits(raw_M4, 1).transpose(1, 2).flatten(1) << 4).to(torch.uint8)


def _q4_0(raw: torch.Tensor) -> _Integers:
    return _with_zero(_nibbles(raw[:, 2:]).unsqueeze(1), _floats(raw[:, :2]), 8)


def _q4_1(raw: torch.Tensor) -> _Integers:
    return _with_minimum(_nibbles(raw[:, 4:]).unsqueeze(1), _floats(raw[:, :2]), _floats(raw[:, 2:4]))


def _q5_0(raw: torch.Tensor) -> _Integers:
    return _with_zero((_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])).unsqueeze(1), _floats(raw[:, :2]), 16)


def _q5_1(raw: torch.Tensor) -> _Integers:
    q_M32 = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _with_minimum(q_M32.unsqueeze(1), _floats(raw[:, :2]), _floats(raw[:, 2:4]))


def _q8_0(raw: torch.Tensor) -> _Integers:
    return _with_zero((raw[:, 2:] ^ 128).unsqueeze(1), _floats(raw[:, :2]), 128)


def _q2_k(raw: torch.Tensor) -> _Integers:
    d_M1, m_M1, scales_MG = _floats(raw[:, 80:82]), _floats(raw[:, 82:84]), raw[:, :16]
    q_MGg = _bits(raw[:, 16:80].reshape(-1, 32), 2).reshape(len(raw), 16, 16)
    return _with_minimum(q_MGg, d_M1 * (scales_MG & 15), -m_M1 * (scales_MG >> 4))


def _q3_k(raw: torch.Tensor) -> _Integers:
    high_M = _bits(raw[:, :32], 1).reshape(len(raw), 16, 16) << 2
    q_MGg = _bits(raw[:, 32:96].reshape(-1, 32), 2).reshape(len(raw), 16, 16) | high_M
    low_MG, high_MG = _nibbles(raw[:, 96:104]), _bits(raw[:, 104:108], 2).flatten(1)
    scale_MG = (low_MG | (high_MG << 4)).to(torch.float32) - 32
    return _with_zero(q_MGg, _floats(raw[:, 108:110]) * scale_MG, 4)


def _six_bit_scales(raw_M12: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight 6-bit scales and the eight 6-bit minima of Q4_K and Q5_K."""
    scale_M4, minimum_M4, both_M4 = raw_M12.split(4, dim=1)
    scale = torch.cat([scale_M4 & 63, (both_M4 & 15) | (scale_M4 >> 6 << 4)], dim=1)
    return scale, torch.cat([minimum_M4 & 63, (both_M4 >> 4) | (minimum_M4 >> 6 << 4)], dim=1)


def _k_with_minima(raw: torch.Tensor, q_MGg: torch.Tensor) -> _Integers:
    scale_MG, minimum_MG = _six_bit_scales(raw[:, 4:16])
    return _with_minimum(q_MGg, _floats(raw[:, :2]) * scale_MG, -_floats(raw[:, 2:4]) * minimum_MG)


def _q4_k(raw: torch.Tensor) -> _Integers:
    return _k_with_minima(raw, _bits(raw[:, 16:].reshape(-1, 32), 4).reshape(len(raw), 8, 32))


def _q5_k(raw: torch.Tensor) -> _Integers:
    low_MGg = _bits(raw[:, 48:].reshape(-1, 32), 4).reshape(len(raw), 8, 32)
    return _k_with_minima(raw, low_MGg | (_bits(raw[:, 16:48], 1) << 4))


def _q6_k(raw: torch.Tensor) -> _Integers:
    low = _bits(raw[:, :128].reshape(-1, 64), 4).reshape(len(raw), 8, 32)
    high = _bits(raw[:, 128:192].reshape(-1, 32), 2).reshape(len(raw), 8, 32)
    scale_MG = raw[:, 192:208].contiguous().view(torch.int8).to(torch.float32) * _floats(raw[:, 208:210])
    return _with_zero((low | (high << 4)).view(len(raw), 16, 16), scale_MG, 32)


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, 4, 32, _q4_0),
    "Q4_1": BlockType(32, 20, 4, 32, _q4_1),
    "Q5_0": BlockType(32, 22, 8, 32, _q5_0),
    "Q5_1": BlockType(32, 24, 8, 32, _q5_1),
    "Q8_0": BlockType(32, 34, 8, 32, _q8_0),
    "Q2_K": BlockType(256, 84, 4, 16, _q2_k),
    "Q3_K": BlockType(256, 110, 4, 16, _q3_k),
    "Q4_K": BlockType(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockType(256, 176, 8, 32, _q5_k),
    "Q6_K": BlockType(256, 210, 8, 16, _q6_k),
}
"""Supported types of quantized tensors, by ggml's names. `bits` is of the form that kernels read."""
