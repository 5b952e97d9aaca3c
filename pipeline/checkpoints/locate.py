"""Resolution of `model.path` to a local folder.

Only this module interprets it: an embedded model (`demo`, `demo:...`), a folder, an fsspec url, or a Hugging Face id.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.checkpoints.cache import cache_folder, fetch_model
from pipeline.checkpoints.file_checks import PATTERNS
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
    """Return the kind of model that `path` names. `missing`: a path that does not exist, or a file."""
    if path == "demo" or path.startswith("demo:"):
        return "embedded"
    if path == NO_CHECKPOINT:
        return "none"
    if is_url(path):
        return "url"
    location = os.path.expanduser(path)
    if os.path.exists(location):  # False without the permission to look
        return "folder" if os.path.isdir(location) else "missing"
    return "id" if path.count("/") == 1 and not path.startswith((".", "/", "~")) else "missing"


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
        folder = fetch_model(path, storage_for(path, storage or {}), cache_folder(log=log), log, retries, key)
    else:
        folder = locate_model(path, revision)
    if reason := checkpoint_problem(str(folder)):
        raise ModelError(f"{key} {shown_url(path)}: {reason}")
    return folder.resolve()


def resolve_tokenizer(
    path: str, storage: Mapping[str, Mapping[str, Any]], retries: RetryCounts, revision: str | None
) -> Path:
    """Return the local folder of a checkpoint whose weights are not needed: of a Hugging Face id only the other files
    are downloaded. Raises as `resolve_model`."""
    if model_kind(path) == "id":
        return download(path, revision, [pattern for pattern in PATTERNS if "safetensors" not in pattern])
    return resolve_model(path, storage, None, retries, revision=revision)


def folder_here(path: str, revision: str | None = None) -> Path | None:
    """Return the folder of `path` if it is on this machine already, without downloading. Return None for urls: finding
    the cached copy takes a listing from the store."""
    kind = model_kind(path)
    if kind in ("embedded", "folder"):
        return locate_model(path)
    if kind != "id":
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, "tokenizer.json", revision=revision, cache_dir=hub_folder())
    return Path(found).parent if isinstance(found, str) else None


def locate_model(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model that is not at a url. Download a Hugging Face id once, without pickles and code.

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
        return Path(os.path.expanduser(name))
    if kind != "id":
        raise ModelError(f"model {name!r}: {checkpoint_problem(name)}")
    return download(name, revision)


def checkpoint_problem(name: str) -> str:
    """Return why the local path `name` is not a checkpoint folder; empty if it may be one."""
    location = Path(os.path.expanduser(name))
    if not os.path.exists(location):
        return "no such folder, and not a Hugging Face id (owner/name)"
    if not location.is_dir():
        kind = "a GGUF file" if location.suffix == ".gguf" else "a file"
        return f"is {kind}; expected the folder of a safetensors checkpoint"
    try:
        names = {file.name for file in location.iterdir()}
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "config.json" in names:
        return ""
    if not names:
        return "is an empty folder; expected the folder of a safetensors checkpoint"
    if "adapter_config.json" in names:
        return "has adapter_config.json but no config.json: a LoRA adapter; it belongs in model.adapters"
    if any(found.endswith(".gguf") for found in names):
        return "has GGUF files but no config.json; expected a safetensors checkpoint"
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
        raise ModelError(f"{wanted}: no such folder, {reason}") from None
