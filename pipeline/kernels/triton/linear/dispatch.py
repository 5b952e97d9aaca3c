"""Linears on a GPU. 4-bit and fp8 weights have two paths: the fused kernel for few tokens, cuBLAS on 16-bit weights for
many.

With few tokens a linear takes as long as reading its weight, so a quarter of the bytes is up to four times as fast.
With many the multiplication dominates: cuBLAS on 16-bit weights is up to twice as fast as a product that unpacks. Both
paths compute the same, except that cuBLAS reads weights rounded to 16 bits.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F

from pipeline.kernels.linears import Linear, Workspace
from pipeline.kernels.triton.launch import CompileTarget
from pipeline.kernels.triton.linear import e4m3, int4
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.kernels.triton.linear.e4m3 import TiledE4m3
from pipeline.kernels.triton.linear.int4 import TiledInt4
from pipeline.weights.packed import Fp8Weight, GroupIntWeight, LinearWeight


class DequantBuffer(Workspace):
    """Workspace for one 16-bit weight, shared by all linears of a model, which use it in turn on one stream."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._buffer.numel() * self._buffer.element_size()

    def reserve(self, num_outputs: int, num_inputs: int) -> None:
        """Make room for a weight of this shape. Call it only at load: it may move the memory, which breaks graphs."""
        if num_outputs * num_inputs > self._buffer.numel():
            self._buffer = self._buffer.new_empty(num_outputs * num_inputs)

    def weight(self, num_outputs: int, num_inputs: int) -> torch.Tensor:
        """Return an (N, K) view of the workspace, with the contents of the previous call."""
        return self._buffer[: num_outputs * num_inputs].view(num_outputs, num_inputs)


class TorchLinear:
    """Linear y = x @ weight.T + bias by cuBLAS."""

    def __init__(
        self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight_NK = weight_NK.to(device, dtype)
        self.bias_N = None if bias_N is None else bias_N.to(device, dtype)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        return F.linear(x_MK, self.weight_NK, self.bias_N)


class TwoPathLinear:
    """Linear of a 4-bit or fp8 weight: fused up to `crossover` tokens, above that cuBLAS on its 16-bit form."""

    def __init__(
        self,
        weight: GroupIntWeight | Fp8Weight,
        dtype: torch.dtype,
        device: torch.device,
        scratch: DequantBuffer | None = None,
        crossover: int | None = None,
    ) -> None:
        """Pack `weight`, for which `has_two_paths`. With a `scratch`, each call that needs the 16-bit form writes it
        there; without, it is kept."""
        assert has_two_paths(weight)
        self.target = CompileTarget.from_device(device)
        self.bias_N = None if weight.bias_N is None else weight.bias_N.to(device, dtype)
        self.tiled: TiledInt4 | TiledE4m3
        self.input_order_K: torch.Tensor | None = None
        if isinstance(weight, GroupIntWeight):
            self.tiled = TiledInt4.repack(weight, device)
            self.input_order_K = None if weight.input_order_K is None else weight.input_order_K.to(device)
        else:
            self.tiled = TiledE4m3.repack(weight, device)
        self.scratch, self.shape_NK = scratch, (weight.out_features, weight.in_features)
        num_values = weight.out_features * weight.in_features
        default = crossover_of(self.target.capability).max_fused_tokens(num_values, is_cached=scratch is None)
        self.crossover = default if crossover is None else crossover
        if scratch is None:
            self.kept_NK = self._dequantized(torch.empty(self.shape_NK, dtype=dtype, device=device))
        else:
            scratch.reserve(*self.shape_NK)

    def __call__(self, x_MK: torch.Tensor) -> torch.Tensor:
        if self.input_order_K is not None:
            x_MK = x_MK[:, self.input_order_K]
        return self.fused(x_MK) if 0 < len(x_MK) <= self.crossover else self.dense(x_MK)

    def fused(self, x_MK: torch.Tensor) -> torch.Tensor:
        out_MN = x_MK.new_empty(len(x_MK), self.shape_NK[0])
        if isinstance(self.tiled, TiledInt4):
            launches = int4.int4_launches(x_MK, self.tiled, self.bias_N, out_MN, self.target)
        else:
            launches = e4m3.e4m3_launches(x_MK, self.tiled, self.bias_N, out_MN, self.target)
        for launch in launches:
            launch.run()
        return out_MN

    def dense(self, x_MK: torch.Tensor) -> torch.Tensor:
        return F.linear(x_MK, self.widened(), self.bias_N)

    def widened(self) -> torch.Tensor:
        """Return the 16-bit form: the kept copy, or written into the scratch now."""
        return self.kept_NK if self.scratch is None else self._dequantized(self.scratch.weight(*self.shape_NK))

    def _dequantized(self, out_NK: torch.Tensor) -> torch.Tensor:
        if isinstance(self.tiled, TiledInt4):
            int4.dequantize_launch(self.tiled, out_NK).run()
        else:
            e4m3.dequantize_launch(self.tiled, out_NK).run()
        return out_NK


def has_two_paths(weight: LinearWeight) -> TypeGuard[GroupIntWeight | Fp8Weight]:
    """Return whether the fused kernels support the weight."""
    if isinstance(weight, GroupIntWeight):
        return int4.supports(weight)
    return isinstance(weight, Fp8Weight) and e4m3.supports(weight)


def prepare_linear(
    weight: LinearWeight, dtype: torch.dtype, device: torch.device, scratch: DequantBuffer | None = None
) -> Linear:
    """Pack one weight for a GPU. The caller can drop its own copy."""
    if has_two_paths(weight):
        return TwoPathLinear(weight, dtype, device, scratch)
    return TorchLinear(weight.dequantize(dtype), weight.bias_N, dtype, device)
