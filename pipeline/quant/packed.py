"""The canonical weights of a linear layer: checkpoint formats are converted to these, kernels read only these.

Shapes: N output features, K input features, g group size.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DenseWeight:
    """`weight_NK` in a floating type; y = x @ weight.T + bias."""

    weight_NK: torch.Tensor
    bias_N: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.weight_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_NK.shape[1]


@dataclass(frozen=True)
class GroupIntWeight:
    """Unsigned 4-bit integers with a scale and a zero point for each group of `group_size` inputs of an output.

    weight = (q_NK - zeros_NG) * scales_NG, the group index being k // group_size. `q_NK` holds one value (0..15) a
    byte, `zeros_NG` integers in the type of the scales (float32), so that symmetric checkpoints are zeros of 8.
    """

    q_NK: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor
    group_size: int
    bias_N: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.q_NK.shape[0]

    @property
    def in_features(self) -> int:
        return self.q_NK.shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight as a dense (N, K) tensor: exact in float32, rounded once when `dtype` is narrower."""
        n, k = self.q_NK.shape
        q_NGg = self.q_NK.view(n, k // self.group_size, self.group_size).to(torch.float32)
        w_NGg = (q_NGg - self.zeros_NG.unsqueeze(-1)) * self.scales_NG.unsqueeze(-1)
        return w_NGg.view(n, k).to(dtype)


LinearWeight = DenseWeight | GroupIntWeight


def concatenate(parts: list[LinearWeight]) -> LinearWeight:
    """Fuse linears that read the same input (q, k, v; gate and up) into one with their outputs side by side.

    Raises ValueError when the parts are of different kinds or group sizes.
    """
    first = parts[0]
    biases = [p.bias_N for p in parts]
    if any(b is not None for b in biases):
        filled = [b if b is not None else torch.zeros(p.out_features) for p, b in zip(parts, biases)]
        bias_N = torch.cat([b.to(torch.float32) for b in filled])
    else:
        bias_N = None
    if all(isinstance(p, DenseWeight) for p in parts):
        return DenseWeight(torch.cat([p.weight_NK for p in parts]), bias_N)  # type: ignore[union-attr]
    groups = [p for p in parts if isinstance(p, GroupIntWeight)]
    if len(groups) != len(parts) or any(p.group_size != groups[0].group_size for p in groups):
        raise ValueError("only linears of one kind and group size can be fused")
    assert isinstance(first, GroupIntWeight)
    return GroupIntWeight(
        torch.cat([p.q_NK for p in groups]),
        torch.cat([p.scales_NG for p in groups]),
        torch.cat([p.zeros_NG for p in groups]),
        first.group_size,
        bias_N,
    )
