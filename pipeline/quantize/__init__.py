"""Makes a quantized checkpoint of a plain one.

`recipe` says what to make, `layers` takes a checkpoint through it one layer at a time. `grid` has the numbers a weight
may take, `gptq` chooses among them so that a layer's outputs stay, on inputs that `calibration` computes. `layouts` has
the tensors as other engines read them; `awq` hands the work to autoawq. `checkpoint_writer` owns the output folder:
whole or not at all.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline import __version__
from pipeline.checkpoints.digest import model_digest
from pipeline.checkpoints.file_checks import read_json
from pipeline.quantize.checkpoint_writer import CheckpointWriter
from pipeline.quantize.layers import LayerWriter
from pipeline.quantize.recipe import Recipe, check_plain, check_shapes

__all__ = ["Recipe", "quantize"]


def quantize(
    source: Path,
    out: Path,
    recipe: Recipe,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Write the checkpoint in `source`, quantized by `recipe`, into the new folder `out`.

    texts: token ids to calibrate with, for awq and gptq. Raises ModelError for a source that is not plain or does not
    divide into groups, OutputError when something is in `out`.
    """
    values, config = read_json(source / "config.json"), check_plain(source)
    check_shapes(source, config, recipe)
    output = CheckpointWriter(out, _identity(source, recipe, texts))
    if recipe.method == "awq":
        from pipeline.quantize.awq import quantize_by_autoawq

        quantization = quantize_by_autoawq(source, output.partial, recipe.group_size, texts, say)
    else:
        LayerWriter(source, config, recipe, output, say).run(texts, device)
        quantization = recipe.quantization_config()
    if not config.tie_embeddings:
        values = values | {"tie_word_embeddings": False}  # other engines go by this key alone
    output.finish(source, values | {"quantization_config": quantization})


def _identity(source: Path, recipe: Recipe, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(np.array([len(ids), *ids], dtype=np.int64).tobytes())
    return {**asdict(recipe), "model": model_digest(source), "texts": digest.hexdigest(), "version": __version__}
