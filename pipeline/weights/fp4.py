"""Readers of 4-bit floats (e2m1) with a scale per group of inputs. Activations are not rounded.

Layouts for N outputs, K inputs, G groups, E experts: a byte has two codes, the one of the even input in its low bits.
MXFP4 (OCP Microscaling Formats 1.0): groups of 32 inputs, scales (N, G) uint8 or float8_e8m0fnu.
NVFP4: groups of 16 inputs, scales (N, G) float8_e4m3fn, and a scale for the whole weight.
gpt-oss (`quant_method: mxfp4`): all experts of a layer in one tensor, `<linear>_blocks` (E, N, G, 16) uint8 and
`<linear>_scales` (E, N, G) uint8. Its other linears are not quantized.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.weights.config_fields import Fields
from pipeline.weights.packed import CodebookWeight, LinearWeight
from pipeline.weights.tensor_reader import E8M0, StoredLinear, unpack_nibbles

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_GROUP, NV_GROUP = 32, 16


@dataclass(frozen=True)
class Mxfp4Format:
    """Validated quantization_config of a checkpoint whose experts are MXFP4, see `read_expert_blocks`."""

    bits: int = 4
    group_size: int = MX_GROUP
    has_activations: bool = False
    activations: str | None = None
    has_codes: bool = True
    unused: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "Mxfp4Format":
        """Read the `quantization_config` of `path`. Raises ModelError naming an unsupported field."""
        options = Fields(config, path, "quantization_config")
        options.one_of("quant_method", ("mxfp4",))
        options.names("modules_to_not_convert")  # only checked: the names of tensors show which ones are quantized
        return cls()

    def __str__(self) -> str:
        return f"mxfp4 experts, groups of {MX_GROUP}"

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read a linear that belongs to no expert. Raises ModelError if it is quantized."""
        return linear.dense()


def read_mxfp4(linear: StoredLinear) -> CodebookWeight:
    """Read a linear of compressed-tensors' `mxfp4-pack-quantized`. Raises ModelError if it does not fit the layout."""
    n, size = linear.shape_NK[0], linear.group_size(MX_GROUP)
    scales_NG = linear.scales("weight_scale", [(n, linear.shape_NK[1] // size)], E8M0)
    return _coded(linear, "weight_packed", scales_NG, size)


def read_nvfp4(linear: StoredLinear, codes: str, whole_scale: str, divides: bool) -> CodebookWeight:
    """Read a linear whose codes are in `prefix`.<codes>, and the scale of the whole weight in `prefix`.<whole_scale>.
    divides: the other scales are divided by that one, not multiplied. Raises ModelError if it does not fit the layout.
    """
    n, size = linear.shape_NK[0], linear.group_size(NV_GROUP)
    scales_NG = linear.scales("weight_scale", [(n, linear.shape_NK[1] // size)], [torch.float8_e4m3fn])
    whole = linear.scales(whole_scale, [(), (1,)])
    if float(whole) <= 0:
        raise linear.refuse(whole_scale, f"is {float(whole)}, expected a positive scale")
    return _coded(linear, codes, scales_NG / whole if divides else scales_NG * whole, size)


def read_expert_blocks(
    experts: StoredLinear, name: str, num_experts: int, bias_EN: torch.Tensor | None = None
) -> list[CodebookWeight]:
    """Read one linear of all experts, `prefix`.<name>_blocks and `prefix`.<name>_scales; `shape_NK` is that of one
    expert. Codes are unpacked expert by expert, because that temporarily takes 3 bytes per weight. Raises ModelError if
    a tensor's type or shape does not fit."""
    n, k = experts.shape_NK
    groups = k // experts.group_size(MX_GROUP)
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    block_ENGb = experts.read(blocks, [(num_experts, n, groups, MX_GROUP // 2)], [torch.uint8])
    scales_ENG = experts.scales(scales, [(num_experts, n, groups)], E8M0)
    codebook_C = torch.tensor(E2M1, device=block_ENGb.device)
    bias = [None] * num_experts if bias_EN is None else bias_EN
    return [
        CodebookWeight(unpack_nibbles(block_NGb.view(n, k // 2)), scales_NG, codebook_C, MX_GROUP, bias_N)
        for block_NGb, scales_NG, bias_N in zip(block_ENGb.contiguous(), scales_ENG, bias, strict=True)
    ]


def _coded(linear: StoredLinear, codes: str, scales_NG: torch.Tensor, size: int) -> CodebookWeight:
    n, k = linear.shape_NK
    code_NK = unpack_nibbles(linear.read(codes, [(n, k // 2)], [torch.uint8]))
    return CodebookWeight(code_NK, scales_NG, torch.tensor(E2M1, device=code_NK.device), size, linear.bias_N)
