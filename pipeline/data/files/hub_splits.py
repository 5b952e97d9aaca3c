"""Inputs on the Hugging Face Hub: the commit that a job reads, and the choice of one split of one configuration."""

import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.data.files.footer import reading
from pipeline.errors import InputError
from pipeline.stores.filesystem import HUB, filesystem, open_problem
from pipeline.stores.redaction import secrets_of
from pipeline.stores.retries import RetryCounts

_SPLIT = re.compile(
    r"(?:.*?[-._ ])?(train|training|validation|valid|val|dev|test|testing|eval|evaluation)(?=[-._ 0-9])", re.IGNORECASE
)
_REPOSITORY_PARTS = 5  # of a url, split at slashes: hf:, an empty one, datasets, ORG, NAME@COMMIT
_MAX_SHOWN = 20


@dataclass(frozen=True)
class HubInput:
    """Input on the Hub. url: `given` with the commit of its revision. configs: those in the dataset's README."""

    given: str
    url: str
    configs: list[Any]

    def check_choice(self, files: list[str]) -> None:
        """Raise InputError if `files`, relative to `url`, a folder, belong to several splits or configurations."""
        folder = "/".join(self.url.split("/")[_REPOSITORY_PARTS:]).rstrip("/")
        given = self.given.rstrip("/")
        if found := _choices([posixpath.join(folder, file) for file in files], self.configs):
            repository = given.removesuffix(folder).rstrip("/")
            lines = [f"input.path {given}: has several splits or configurations; choose one:"]
            lines += [f"  {repository}/{pattern}" for pattern in found[:_MAX_SHOWN]]
            if len(found) > _MAX_SHOWN:
                lines.append(f"  and {len(found) - _MAX_SHOWN} more")
            raise InputError("\n".join([*lines, f"or read all: {given}/**"]))


def hub_input(path: str, storage: dict[str, Any], retries: RetryCounts | None) -> HubInput | None:
    """Return the input of a url of the Hub, or None for other paths. Raises InputError, EnvironmentFailed."""
    if not path.startswith(HUB):
        return None
    name = f"input.path {path}"
    try:
        fs, full = filesystem(path, storage, retries=retries)
    except TypeError as error:
        raise InputError(f"{name}: {open_problem(path, storage, error)}") from None
    with reading(name, secrets_of(storage)):
        pinned, configs = fs.call(full, lambda hub: hub.pinned(full))
    return HubInput(path, f"hf://{pinned}" + "/" * path.endswith("/"), configs)


def _choices(files: list[str], configs: list[Any]) -> list[str]:
    """Return a pattern for each split of `files`, paths in the repository; none if they are all of one split."""
    from fsspec.utils import glob_translate

    declared = [(patterns, re.compile("|".join(map(glob_translate, patterns)))) for patterns in _declared(configs)]
    if any(all(map(pattern.match, files)) for _, pattern in declared):
        return []
    if some := [patterns for patterns, pattern in declared if any(map(pattern.match, files))]:
        return list(dict.fromkeys(pattern for patterns in some for pattern in patterns))
    groups: dict[tuple[str, str], list[str]] = {}
    for file in files:
        folder, name = posixpath.split(file)
        plain = "/".join(part for part in folder.split("/") if "=" not in part)  # partitions are columns
        match = _SPLIT.match(name)
        groups.setdefault((plain, match[0] if match else ""), []).append(file)
    if len(groups) == 1:
        return []
    # the common prefix of names, not of folders
    return [each[0] if len(each) == 1 else f"{os.path.commonprefix(each)}*" for each in groups.values()]  # noqa: RUF071


def _declared(configs: list[Any]) -> Iterator[list[str]]:
    """Yield the patterns of each split of each configuration in a README."""
    for config in (config for config in configs if isinstance(config, dict)):
        files = config.get("data_files") or "**"
        splits: list[Any] = files if isinstance(files, list) and isinstance(files[0], dict) else [{"path": files}]
        for split in (split for split in splits if isinstance(split, dict)):
            patterns = [split["path"]] if isinstance(split.get("path"), str) else split.get("path")
            if isinstance(patterns, list) and patterns and all(isinstance(each, str) for each in patterns):
                yield [posixpath.join(str(config.get("data_dir") or ""), pattern) for pattern in patterns]
