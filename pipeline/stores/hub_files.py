"""Datasets on the Hugging Face Hub as a filesystem, read by ranges: `hf://datasets/ORG/NAME@COMMIT/PATH`.

huggingface_hub's own filesystem lists a folder for each file that it opens, and reads megabytes ahead of each range.
Paths name a commit (`pinned`), so nothing that was read once can change.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from huggingface_hub import HfApi, errors
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from pipeline.errors import InputError

_PATH = re.compile(r"datasets/([^/@]+/[^/@]+)(?:@((?:refs/(?:convert|pr)/)?[^/]+))?(?:/(.*))?")
_NoAnswer: Any = errors.HfHubHTTPError.__bases__[0]  # base class of the errors of huggingface_hub's HTTP client
_TIMEOUT_S = 60.0
_MAX_WHOLE_BYTES = 16 << 20
_TOKEN = "set HF_TOKEN to a token that may read it (https://huggingface.co/settings/tokens)"


class HubFiles(fsspec.AbstractFileSystem):
    """Read-only filesystem of datasets. Raises InputError with advice if one is missing or the access is denied."""

    protocol = "hf"
    root_marker = ""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        super().__init__()
        self._api, self._token = HfApi(endpoint=endpoint, token=token), token
        self._infos: dict[str, dict[str, Any]] = {}

    def pinned(self, path: str) -> tuple[str, list[Any]]:
        """Return the path with the commit of its revision, and the configurations in the dataset's README."""
        name, revision, inner = self._parsed(path)
        with _advice(path):
            found = self._api.dataset_info(name, revision=revision, expand=["sha", "cardData"], timeout=_TIMEOUT_S)
        configs = found.card_data.to_dict().get("configs") if found.card_data else None
        return f"datasets/{name}@{found.sha}/{inner}".rstrip("/"), configs if isinstance(configs, list) else []

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        name, revision, inner = self._parsed(path)
        if not inner:
            return {"name": path, "size": 0, "type": "directory"}
        if path not in self._infos:
            with _advice(path):
                found = self._api.get_paths_info(name, [inner], revision=revision, repo_type="dataset")
            if not found:
                raise FileNotFoundError(path)
            self._infos[path] = self._info(path, found[0])
        return self._infos[path]

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        found = self._listed(path, recursive=False)
        return list(found.values()) if detail else list(found)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any
    ) -> Any:
        path = path.rstrip("/")  # fsspec's glob adds one
        try:
            found = self._listed(path, recursive=True)
        except FileNotFoundError:
            found = {}
        depth = path.count("/")
        kept = {
            each: info
            for each, info in sorted(found.items())
            if (withdirs or info["type"] == "file") and (maxdepth is None or each.count("/") - depth <= maxdepth)
        }
        return kept if detail else list(kept)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        name, revision, inner = self._parsed(path)
        url = f"{self._api.endpoint}/datasets/{name}/resolve/{quote(revision or 'main', safe='')}/{quote(inner)}"
        headers = build_hf_headers(token=self._token) | {"Accept-Encoding": "identity"}
        if start is not None or end is not None:
            headers["Range"] = f"bytes={start or 0}-{'' if end is None else end - 1}"
        with _advice(path):
            answer = get_session().get(url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True)
            hf_raise_for_status(answer)
        if answer.status_code == 200 and len(answer.content) <= _MAX_WHOLE_BYTES:
            return answer.content[start:end]  # the Hub may send a small file as a whole
        return answer.content

    def _listed(self, path: str, recursive: bool) -> dict[str, dict[str, Any]]:
        name, revision, inner = self._parsed(path)
        root = path[: len(path) - len(inner)].rstrip("/")
        with _advice(path):
            found = self._api.list_repo_tree(
                name, inner or None, recursive=recursive, revision=revision, repo_type="dataset"
            )
            infos = {f"{root}/{each.path}": self._info(f"{root}/{each.path}", each) for each in found}
        self._infos |= infos
        return infos

    def _info(self, path: str, entry: Any) -> dict[str, Any]:
        if not hasattr(entry, "size"):
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": entry.size, "type": "file", "etag": entry.blob_id}

    def _parsed(self, path: str) -> tuple[str, str | None, str]:
        """Return the dataset, the revision and the path inside it."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise InputError(f"hf://{path}: expected hf://datasets/ORG/NAME, then @REVISION and /PATH if needed")
        return match[1], match[2] and unquote(match[2]), match[3] or ""


@contextmanager
def _advice(path: str) -> Iterator[None]:
    """Turn permanent errors into InputError or FileNotFoundError, and those of the network into ConnectionError."""
    shown = f"hf://{path}"
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise InputError(f"{shown}: HF_HUB_OFFLINE is set; unset it, or download the dataset") from None
    except errors.GatedRepoError:
        raise InputError(f"{shown}: the dataset is gated; accept its conditions on its page, and {_TOKEN}") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{shown}: no such dataset; check its name, or if it is private, {_TOKEN}") from None
    except errors.HFValidationError:
        raise InputError(f"{shown}: not the name of a dataset; expected ORG/NAME") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{shown}: the dataset has no such branch, tag or commit") from None
    except errors.EntryNotFoundError:
        raise FileNotFoundError(path) from None
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise InputError(f"{shown}: access denied; {_TOKEN}") from None
        raise
    except _NoAnswer as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
