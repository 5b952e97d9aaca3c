"""Quantization of a plain checkpoint.

`recipe` defines the result, `layers` processes a checkpoint one layer at a time. `grid` defines the values that a
weight may take; `gptq` chooses among them to preserve a layer's outputs, on inputs that `calibration` computes.
`layouts` defines the tensors that other engines read; `awq` delegates to autoawq. `checkpoint_writer` writes the output
folder, completely or not at all.
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
    log: Callable[[str], None],
) -> None:
    """Write the checkpoint in `source`, quantized by `recipe`, into the new folder `out`.

    texts: token ids for calibration, for awq and gptq. Raises ModelError if the source is not plain or its sizes are
    not multiples of the group size, OutputError if `out` is not empty.
    """
    values, config = read_json(source / "config.json"), check_plain(source)
    check_shapes(source, config, recipe)
    output = CheckpointWriter(out, _identity(source, recipe, texts))
    if recipe.method == "awq":
        from pipeline.quantize.awq import quantize_by_autoawq

        quantization = quantize_by_autoawq(source, output.partial, recipe.group_size, texts, log)
    else:
        writer = LayerWriter(source, config, recipe, output, log)
        writer.run(texts, device)
        quantization = recipe.quantization_config(writer.kept)
    if not config.tie_embeddings:
        values = values | {"tie_word_embeddings": False}  # other engines read only this key
    output.finish(source, values | {"quantization_config": quantization})


def _identity(source: Path, recipe: Recipe, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for ids in texts:
        digest.update(np.array([len(ids), *ids], dtype=np.int64).tobytes())
    return {**asdict(recipe), "model": model_digest(source), "texts": digest.hexdigest(), "version": __version__}
