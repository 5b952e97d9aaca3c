"""Output folder of a new checkpoint: written as `<name>.partial`, renamed when complete, never over an existing one.

A run with the same recipe continues what an interrupted run has written; any other content is an error.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.checkpoints.digest import AUXILIARY_FILES
from pipeline.errors import EnvironmentFailed, OutputError

RECIPE = "recipe.json"  # recipe of a partial folder


class CheckpointWriter:
    """Writes one output folder. `recipe`, in plain JSON, identifies the result: equal recipes write the same."""

    def __init__(self, out: Path, recipe: Mapping[str, Any]) -> None:
        """Raise OutputError if `out` is not empty, or if its partial folder has another recipe."""
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(f"--output {out}: already exists and is not empty; choose a new folder")
        recipe_file = self.partial / RECIPE
        try:
            if not recipe_file.exists():
                if self.partial.exists() and any(self.partial.iterdir()):
                    raise OutputError(
                        f"{self.partial}: exists, but not from an earlier run; remove it, or choose another --output"
                    )
                self.partial.mkdir(parents=True, exist_ok=True)
                _write_text(recipe_file, json.dumps(recipe, indent=2) + "\n")
                return
            existing = json.loads(recipe_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EnvironmentFailed(f"{self.partial}: {error}") from None
        if existing != json.loads(json.dumps(recipe)):
            differs = sorted(key for key in {*existing, *recipe} if existing.get(key) != recipe.get(key))
            raise OutputError(
                f"{self.partial}: left by an interrupted run with different {', '.join(differs)}; remove the folder "
                "to start over, or choose another --output"
            )

    def has(self, name: str) -> bool:
        return (self.partial / name).exists()

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file atomically."""
        part = self.partial / f".{name}"
        try:
            save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, part, {"format": "pt"})
            os.replace(part, self.partial / name)
        except OSError as error:
            raise EnvironmentFailed(f"{self.partial / name}: {error.strerror}") from None

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Copy the files other than weights from `source`, write this config.json, and rename the folder to `out`."""
        try:
            for file in sorted({file for pattern in AUXILIARY_FILES for file in source.glob(pattern)}):
                shutil.copyfile(file, self.partial / file.name)
            _write_text(self.partial / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
            for file in self.partial.glob("*.safetensors"):
                shutil.copymode(self.partial / RECIPE, file)  # safetensors makes files readable by their owner only
            (self.partial / RECIPE).unlink()
            os.rename(self.partial, self.out)
        except OSError as error:
            raise EnvironmentFailed(f"{self.partial} to {self.out}: {error.strerror}") from None


def _write_text(path: Path, text: str) -> None:
    path.with_name(f".{path.name}").write_text(text, encoding="utf-8")
    os.replace(path.with_name(f".{path.name}"), path)
