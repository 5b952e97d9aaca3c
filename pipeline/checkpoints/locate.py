"""Resolution of `model.path` to a local folder.

Only this module interprets it: an embedded model (`demo`, `demo:...`), a folder, an fsspec url, or a Hugging Face id;
or a GGUF file in one of the last three (`folder/x.gguf`, `owner/name/x.gguf`).
"""

import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoints.cache import cache_folder, fetch_model
from pipeline.checkpoints.file_checks import GGUF_TABLE, PATTERNS, is_gguf, split_files
from pipeline.demo import NAMES, demo_model
from pipeline.errors import ModelError
from pipeline.machine.caches import hub_folder
from pipeline.stores.filesystem import is_url, storage_for
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts

ModelKind = Literal["embedded", "url", "folder", "id", "missing", "none"]

EMBEDDED_MODELS = ("demo", *(f"demo:{name}" for name in NAMES))


NO_CHECKPOINT = "(none)"  # the path of a model that only a server knows


def model_kind(path: str) -> ModelKind:
    """Return the kind of model that `path` names. `missing`: a path that does not exist, or a file other than GGUF."""
    if path == "demo" or path.startswith("demo:"):
        return "embedded"
    if path == NO_CHECKPOINT:
        return "none"
    if is_url(path):
        return "url"
    location = os.path.expanduser(path)
    if os.path.exists(location):  # False without the permission to look
        return "folder" if os.path.isdir(location) or is_gguf(path) else "missing"
    return "id" if path.count("/") == 1 + is_gguf(path) and not path.startswith((".", "/", "~")) else "missing"


def resolve_model(
    path: str,
    storage: Mapping[str, Mapping[str, Any]] | None = None,
    log: Callable[[str], None] | None = None,
    retries: RetryCounts | None = None,
    key: str = "model.path",
    revision: str | None = None,
) -> Path:
    """Return the local folder of a checkpoint. A url is downloaded once per machine (`cache`). A Hugging Face id is
    downloaded into the Hugging Face cache, or only looked up there with HF_HUB_OFFLINE=1.

    storage: fsspec options of urls, by prefix. log: called with progress messages. retries: counts retried requests.
    key: the job file's key, for messages. revision: of a Hugging Face id. Raises ModelError, and EnvironmentFailed if a
    store or the disk fails.
    """
    if is_url(path):
        log = log or (lambda text: None)
        url, name = posixpath.split(path) if is_gguf(path) else (path, None)
        cache, options = cache_folder(log=log), storage_for(path, storage or {})
        files = None if name is None else split_files(name)
        folder = fetch_model(url, options, cache, log, retries, key, files=files)
        folder = folder if name is None else _converted(folder / name, log)
    else:
        folder = locate_model(path, revision, log)
    if reason := checkpoint_problem(str(folder)):
        raise ModelError(f"{key} {shown_url(path)}: {reason}")
    return folder.resolve()


def resolve_tokenizer(
    path: str,
    storage: Mapping[str, Mapping[str, Any]],
    retries: RetryCounts,
    revision: str | None,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Return the local folder of a checkpoint whose weights are not needed: of a Hugging Face id only the other files
    are downloaded. Raises as `resolve_model`."""
    if model_kind(path) == "id" and not is_gguf(path):
        return download(path, revision, [pattern for pattern in PATTERNS if "safetensors" not in pattern])
    return resolve_model(path, storage, log, retries, revision=revision)


def folder_here(path: str, revision: str | None = None) -> Path | None:
    """Return the folder of `path` if it is on this machine already, without downloading. Return None for urls: finding
    the cached copy takes a listing from the store."""
    kind = model_kind(path)
    if kind in ("embedded", "folder"):
        return locate_model(path)
    if kind != "id":
        return None
    from huggingface_hub import try_to_load_from_cache

    repository, names = _of_id(path)
    wanted = names or ["tokenizer.json"]
    found = [try_to_load_from_cache(repository, name, revision=revision, cache_dir=hub_folder()) for name in wanted]
    if not all(isinstance(file, str) for file in found):
        return None
    return _converted(Path(str(found[0]))) if names else Path(str(found[0])).parent


def locate_model(name: str, revision: str | None = None, log: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a model that is not at a url. Download a Hugging Face id once, without pickles and code.
    For GGUF files it is the folder of `gguf_folder`.

    Raises ModelError with what was tried.
    """
    kind = model_kind(name)
    if revision is not None and kind != "id":
        raise ModelError(f"model.revision {revision}: only a Hugging Face id has revisions, and {name} is not one")
    if kind == "embedded":
        try:
            return demo_model(name.partition(":")[2] or "target")
        except KeyError as error:
            raise ModelError(f"model {name!r}: {error.args[0]}") from None
    if kind == "folder":
        location = Path(os.path.expanduser(name))
        file = location if is_gguf(name) else _only_gguf(location)
        return location if file is None else _converted(file, log)
    if kind != "id":
        raise ModelError(f"model {name!r}: {checkpoint_problem(name)}")
    repository, names = _of_id(name)
    folder = download(repository, revision, names or PATTERNS)
    return _converted(folder / names[0], log) if names else folder


def _of_id(name: str) -> tuple[str, list[str]]:
    """Return the Hugging Face id, and the names of the GGUF files if `name` ends with one."""
    return (name.rpartition("/")[0], split_files(name.rpartition("/")[2])) if is_gguf(name) else (name, [])


def _converted(file: Path, log: Callable[[str], None] | None = None) -> Path:
    from pipeline.checkpoints.gguf_folder import gguf_folder  # imports torch

    return gguf_folder(file, log)


def _only_gguf(folder: Path) -> Path | None:
    """Return the GGUF file, or the first of a split one, if the folder's weights are in it alone."""
    names = _gguf_names(folder)
    if names and not any((folder / name).exists() for name in (GGUF_TABLE, "model.safetensors.index.json")):
        is_other = any(folder.glob("*.safetensors"))
        return None if is_other or names != split_files(names[0]) else folder / names[0]
    return None


def _gguf_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if is_gguf(file.name))


def checkpoint_problem(name: str) -> str:
    """Return why the local path `name` is not a checkpoint folder; empty if it may be one."""
    location = Path(os.path.expanduser(name))
    if not os.path.exists(location):
        return "no such folder, and not a Hugging Face id (owner/name)"
    if not location.is_dir():
        return "" if is_gguf(name) else "is a file; expected the folder of a safetensors checkpoint, or a GGUF file"
    try:
        if _only_gguf(location) is not None:
            return ""
        names = {file.name for file in location.iterdir()}
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "config.json" in names:
        return ""
    if not names:
        return "is an empty folder; expected the folder of a safetensors checkpoint"
    if "adapter_config.json" in names:
        return "has adapter_config.json but no config.json: a LoRA adapter; it belongs in model.adapters"
    if ggufs := sorted(found for found in names if is_gguf(found)):
        return f"has several GGUF files; name one of them: {location / ggufs[0]}"
    return "has no config.json; expected the folder of a safetensors checkpoint"


def download(name: str, revision: str | None, patterns: Sequence[str] = PATTERNS) -> Path:
    """Download the files of a Hugging Face id that match `patterns`, unless they are in the cache. Raises
    ModelError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), cache_dir=hub_folder()))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"and it is not on Hugging Face, or Hugging Face cannot be reached: {error}"
        if os.environ.get("HF_HUB_OFFLINE"):
            reason = "and not in the local Hugging Face cache; HF_HUB_OFFLINE is set, so it was not downloaded"
        wanted = f"model {name!r}" if revision is None else f"model {name!r}, revision {revision!r}"
        raise ModelError(
            f"{wanted}: no such folder, {reason}; a folder, a GGUF file or demo:target-awq needs no Hub"
        ) from None
