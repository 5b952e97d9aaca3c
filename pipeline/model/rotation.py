"""Tables of rotary positions. Shape suffixes: P positions, T tokens of a step, D head size, N rows of a projection."""

import math
from collections.abc import Sequence

import torch

from pipeline.kernels.layer_parts import Rotation
from pipeline.model.rope import Rope


class RotationTables:
    """Tables for all positions, one for each of the model's ropes. head_dim: the model's."""

    def __init__(self, ropes: Sequence[Rope], head_dim: int, num_positions: int, device: torch.device) -> None:
        self.num_positions = num_positions
        self._tables = [_tables(rope, rope.head_dim or head_dim, num_positions, device) for rope in ropes]

    def at(self, positions_T: torch.Tensor) -> tuple[Rotation, ...]:
        """Return the rotations at these positions, in the order of the ropes."""
        return tuple(
            Rotation(
                tables.cos_TD2[positions_T],
                tables.sin_TD2[positions_T],
                None if tables.query_scale_T11 is None else tables.query_scale_T11[positions_T],
            )
            for tables in self._tables
        )


def rotary_order(rope: Rope, head_dim: int) -> torch.Tensor | None:
    """Return for each value of a head the stored value that it holds; None: as stored.

    Kernels rotate value i together with value i + D / 2, as checkpoints with "proportional" positions. In others, if
    only the first R values are rotated, i is paired with i + R / 2, or 2i with 2i + 1 if interleaved. So the first and
    the second values of these pairs move to the beginnings of the halves of the head.
    """
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if rope.kind == "proportional" or rotary_dim == 0 or (rotary_dim == head_dim and not rope.interleaved):
        return None
    rotated_R, rest = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    pairs = rotated_R.view(-1, 2).t() if rope.interleaved else rotated_R.view(2, -1)
    return torch.cat([pairs, rest.view(2, -1)], dim=1).flatten()


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return radians per position for each rotated pair of a head, in float32."""
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    whole = head_dim if rope.kind == "proportional" else rotary_dim
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / whole
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factors if rope.uses_long else rope.short_factors)
        return 1.0 / (factors * rope.theta**exponent)
    inverse = 1.0 / (rope.theta**exponent)
    if rope.kind in ("linear", "proportional"):
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    if rope.kind == "yarn":
        return _yarn(rope, inverse, rotary_dim)
    return inverse


def cos_and_sin(rope: Rope, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each (num_positions, head_dim / 2) float32. Pairs that are not rotated have cos 1, sin 0."""
    cos_PD2, sin_PD2 = torch.ones(num_positions, head_dim // 2), torch.zeros(num_positions, head_dim // 2)
    if rope.rotary_dim != 0:
        positions_P = torch.arange(num_positions, dtype=torch.float32)
        angles_PR = torch.outer(positions_P, inverse_frequencies(rope, head_dim))
        num_pairs = angles_PR.shape[1]
        cos_PD2[:, :num_pairs] = angles_PR.cos() * rope.attention_factor
        sin_PD2[:, :num_pairs] = angles_PR.sin() * rope.attention_factor
    return cos_PD2, sin_PD2


def _tables(rope: Rope, head_dim: int, num_positions: int, device: torch.device) -> Rotation:
    cos_PD2, sin_PD2 = cos_and_sin(rope, head_dim, num_positions)
    scale_P11 = None
    if rope.query_beta:
        steps_P = torch.arange(num_positions) // rope.original_max_position
        scale_P11 = (1 + rope.query_beta * (1 + steps_P.float()).log())[:, None, None].to(device)
    return Rotation(cos_PD2.to(device), sin_PD2.to(device), scale_P11)


def _llama3(rope: Rope, inverse: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / inverse
    ratio = rope.original_max_position / wavelength
    smooth = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(rope: Rope, inverse: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)
