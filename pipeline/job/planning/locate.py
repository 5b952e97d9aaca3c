"""Find the folders of a job's checkpoints and adapters: on this machine alone, or with downloads."""

import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.checkpoints.adapters import ADAPTER_FILES, adapter_here, resolve_adapter
from pipeline.checkpoints.file_checks import is_gguf, split_files
from pipeline.checkpoints.locate import checkpoint_problem, folder_here, model_kind, resolve_model
from pipeline.errors import ModelError, PipelineError
from pipeline.job.planning.checkpoint_values import MODEL_FILES
from pipeline.stores.filesystem import filesystem, is_url, storage_for
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts

Log = Callable[[str], None]
Storage = Mapping[str, Mapping[str, Any]]  # the job's fsspec options by url prefix


class Locate(Protocol):
    """Find the folders of checkpoints and adapters. Raises ModelError, EnvironmentFailed, and NotKnown if one is not on
    this machine and must not be downloaded."""

    def model(self, key: str, path: str, storage: Storage, revision: str | None) -> Path: ...
    def adapter(self, key: str, path: str, storage: Storage) -> Path: ...


class NotKnown(Exception):
    """A value is unknown: its check failed, or it needs a checkpoint that is not on this machine."""


@dataclass(frozen=True)
class Fetched:
    """`Locate` that downloads what is not on this machine."""

    log: Log
    retries: RetryCounts | None

    def model(self, key: str, path: str, storage: Storage, revision: str | None) -> Path:
        _check_kind(key, path)
        return _whole(key, path, resolve_model(path, storage, self.log, self.retries, key, revision))

    def adapter(self, key: str, path: str, storage: Storage) -> Path:
        return resolve_adapter(path, storage, key, self.log, self.retries)


class OnThisMachine:
    """`Locate` that downloads nothing. For a url it checks that the files exist in the store."""

    def model(self, key: str, path: str, storage: Storage, revision: str | None) -> Path:
        _check_kind(key, path)
        if is_url(path):
            _check_files(key, path, missing_from_store(path, storage_for(path, storage)))
        folder = folder_here(path, revision)
        if folder is None or not (folder / "config.json").is_file():
            raise NotKnown(key)
        return _whole(key, path, folder.resolve())

    def adapter(self, key: str, path: str, storage: Storage) -> Path:
        if is_url(path):
            _check_files(key, path, missing_from_store(path, storage_for(path, storage), ADAPTER_FILES))
        folder = adapter_here(path, key)
        if folder is None:
            raise NotKnown(key)
        return folder


def missing_from_store(url: str, storage: Mapping[str, Any], names: Iterable[str] = MODEL_FILES) -> list[str]:
    """Return the files of `names` that are missing at an fsspec url; for that of a GGUF file, its own files. `storage`:
    its fsspec options. Raises ModelError, EnvironmentFailed."""
    if is_gguf(url):
        url, name = posixpath.split(url)
        names = split_files(name)
    try:
        fs, root = filesystem(url, storage)
        return [name for name in names if not fs.exists(posixpath.join(root, name))]
    except PipelineError:
        raise
    except Exception as error:
        # Each store's library has its own exceptions, and their texts may contain secrets.
        given = ", ".join(sorted(storage)) or "none given"
        raise ModelError(
            f"{shown_url(url)}: cannot be opened ({type(error).__name__}); check the url, its permissions and its "
            f"storage options ({given})"
        ) from None


def _check_kind(key: str, path: str) -> None:
    kind = model_kind(path)
    if kind == "missing" or (kind == "folder" and checkpoint_problem(path)):
        raise ModelError(f"{key} {shown_url(path)}: {checkpoint_problem(path)}")


def _whole(key: str, path: str, folder: Path) -> Path:
    _check_files(key, path, [name for name in MODEL_FILES if not (folder / name).is_file()])
    return folder


def _check_files(key: str, path: str, absent: list[str]) -> None:
    if absent:
        files = " and no ".join(absent)
        raise ModelError(f"{key} {shown_url(path)}: no {files} in this folder; expected the folder of a checkpoint")
