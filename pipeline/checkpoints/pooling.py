"""Pooling of an embedding checkpoint, read from its sentence-transformers files.

`modules.json` lists the modules in order: the model, a pooling with its own `config.json`, and optionally a
normalization.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.checkpoints.file_checks import read_json, read_json_list
from pipeline.errors import ModelError

Mode = Literal["last", "mean", "cls"]
_MODES: dict[str, Mode] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True)
class StoredPooling:
    pooling: Mode
    normalize: bool


def read_pooling(folder: Path) -> StoredPooling | None:
    """Return the stored pooling, or None without `modules.json`. Raises ModelError for an unsupported pooling or
    module."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    pooling, normalize = None, False
    for module in read_json_list(path):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _mode(folder, str(module.get("path") or "1_Pooling"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(f"{path}: unsupported module {kind!r}; expected Transformer, Pooling or Normalize")
    return None if pooling is None else StoredPooling(pooling, normalize)


def _mode(folder: Path, name: str) -> Mode:
    path = folder / name / "config.json"
    stored = read_json(path, folder)
    on = [name for name, value in stored.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in _MODES:
        raise ModelError(
            f"{path}: {', '.join(on) or 'no pooling mode'} is enabled; expected one of {', '.join(_MODES)}"
        )
    return _MODES[on[0]]
