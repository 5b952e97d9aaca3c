"""Rotary positions: the options of config.json, for the scalings default, linear, llama3, yarn, longrope and
proportional.

Formulas: RoFormer (arXiv 2104.09864); llama3 as in Meta's Llama 3.1 reference; yarn arXiv 2309.00071; longrope arXiv
2402.13753. Reads the config layouts of transformers 5 (`rope_parameters`) and of earlier checkpoints (`rope_theta` and
`rope_scaling`). `rotation.py` computes the tables.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError

SERVED = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer. rotary_dim: rotated values of a head, the first ones, or in "proportional" those of
    the first pairs; None: all. interleaved: pairs are neighbours, as in GPT-J, and not values half of `rotary_dim`
    apart, or half of the head in "proportional". head_dim: size of the heads; None: the model's.

    short_factors, long_factors: divisors of each frequency (longrope), for sequences within `original_max_position` and
    beyond; `uses_long` selects them once for an engine (`for_length`). query_beta: queries at position p are multiplied
    by 1 + query_beta * log(1 + p // original_max_position) (Ministral 3); 0: off.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    rotary_dim: int | None = None
    interleaved: bool = False
    head_dim: int | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    uses_long: bool = False
    query_beta: float = 0.0

    def for_length(self, max_model_len: int) -> "Rope":
        """Return the options for sequences of up to `max_model_len` tokens."""
        return replace(self, uses_long=bool(self.long_factors) and max_model_len > self.original_max_position)

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path, max_position: int, head_dim: int) -> "Rope":
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
            raise ModelError(f"{path}: separate rope_parameters per layer type are not supported by this family")
        rotary_dim = _rotary_dim(config, scaling, path, head_dim, is_rounded=kind == "proportional")
        return _Options(scaling, path, max_position).read(kind, rotary_dim, head_dim)


NO_ROPE = Rope(rotary_dim=0)


@dataclass(frozen=True)
class _Options:
    """Checked reading of one object of options."""

    values: dict[str, Any]
    path: Path
    max_position: int

    def read(self, kind: str, rotary_dim: int | None, head_dim: int) -> Rope:
        theta = self.number("rope_theta", None, low=2.0, high=1e12)
        rope = Rope(theta, kind, rotary_dim=rotary_dim)
        if kind == "default":
            return rope
        if kind in ("linear", "proportional"):
            return replace(rope, factor=self.number("factor", None if kind == "linear" else 1.0))
        original = int(self.number("original_max_position_embeddings", float(self.max_position), low=1.0))
        if kind == "longrope":
            return self.longrope(replace(rope, original_max_position=original), (rotary_dim or head_dim) // 2)
        rope = replace(rope, factor=self.number("factor", None), original_max_position=original)
        if kind == "yarn":
            return self.yarn(rope)
        low, high = self.number("low_freq_factor", None), self.number("high_freq_factor", None)
        if low >= high:
            raise ModelError(f"{self.path}: rope high_freq_factor = {high}: expected more than low_freq_factor = {low}")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)

    def yarn(self, rope: Rope) -> Rope:
        mscale, mscale_all = (self.number(key, 0.0, low=0.0) for key in ("mscale", "mscale_all_dim"))
        attention = _yarn_scale(rope.factor, 1.0)
        if mscale and mscale_all:
            attention = _yarn_scale(rope.factor, mscale) / _yarn_scale(rope.factor, mscale_all)
        return replace(
            rope,
            beta_fast=self.number("beta_fast", 32.0),
            beta_slow=self.number("beta_slow", 1.0),
            truncate=bool(self.values.get("truncate", True)),
            attention_factor=self.number("attention_factor", attention),
            query_beta=self.number("llama_4_scaling_beta", 0.0, low=0.0),
        )

    def longrope(self, rope: Rope, num_frequencies: int) -> Rope:
        factor = self.number("factor", self.max_position / rope.original_max_position)
        attention = math.sqrt(1 + math.log(factor) / math.log(rope.original_max_position)) if factor > 1 else 1.0
        return replace(
            rope,
            factor=factor,
            attention_factor=self.number("attention_factor", attention),
            short_factors=self.factors("short_factor", num_frequencies),
            long_factors=self.factors("long_factor", num_frequencies),
        )

    def factors(self, name: str, count: int) -> tuple[float, ...]:
        value = self.values.get(name)
        numbers: list[Any] = value if isinstance(value, list) else []
        is_number = [type(each) in (int, float) and 1e-6 <= each <= 1e9 for each in numbers]
        if len(numbers) != count or not all(is_number):
            raise ModelError(f"{self.path}: rope {name} = {value!r:.200}: expected {count} positive numbers")
        return tuple(float(each) for each in numbers)

    def number(self, name: str, default: float | None, low: float = 1e-6, high: float = 1e9) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ModelError(f"{self.path}: rope {name} = {value!r:.200}: expected a number from {low:g} to {high:g}")
        return float(value)


def _rotary_dim(
    config: dict[str, Any], scaling: dict[str, Any], path: Path, head_dim: int, is_rounded: bool
) -> int | None:
    """Return the number of rotated values of a head; None: all. is_rounded: round it down to pairs."""
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = 1.0 if share is None else share
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ModelError(f"{path}: partial_rotary_factor = {share!r:.200}: expected a number above 0, up to 1")
    rotary_dim = 2 * int(head_dim * share // 2) if is_rounded else int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"{path}: partial_rotary_factor = {share}: expected an even share of head_dim = {head_dim}")
    return None if rotary_dim == head_dim else rotary_dim


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
