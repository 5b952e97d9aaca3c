"""Reader of AutoAWQ checkpoints.

Layouts for a linear of K inputs, N outputs and groups of g; weight = (q - z) * scale.

`gemm` (AutoAWQ, `awq/modules/linear/gemm.py`): `qweight` (K, N/8) int32, `qzeros` (K/g, N/8) int32, `scales` (K/g, N);
part i of an int32 is output ORDER[i] of its eight.
`gemv` (`gemv.py`): `qweight` (N, K/8) int32, eight inputs from the lowest bits on; `qzeros` (N, W) int32, eight groups
per word, `scales` (N, 8 W), both padded to W words of groups, a multiple of 128 / g if g is smaller.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ModelError
from pipeline.weights.config_fields import Fields
from pipeline.weights.packed import GroupIntWeight, LinearWeight
from pipeline.weights.tensor_reader import StoredLinear, groups_text, unpack_words, unpack_words_transposed

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP_SIZES = (-1, 32, 64, 128)
SUFFIXES = ("qweight", "qzeros", "scales")

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Integers (N, K), scales and zeros (N, G)."""


@dataclass(frozen=True)
class AwqFormat:
    """Validated quantization_config of an AutoAWQ checkpoint. `group_size` None: one group of all inputs."""

    group_size: int | None
    zero_point: bool
    version: str = "gemm"
    bits: int = 4
    has_activations: bool = False
    activations: str | None = None
    has_codes: bool = False
    unused: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "AwqFormat":
        """Read the `quantization_config` of `path`. Raises ModelError naming an unsupported field."""
        older = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size")}
        options = Fields(
            {**older, **config, "version": str(config.get("version", "gemm")).lower()}, path, "quantization_config"
        )
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

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read one linear; dense if the checkpoint has no quantized tensors of that name.

        In a symmetric checkpoint (`zero_point` false) zeros are 8; its qzeros are absent or empty (all bits zero).
        Raises ModelError if a tensor's type or shape does not fit the layout and the linear's shape.
        """
        if not any(suffix in linear for suffix in SUFFIXES):
            return linear.dense()
        n, k = linear.shape_NK
        size = linear.group_size(self.group_size)
        if n % 8 or k % 8:
            raise ModelError(f"{linear.prefix}: {n} outputs and {k} inputs: expected multiples of 8")
        read = _read_gemv if self.version == "gemv" else _read_gemm
        q_NK, scales_NG, zeros_NG = read(linear, size, self.zero_point or "qzeros" in linear)
        if zeros_NG is None or not (self.zero_point or bool(zeros_NG.any())):
            zeros_NG = torch.full_like(scales_NG, 8.0)
        zeros_NG = zeros_NG.to(torch.float32).contiguous()
        return GroupIntWeight(q_NK, scales_NG.contiguous(), zeros_NG, size, linear.bias_N)


def _read_gemm(linear: StoredLinear, size: int, has_zeros: bool) -> Parts:
    n, k = linear.shape_NK
    q_NK = unpack_words_transposed(linear.read("qweight", [(k, n // 8)]), ORDER)
    scales_GN = linear.scales("scales", [(k // size, n)])
    zeros_NG = None
    if has_zeros:
        zeros_NG = unpack_words_transposed(linear.read("qzeros", [(k // size, n // 8)]), ORDER)
    return q_NK, scales_GN.t(), zeros_NG


def _read_gemv(linear: StoredLinear, size: int, has_zeros: bool) -> Parts:
    n, k = linear.shape_NK
    groups, multiple = k // size, max(1, 128 // size)
    words = -(-groups // (8 * multiple)) * multiple
    q_NK = unpack_words(linear.read("qweight", [(n, k // 8)]), 4)
    scales_NG = linear.scales("scales", [(n, 8 * words)])[:, :groups]
    zeros_NG = unpack_words(linear.read("qzeros", [(n, words)]), 4)[:, :groups] if has_zeros else None
    return q_NK, scales_NG, zeros_NG
