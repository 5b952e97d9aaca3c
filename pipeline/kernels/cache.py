"""Paged KV cache of one layer, in the model's type or in 8 bits.

The 8-bit form ("fp8") of the vector of one token and KV head, as a cache in the model's type would hold it, consists
of float8_e4m3fn codes (4 exponent bits, 3 mantissa bits: Micikevicius et al. 2022, "FP8 Formats for Deep Learning")
and one float32 scale:

    scale = max(max(|x|) * (1 / 448), 2^-126)            code = x * (1 / scale), to the nearest, ties to even
    value read: code * scale

448 is the largest code. Everything is computed in float32. The scale depends on the vector alone: it needs no
calibration, nothing saturates, and the content of a block does not depend on the step that wrote it, so blocks can be
shared, recomputed and verified like those of other types. A vector with a NaN or an infinity has the codes 0 and the
scale NaN, so all of it reads as NaN, and no kernel ever encounters a NaN code.
"""

from dataclasses import dataclass

import torch

from pipeline.kernels.memory import zeros

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
_CODE_OF_ONE = 0x38


@dataclass(frozen=True)
class LayerCache:
    """Paged KV cache of one layer. Suffixes: see `kernels/contract.py`.

    The scales are float32, and None unless keys and values are FP8. The scales of one block and KV head are contiguous,
    in the order in which attention reads them.
    """

    k_CBKD: torch.Tensor
    v_CBKD: torch.Tensor
    k_scale_CKB: torch.Tensor | None = None
    v_scale_CKB: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "LayerCache":
        """Allocate a zeroed cache. `dtype` is the model's type or FP8."""
        shape = num_blocks, block_size, num_kv_heads, head_dim
        keys, values = (zeros(shape, dtype, device) for _ in range(2))
        if dtype != FP8:
            return cls(keys, values)
        scales = num_blocks, num_kv_heads, block_size
        k_scale_CKB, v_scale_CKB = (zeros(scales, torch.float32, device) for _ in range(2))
        return cls(keys, values, k_scale_CKB, v_scale_CKB)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        scales = self.k_scale_CKB, self.v_scale_CKB
        return self.k_CBKD, self.v_CBKD, *(scale for scale in scales if scale is not None)

    def fill(self, blocks: list[int], value: float) -> None:
        """Overwrite whole blocks so that every key and value in them reads as `value`."""
        if self.k_scale_CKB is None or self.v_scale_CKB is None:
            self.k_CBKD[blocks] = value
            self.v_CBKD[blocks] = value
            return
        for codes, scale in ((self.k_CBKD, self.k_scale_CKB), (self.v_CBKD, self.v_scale_CKB)):
            codes.view(torch.uint8)[blocks] = _CODE_OF_ONE
            scale[blocks] = value


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key (or value) in one KV head of a cache of this type, including its scale."""
    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == FP8 else 0)
