"""Resolution of a LoRA adapter to a local folder in PEFT's layout: an embedded adapter (`demo:...`), a folder, an
fsspec url, or a Hugging Face id."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoints.cache import cache_folder, fetch_model
from pipeline.checkpoints.digest import file_digest
from pipeline.checkpoints.locate import download, model_kind
from pipeline.demo import ADAPTERS, demo_adapter
from pipeline.errors import ModelError
from pipeline.machine.caches import hub_folder
from pipeline.stores.filesystem import is_url, storage_for
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts

ADAPTER_CONFIG, ADAPTER_WEIGHTS = ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
EMBEDDED_ADAPTERS = tuple(f"demo:{name}" for name in ADAPTERS)


def resolve_adapter(
    path: str,
    storage: Mapping[str, Mapping[str, Any]],
    key: str,
    log: Callable[[str], None] | None = None,
    retries: RetryCounts | None = None,
) -> Path:
    """Return the local folder of an adapter, downloading it if needed. Arguments and errors as `resolve_model`."""
    if not is_url(path):
        return locate_adapter(path, key)
    log = log or (lambda text: None)
    cache = cache_folder(log=log)
    return fetch_model(path, storage_for(path, storage), cache, log, retries, key, ADAPTER_CONFIG).resolve()


def locate_adapter(path: str, key: str = "adapter") -> Path:
    """Return the folder of an adapter that is not at a url. Raises ModelError with what was tried."""
    kind = model_kind(path)
    if kind == "embedded":
        try:
            return demo_adapter(path.partition(":")[2]).resolve()
        except KeyError as error:
            raise ModelError(f"{key} {path}: {error.args[0]}") from None
    if kind == "id":
        folder = download(path, None, ADAPTER_FILES)
    else:
        folder = Path(os.path.expanduser(path))
    if reason := _problem(folder):
        raise ModelError(f"{key} {shown_url(path)}: {reason}")
    return folder.resolve()


def adapter_here(path: str, key: str) -> Path | None:
    """Return the folder of an adapter if it is on this machine already, without downloading. None for urls."""
    kind = model_kind(path)
    if kind == "url":
        return None
    if kind != "id":
        return locate_adapter(path, key)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, ADAPTER_CONFIG, cache_dir=hub_folder())
    return Path(found).parent if isinstance(found, str) else None


def adapter_digest(folder: Path) -> dict[str, str]:
    """Return the digest of each file of an adapter, as `model_digest` does."""
    return {name: file_digest(folder / name) for name in ADAPTER_FILES}


def _problem(folder: Path) -> str:
    """Return why `folder` is not an adapter; empty if it may be one."""
    if not folder.is_dir():
        return "no such folder, and not a Hugging Face id (owner/name)"
    if not (folder / ADAPTER_CONFIG).is_file():
        return f"has no {ADAPTER_CONFIG}; expected the folder of a LoRA adapter in PEFT's layout"
    if (folder / ADAPTER_WEIGHTS).is_file():
        return ""
    if any(folder.glob("adapter_model.bin")):
        return f"has only pickles (adapter_model.bin), which can run code; save the adapter as {ADAPTER_WEIGHTS}"
    return f"has no {ADAPTER_WEIGHTS}"
