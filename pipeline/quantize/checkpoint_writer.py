"""The folder of a new checkpoint: made beside its place as `<name>.partial`, complete before it gets its name, never
over another.

What an interrupted run left there is of use to one that would make the same; anything else is refused.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.checkpoints.digest import BESIDE_WEIGHTS
from pipeline.errors import EnvironmentFailed, OutputError

RECIPE = "recipe.json"  # in a partial folder: what it is to become


class CheckpointWriter:
    """`recipe` says what is being made, in plain JSON; two runs of one recipe make the same."""

    def __init__(self, out: Path, recipe: Mapping[str, Any]) -> None:
        """Raises OutputError when there is something in `out`, or another recipe's beginnings beside it."""
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(f"--output {out}: is there and not empty; nothing is replaced, name a new folder")
        began = self.partial / RECIPE
        try:
            if not began.exists():
                if self.partial.exists() and any(self.partial.iterdir()):
                    raise OutputError(
                        f"{self.partial}: is in the way and not this program's; remove it, or name another --out"
                    )
                self.partial.mkdir(parents=True, exist_ok=True)
                _write_text(began, json.dumps(recipe, indent=2) + "\n")
                return
            there = json.loads(began.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EnvironmentFailed(f"{self.partial}: {error}") from None
        if there != json.loads(json.dumps(recipe)):
            differs = sorted(key for key in {*there, *recipe} if there.get(key) != recipe.get(key))
            raise OutputError(
                f"{self.partial}: an interrupted run left it, which differs in {', '.join(differs)}; remove the "
                "folder to begin anew, or name another --out"
            )

    def has(self, name: str) -> bool:
        return (self.partial / name).exists()

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """A safetensors file, whole or not at all."""
        part = self.partial / f".{name}"
        try:
            save_file({key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, part, {"format": "pt"})
            os.replace(part, self.partial / name)
        except OSError as error:
            raise EnvironmentFailed(f"{self.partial / name}: {error.strerror}") from None

    def finish(self, source: Path, config: Mapping[str, Any]) -> None:
        """Bring what a checkpoint has beside its weights from `source`, with this config.json, and give the folder its
        name."""
        try:
            for file in sorted({file for pattern in BESIDE_WEIGHTS for file in source.glob(pattern)}):
                shutil.copyfile(file, self.partial / file.name)
            _write_text(self.partial / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
            for file in self.partial.glob("*.safetensors"):
                shutil.copymode(self.partial / RECIPE, file)  # safetensors lets its owner alone read a file
            (self.partial / RECIPE).unlink()
            os.rename(self.partial, self.out)
        except OSError as error:
            raise EnvironmentFailed(f"{self.partial} to {self.out}: {error.strerror}") from None


def _write_text(path: Path, text: str) -> None:
    path.with_name(f".{path.name}").write_text(text, encoding="utf-8")
    os.replace(path.with_name(f".{path.name}"), path)
