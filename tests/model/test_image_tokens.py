"""Tokens of images by the formula of the model, compared with transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from pipeline.errors import ModelError
from pipeline.model.image_tokens import image_tokens

QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
QWEN3 = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2}


def folder(path: Path, config: dict[str, Any], preprocessor: dict[str, Any] | None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").unlink(missing_ok=True)
    if preprocessor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


@pytest.mark.parametrize(("kind", "values"), [("qwen2_vl", QWEN2), ("qwen2_5_vl", QWEN2), ("qwen3_vl", QWEN3)])
def test_patches_are_those_of_transformers(tmp_path: Path, kind: str, values: dict[str, Any]):
    small = {**values, "min_pixels": 5_000, "max_pixels": 20_000}
    draw = random.Random(0)
    for given, low, high in ((values, *_limits(values)), (small, 5_000, 20_000)):
        formula = image_tokens(folder(tmp_path / "model", {"model_type": kind}, given))
        assert formula is not None
        side = given["patch_size"] * given["merge_size"]
        for _ in range(300):
            height, ratio = draw.randint(10, 3000), 2 ** draw.uniform(-7, 7)
            width = max(height // 150 + 1, int(height * ratio))
            rows, columns = smart_resize(height, width, side, low, high)
            assert formula.num_more(width, height) + 1 == rows * columns // side**2, (width, height)


def _limits(values: dict[str, Any]) -> tuple[int, int]:
    size = values.get("size", {})
    return values.get("min_pixels") or size["shortest_edge"], values.get("max_pixels") or size["longest_edge"]


def test_a_fixed_number_and_unknown_formulas(tmp_path: Path):
    path = tmp_path / "model"
    formula = image_tokens(folder(path, {"model_type": "gemma3"}, None))
    assert formula is not None
    # "\n\n", the begin in the template's place, 256 soft tokens, the end, "\n\n"
    assert formula.num_more(10, 5000) + 1 == 260
    for config, preprocessor in (
        ({"model_type": "qwen2_vl"}, None),
        ({"model_type": "llava"}, QWEN2),
        ({}, None),
    ):
        assert image_tokens(folder(path, config, preprocessor)) is None
    assert image_tokens(tmp_path) is None
    with pytest.raises(ModelError, match="shortest_edge"):
        image_tokens(folder(path, {"model_type": "qwen2_vl"}, {"patch_size": 14, "merge_size": 2}))
