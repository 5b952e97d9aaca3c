"""Reader of checkpoints written by NVIDIA's Model Optimizer, with weights in FP8 or NVFP4.

Layouts: FP8 as in `fp8.py`, with `weight_scale` for the whole weight or per output. NVFP4 as in `fp4.py`: `weight`
(N, K/2) uint8, `weight_scale` (N, G), and `weight_scale_2`, a float32 scale by which the others are multiplied. Options
are in config.json or, under `quantization`, in hf_quant_config.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.weights.config_fields import Fields
from pipeline.weights.fp4 import NV_GROUP, read_nvfp4
from pipeline.weights.fp8 import ACTIVATION_SCALES, read_float8
from pipeline.weights.packed import LinearWeight
from pipeline.weights.tensor_reader import StoredLinear, groups_text

ALGORITHMS = {"FP8": 8, "FP8_PER_CHANNEL_PER_TOKEN": 8, "NVFP4": 4, "W4A16_NVFP4": 4}
"""Bits of a weight, by quant_algo."""


@dataclass(frozen=True)
class ModelOptFormat:
    """Validated options of a Model Optimizer checkpoint."""

    algorithm: str
    unused: tuple[str, ...] = ACTIVATION_SCALES

    @property
    def bits(self) -> int:
        return ALGORITHMS[self.algorithm]

    @property
    def group_size(self) -> int | None:
        return NV_GROUP if self.has_codes else None

    @property
    def has_codes(self) -> bool:
        return self.bits == 4

    @property
    def has_activations(self) -> bool:
        return self.algorithm != "W4A16_NVFP4"

    @property
    def activations(self) -> str | None:
        return None if self.has_codes else "fp8"

    @classmethod
    def from_config(cls, config: dict[str, Any], path: Path) -> "ModelOptFormat":
        """Read the options in `path`. Raises ModelError naming an unsupported field."""
        options = Fields(config, path, "quantization_config")
        options.one_of("quant_method", ("modelopt",))
        if "quantization" in config:
            options = options.section("quantization")
        algorithm = options.one_of("quant_algo", tuple(ALGORITHMS))
        if ALGORITHMS[algorithm] == 4:
            options.one_of("group_size", (NV_GROUP,), NV_GROUP)
        return cls(algorithm)

    def __str__(self) -> str:
        return f"Model Optimizer nvfp4, {groups_text(NV_GROUP)}" if self.has_codes else "Model Optimizer fp8 (e4m3)"

    def read_linear(self, linear: StoredLinear) -> LinearWeight:
        """Read one linear; dense if it has no scales. Raises ModelError if it does not fit the layout."""
        if "weight_scale" not in linear:
            return linear.dense()
        if self.has_codes:
            return read_nvfp4(linear, "weight", "weight_scale_2", divides=False)
        return read_float8(linear, "weight_scale", None)
