"""Checks of the files in a model folder. The folder is untrusted: only its regular files of bounded size are read.

Links to other files of the folder are followed, and links from `snapshots/<revision>/` into the `blobs/` of a Hugging
Face cache. Any other link is refused: it could point to any file of the machine, or to an endless device.
"""

import json
import re
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # no pickles, no code
GGUF_TABLE = "gguf.json"  # describes the tensors of GGUF files, in a folder that `gguf_folder.py` made
MAX_JSON_BYTES = 16 << 20  # the index of a checkpoint with a thousand experts has 10 MB
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


def is_gguf(path: str) -> bool:
    """Return whether `path` names a GGUF file."""
    return path.endswith(".gguf")


def split_files(name: str) -> list[str]:
    """Return the names of all files of a GGUF checkpoint, given one of them."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{index:05d}-of-{match[2]}.gguf" for index in range(1, int(match[2]) + 1)]


def checked_file(path: Path, max_bytes: int | None = None, model: Path | None = None) -> Path:
    """Return `path` if it is a regular file of its model folder. model: the model folder, for a file in a subfolder.

    Raises ModelError if it is not, or is larger than `max_bytes`; FileNotFoundError if it does not exist.
    """
    try:
        folder, real = (model or path.parent).resolve(), path.resolve(strict=True)
    except FileNotFoundError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links, before Python 3.13
        raise ModelError(f"{path}: cannot be read ({error})") from None
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise ModelError(
            f"{path}: links to {real}, outside the model folder; expected the file itself. If you trust the model, "
            "copy the file there"
        )
    if not real.is_file():
        raise ModelError(f"{path}: expected a regular file")
    if max_bytes is not None and real.stat().st_size > max_bytes:
        raise ModelError(f"{path}: {real.stat().st_size} bytes, expected at most {max_bytes} for {path.name}")
    return path


def read_json(path: Path, model: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from the model folder. model: see `checked_file`. Raises ModelError if the file is missing,
    too large or not an object."""
    values = _parsed(path, model)
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return values


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a JSON list of objects, with the checks of `read_json`."""
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
