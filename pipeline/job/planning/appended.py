"""`--append`: files added to an input after its job's first run, and the order of all files.

Windows are cut from the files in order, so new files come after all others, regardless of their names: first the files
of the output's first run (listed in `job.json`), then each appended batch, each sorted by name. A batch is a record,
`_pipeline/appended/0001.json`, created before any of its rows is computed. From then on its files belong to the job,
and runs resume with them without a flag.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pipeline.data.output.parts import PartStore
from pipeline.data.source import Source
from pipeline.errors import EnvironmentFailed, FingerprintError
from pipeline.job.planning.fingerprint import file_digests, first_files

FOLDER = "_pipeline/appended"
FORMAT = 1


@dataclass(frozen=True)
class Batches:
    """Appended batches of an output: a mapping of file name to digest for each recorded batch. `new`: a batch that is
    not recorded yet. `more`: whether --append allows one."""

    appended: tuple[Mapping[str, str], ...] = ()
    first: Mapping[str, str] | None = None  # the first run's files; None without a run
    more: bool = False
    new: Mapping[str, str] | None = None

    @classmethod
    def load(cls, store: PartStore, append: bool = False) -> "Batches":
        """Read the recorded batches. Raises OutputError if one is damaged."""

        def files(record: dict[str, Any]) -> dict[str, str]:
            return {str(file): str(digest) for file, digest in record["files"].items()}

        names = sorted(store.folder.names(FOLDER))
        batches = (store.read_record(f"{FOLDER}/{name}", FORMAT, files) for name in names)
        return cls(tuple(batch for batch in batches if batch is not None), first_files(store), append)

    def arranged(self, source: Source) -> tuple[Source, "Batches"]:
        """Return `source` with its files in the order of the batches, and the batches including a new one if --append
        found new files. Raises FingerprintError if an appended file has changed or is missing."""
        digests = file_digests(source)
        known = {name for batch in self.appended for name in batch}
        for batch in self.appended:
            for name, digest in batch.items():
                if digests.get(name) != digest:
                    now = digests.get(name, "missing")
                    raise FingerprintError(
                        f"input.path: {name} was appended as {digest} and is now {now}; restore the file"
                    )
        new = None
        if self.more and self.first is not None:
            new = {name: digest for name, digest in digests.items() if name not in known and name not in self.first}
        batches = [*self.appended, *([new] if new else [])]
        later = {name for batch in batches for name in batch}
        groups = [[file for file in source.files if file.relative not in later]]
        groups += [[file for file in source.files if file.relative in batch] for batch in batches]
        starts, files = [], list(groups[0])
        for group in groups[1:]:
            starts.append(len(files))
            files += group
        return replace(source, files=tuple(files), batches=tuple(starts)), replace(self, new=new or None)

    @property
    def count(self) -> int:
        """Number of batches, including the new one."""
        return len(self.appended) + (self.new is not None)

    def is_later(self, name: str) -> bool:
        """Return whether a file was added after the first run, as far as is known before the files are read."""
        is_new = self.more and self.first is not None and name not in self.first
        return is_new or any(name in batch for batch in self.appended)

    @property
    def later_files(self) -> set[str]:
        """Names of files that were added after the first run."""
        return {name for batch in (*self.appended, self.new or {}) for name in batch}

    def num_rows(self, source: Source) -> int:
        """Return the number of rows of the new batch."""
        return sum(file.num_rows for file in source.files if file.relative in (self.new or {}))

    def record(self, store: PartStore, num_rows: int, versions: Mapping[str, str], now: datetime) -> None:
        """Record the new batch as part of the job. Raises EnvironmentFailed if another run recorded one first."""
        if self.new is None:
            return
        body: dict[str, Any] = {"format": FORMAT, "files": dict(self.new), "rows": num_rows, "at": now.isoformat()}
        path = f"{FOLDER}/{len(self.appended) + 1:04d}.json"
        if not store.folder.create(path, json.dumps(body | {"versions": dict(versions)}, indent=1).encode()):
            raise EnvironmentFailed(
                f"{store.folder.shown(path)}: another run has appended files to this output; run again"
            )


def num_appended(store: PartStore) -> int:
    """Return the number of recorded batches, from one listing."""
    return len(store.folder.names(FOLDER))


def batch_numbers(store: PartStore) -> dict[str, int]:
    """Return the batch number of each appended file, from 1, without the first run's files."""
    return {name: i for i, batch in enumerate(Batches.load(store).appended, 1) for name in batch}
