"""AutoAWQ checkpoints -> packed weights.

Layouts for a linear of K inputs, N outputs and groups of g; weight = (q - z) * scale.

`gemm` (AutoAWQ, `awq/modules/linear/gemm.py`): `qweight` (K, N/8) int32, `qzeros` (K/g, N/8) int32, `scales` (K/g, N);
part i of an int32 holds output ORDER[i] of its eight.
`gemv` (`gemv.py`): `qweight` (N, K/8) int32, eight inputs from the lowest bits on; `qzeros` (N, W) int32, eight groups
a word, `scales` (N, 8 W), both filled up to W words of groups, a multiple of 128 / g where g is less.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ModelError
from pipeline.weights.packed import GroupIntWeight, LinearWeight
from pipeline.weights.tensor_reader import (
    Options,
    Tensors,
    group_of,
    groups_text,
    take_as,
    take_dense,
    take_scales,
    unpack_words,
)

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP_SIZES = (-1, 32, 64, 128)
SUFFIXES = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class AwqFormat:
    """The quantization_config of an AutoAWQ checkpoint, checked. `group_size` None: one group of all inputs."""

    group_size: int | None
    zero_point: bool
    version: str = "gemm"
    bits: int = 4
    unused: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "AwqFormat":
        """Read the `quantization_config` of `path`. Raises ModelError naming the field that is not served."""
        older = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")}
        options = Options({**older, **config, "version": str(config.get("version", "gemm")).lower()}, path)
        options.one_of("quant_method", ("awq",))
        options.one_of("bits", (4,))
        options.names("modules_to_not_convert")  # such a linear has no qweight
        group = options.one_of("group_size", GROUP_SIZES, 128)
        return cls(
            None if group == -1 else group,
            options.one_of("zero_point", (True, False), True),
            options.one_of("version", ("gemm", "gemv")),
        )

    def __str__(self) -> str:
        return f"AWQ int4, {groups_text(self.group_size)}"

    def read_linear(
        self, prefix: str, shape_NK: tuple[int, int], tensors: Tensors, bias_N: torch.Tensor | None
    ) -> LinearWeight:
        """One linear: dense where the checkpoint has no quantized tensors of that name.

        A symmetric checkpoint (`zero_point` false) has zeros of 8; its qzeros are absent or empty (all bits zero).
        Raises ModelError when a tensor's type or shape is not the layout's for `shape_NK` (N, K).
        """
        if not any(f"{prefix}.{suffix}" in tensors for suffix in SUFFIXES):
            return take_dense(prefix, shape_NK, tensors, bias_N)
        n, k = shape_NK
        size = group_of(shape_NK, self.group_size, prefix)
        if n % 8 or k % 8:
            raise ModelError(f"{prefix}: {n} outputs and {k} inputs do not divide into packs of 8")
        read = self._read_gemv if self.version == "gemv" else self._read_gemm
        q_NK, scales_NG, zeros_NG = read(prefix, shape_NK, size, tensors)
        if zeros_NG is None or not (self.zero_point or bool(zeros_NG.any())):
            zeros_NG = torch.full_like(scales_NG, 8.0)
        return GroupIntWeight(q_NK, scales_NG.contiguous(), zeros_NG.to(torch.float32).contiguous(), size, bias_N)

    def _read_gemm(
        self, prefix: str, shape_NK: tuple[int, int], size: int, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        n, k = shape_NK
        qweight = take_as(tensors, f"{prefix}.qweight", [(k, n // 8)], [torch.int32])
        scales_GN = take_scales(tensors, f"{prefix}.scales", [(k // size, n)])
        zeros_NG = None
        if self._has_zeros(prefix, tensors):
            qzeros = take_as(tensors, f"{prefix}.qzeros", [(k // size, n // 8)], [torch.int32])
            zeros_NG = unpack_columns(qzeros).t()
        return unpack_columns(qweight).t().contiguous(), scales_GN.t(), zeros_NG

    def _read_gemv(
        self, prefix: str, shape_NK: tuple[int, int], size: int, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        n, k = shape_NK
        groups, multiple = k // size, max(1, 128 // size)
        words = -(-groups // (8 * multiple)) * multiple
        qweight = take_as(tensors, f"{prefix}.qweight", [(n, k // 8)], [torch.int32])
        scales_NG = take_scales(tensors, f"{prefix}.scales", [(n, 8 * words)])[:, :groups]
        zeros_NG = None
        if self._has_zeros(prefix, tensors):
            qzeros = take_as(tensors, f"{prefix}.qzeros", [(n, words)], [torch.int32])
            zeros_NG = unpack_words(qzeros, 4)[:, :groups]
        return unpack_words(qweight, 4), scales_NG, zeros_NG

    def _has_zeros(self, prefix: str, tensors: Tensors) -> bool:
        return self.zero_point or f"{prefix}.qzeros" in tensors


def unpack_columns(packed: torch.Tensor) -> torch.Tensor:
    """(rows, N/8) int32 of the gemm layout -> (rows, N) uint8 in true column order."""
    return unpack_words(packed, 4, ORDER)
