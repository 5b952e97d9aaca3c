"""Which files of a model folder are read. It may be a stranger's: only regular files of that folder, of bounded size.

A link may lead to another file of the folder. A Hugging Face cache keeps a model as links from `snapshots/<revision>/`
into the `blobs/` next to it; these are followed too. Any other link is refused: it could name any file of the machine,
or a device that never ends.
"""

import json
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # no pickles, no code
MAX_JSON_BYTES = 16 << 20  # the index of a checkpoint of a thousand experts has 10 MB


def checked_file(path: Path, max_bytes: int | None = None, model: Path | None = None) -> Path:
    """`path`, when it is a regular file of its model folder. model: that folder, where the file is in one inside it.

    Raises ModelError when it is not or is larger than `max_bytes`, FileNotFoundError when nothing is there.
    """
    try:
        folder, real = (model or path.parent).resolve(), path.resolve(strict=True)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise ModelError(f"{path}: cannot be read ({error})") from None
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise ModelError(
            f"{path}: a link to {real}, outside the model folder; expected the file itself. Copy it there if you trust "
            "the model"
        )
    if not real.is_file():
        raise ModelError(f"{path}: expected a regular file")
    if max_bytes is not None and real.stat().st_size > max_bytes:
        raise ModelError(f"{path}: {real.stat().st_size} bytes, expected at most {max_bytes} for a model's {path.name}")
    return path


def read_json(path: Path, model: Path | None = None) -> dict[str, Any]:
    """A JSON object from the model folder. model: as for `checked_file`. Raises ModelError when it is missing, too
    large or not an object."""
    values = _parsed(path, model)
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return values


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """As `read_json`, of a list of objects."""
    values = _parsed(path, None)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ModelError(f"{path}: expected a list of JSON objects")
    return values


def _parsed(path: Path, model: Path | None) -> object:
    try:
        return json.loads(checked_file(path, MAX_JSON_BYTES, model).read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path}: not found; a model folder holds config.json, *.safetensors and tokenizer.json"
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
