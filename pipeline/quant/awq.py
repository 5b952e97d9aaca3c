"""AutoAWQ GEMM checkpoints -> packed weights.

Layout (AutoAWQ, `awq/modules/linear/gemm.py`): for a linear of K inputs and N outputs, `qweight` (K, N/8) int32,
`qzeros` (K/g, N/8) int32, `scales` (K/g, N); nibble i of an int32 holds output column ORDER[i] of its eight;
weight[k, n] = (q - z) * scale.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.errors import ModelError
from pipeline.quant.packed import GroupIntWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP_SIZES = (32, 64, 128)
SUFFIXES = ("qweight", "qzeros", "scales")


class Tensors(Protocol):
    """Named tensors of a checkpoint; `take` raises ModelError for a name it does not have."""

    def __contains__(self, name: str) -> bool: ...
    def take(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class AwqFormat:
    """The quantization_config of an AutoAWQ checkpoint, checked."""

    group_size: int
    zero_point: bool
    modules_to_not_convert: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "AwqFormat":
        """Read the `quantization_config` of `path`. Raises ModelError naming the field that is not served."""

        def check(name: str, value: object, served: tuple[object, ...]) -> None:
            if value not in served:
                raise ModelError(
                    f"{path}: quantization_config.{name} = {value!r:.200} is not served; AWQ checkpoints need "
                    f"{name} in {served}"
                )

        check("quant_method", config.get("quant_method"), ("awq",))
        check("bits", config.get("bits", config.get("w_bit")), (4,))
        check("version", str(config.get("version", "gemm")).lower(), ("gemm",))
        group = config.get("group_size", config.get("q_group_size", 128))
        check("group_size", group, GROUP_SIZES)
        skip = config.get("modules_to_not_convert") or []
        if not isinstance(skip, list) or not all(isinstance(name, str) for name in skip):
            raise ModelError(
                f"{path}: quantization_config.modules_to_not_convert = {skip!r:.200}: expected a list of names"
            )
        zero_point = config.get("zero_point", True)
        check("zero_point", zero_point, (True, False))
        return cls(int(group), bool(zero_point), tuple(skip))


def unpack_columns(packed: torch.Tensor) -> torch.Tensor:
    """(rows, N/8) int32 -> (rows, N) uint8 in true column order."""
    shifts = torch.tensor([4 * ORDER.index(column) for column in range(8)], dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF
    return nibbles.view(packed.shape[0], -1).to(torch.uint8)


def read_linear(
    prefix: str, shape_NK: tuple[int, int], awq: AwqFormat, tensors: Tensors, bias_N: torch.Tensor | None
) -> GroupIntWeight:
    """Build one linear from the tensors `prefix`.qweight / .qzeros / .scales.

    A symmetric checkpoint (`zero_point` false) has zeros of 8; its qzeros are absent or empty (all bits zero).
    Raises ModelError when a tensor's type or shape is not the layout's for `shape_NK` (N, K).
    """
    n, k = shape_NK
    g = awq.group_size
    if k % g or n % 8:
        raise ModelError(f"{prefix}: {k} inputs and {n} outputs do not divide into groups of {g} and packs of 8")
    qweight = _expect(tensors.take(f"{prefix}.qweight"), f"{prefix}.qweight", (k, n // 8), (torch.int32,))
    float_types = (torch.float16, torch.bfloat16, torch.float32)
    scales = _expect(tensors.take(f"{prefix}.scales"), f"{prefix}.scales", (k // g, n), float_types)
    zeros_GN = torch.full((k // g, n), 8.0)
    if awq.zero_point or f"{prefix}.qzeros" in tensors:
        qzeros = _expect(tensors.take(f"{prefix}.qzeros"), f"{prefix}.qzeros", (k // g, n // 8), (torch.int32,))
        if awq.zero_point or bool(qzeros.any()):
            zeros_GN = unpack_columns(qzeros).to(torch.float32)
    return GroupIntWeight(
        unpack_columns(qweight).t().contiguous(),
        scales.to(torch.float32).t().contiguous(),
        zeros_GN.t().contiguous(),
        g,
        bias_N,
    )


def _expect(tensor: torch.Tensor, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise ModelError(
            f"{name}: found {tuple(tensor.shape)} {tensor.dtype}, expected {shape} in one of "
            f"{', '.join(str(d) for d in dtypes)}"
        )
    return tensor
