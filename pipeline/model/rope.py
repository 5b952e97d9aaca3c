"""Rotary position tables with the supported scalings: default, linear, llama3, yarn.

Formulas: RoFormer (arXiv 2104.09864); llama3 as in Meta's Llama 3.1 reference; yarn arXiv 2309.00071. Reads the config
layouts of transformers 5 (`rope_parameters`) and of earlier checkpoints (`rope_theta` and `rope_scaling`).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ModelError

SERVED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path, max_position: int) -> "Rope":
        """Read config.json's options. `rope_scaling` overrides `rope_parameters`, as in transformers.

        Raises ModelError naming an unsupported scaling or option.
        """
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(scaling, dict):
            raise ModelError(f"{path}: rope_parameters = {scaling!r:.200}: expected an object")
        scaling = {"rope_theta": config["rope_theta"]} | scaling
        if "original_max_position_embeddings" in config:
            scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in SERVED:
            raise ModelError(f"{path}: rope scaling {kind!r:.200}: expected one of {', '.join(SERVED)}")
        if any(isinstance(value, dict) for value in scaling.values()):
            raise ModelError(f"{path}: separate rope_parameters per layer type are not supported")
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1.0):
            raise ModelError(f"{path}: partial_rotary_factor = {partial!r:.200} is not supported; expected 1.0")

        def number(name: str, default: float | None, low: float = 1e-6, high: float = 1e9) -> float:
            value = scaling.get(name)
            value = default if value is None else value
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise ModelError(f"{path}: rope {name} = {value!r:.200}: expected a number from {low:g} to {high:g}")
            return float(value)

        theta = number("rope_theta", None, low=2.0, high=1e12)
        if kind == "default":
            return cls(theta)
        factor = number("factor", None)
        if kind == "linear":
            return cls(theta, kind, factor)
        original = int(number("original_max_position_embeddings", float(max_position), low=1.0))
        if kind == "llama3":
            low, high = number("low_freq_factor", None), number("high_freq_factor", None)
            if low >= high:
                raise ModelError(f"{path}: rope high_freq_factor = {high}: expected more than low_freq_factor = {low}")
            return cls(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        if scaling.get("mscale") is not None or scaling.get("mscale_all_dim") is not None:
            raise ModelError(f"{path}: yarn with mscale is not supported")
        return cls(
            theta,
            kind,
            factor,
            original,
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            truncate=bool(scaling.get("truncate", True)),
            attention_factor=number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        )

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Return (head_dim / 2,) float32: radians per position for each rotated pair."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self.theta**exponent)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            return self._llama3(inverse)
        if self.kind == "yarn":
            return self._yarn(inverse, head_dim)
        return inverse

    def tables(self, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each (num_positions, head_dim / 2) float32."""
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), self.inverse_frequencies(head_dim))
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / inverse
        ratio = self.original_max_position / wavelength
        smooth = (ratio - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * inverse / self.factor + smooth * inverse

    def _yarn(self, inverse: torch.Tensor, head_dim: int) -> torch.Tensor:
        def dimension(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        span = (high - low) or 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
        return inverse / self.factor * ramp + inverse * (1 - ramp)
