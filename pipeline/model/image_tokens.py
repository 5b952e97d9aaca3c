"""Tokens of images, by the preprocessing of models whose formula is public."""

from dataclasses import dataclass
from math import ceil, floor, sqrt
from pathlib import Path

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.quantizer_files import CONFIG
from pipeline.weights.config_fields import Fields

PREPROCESSOR = "preprocessor_config.json"
_PATCHES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_FIXED = {"gemma3": ("mm_tokens_per_image", 256, 3)}  # key, default, and tokens that the processor adds around them


@dataclass(frozen=True)
class FixedTokens:
    """Images that have the same number of tokens. more: in addition to the placeholder in the chat template."""

    more: int

    def num_more(self, width: int, height: int) -> int:
        """Return the tokens of an image in addition to its placeholder."""
        return self.more


@dataclass(frozen=True)
class PatchTokens:
    """Images that are scaled to multiples of `side`, with min_pixels to max_pixels as in transformers, and have a token
    for each square of this side."""

    side: int
    min_pixels: int
    max_pixels: int

    def num_more(self, width: int, height: int) -> int:
        """Return the tokens of an image in addition to its placeholder."""
        columns, rows = round(width / self.side), round(height / self.side)
        pixels = columns * rows * self.side**2
        if pixels > self.max_pixels:
            scale = sqrt(width * height / self.max_pixels)
            columns, rows = (max(1, floor(each / scale / self.side)) for each in (width, height))
        elif pixels < self.min_pixels:
            scale = sqrt(self.min_pixels / (width * height))
            columns, rows = (ceil(each * scale / self.side) for each in (width, height))
        return columns * rows - 1


ImageTokens = FixedTokens | PatchTokens


def image_tokens(folder: Path) -> ImageTokens | None:
    """Return the formula of a checkpoint; None if it is unknown, or a file of the checkpoint is missing. Raises
    ModelError for values that are missing or wrong."""
    if not (folder / CONFIG).exists():
        return None
    values = read_json(folder / CONFIG)
    kind = values.get("model_type")
    if kind in _FIXED:
        key, default, around = _FIXED[kind]
        return FixedTokens(int(values.get(key, default)) + around)
    if kind not in _PATCHES or not (folder / PREPROCESSOR).exists():
        return None
    return _patches(Fields(read_json(folder / PREPROCESSOR), folder / PREPROCESSOR))


def _patches(values: Fields) -> PatchTokens:
    size, side = values.section("size"), [values.integer(name, 1, 1 << 10) for name in ("patch_size", "merge_size")]

    def pixels(name: str, in_size: str) -> int:
        return values.integer(name, 1, 1 << 40) if name in values.values else size.integer(in_size, 1, 1 << 40)

    return PatchTokens(side[0] * side[1], pixels("min_pixels", "shortest_edge"), pixels("max_pixels", "longest_edge"))
