"""How a checkpoint's hidden states become one vector, as sentence-transformers' files beside it say.

`modules.json` lists the modules that a text goes through: the model, a pooling (its `config.json` says which), and
perhaps a normalization.
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
    """What the folder's files say; None where there are none. Raises ModelError for a pooling or a module that is not
    served."""
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
            raise ModelError(f"{path}: the module {kind!r} is not served; expected Transformer, Pooling and Normalize")
    return None if pooling is None else StoredPooling(pooling, normalize)


def _mode(folder: Path, name: str) -> Mode:
    path = folder / name / "config.json"
    stored = read_json(path, folder)
    on = [name for name, value in stored.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in _MODES:
        raise ModelError(f"{path}: {', '.join(on) or 'no pooling mode'} is on; expected one of {', '.join(_MODES)}")
    return _MODES[on[0]]
