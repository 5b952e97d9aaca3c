"""`--append`: files that an input got after its job's first run, and the order in which all files are computed.

Windows are cut from the files in their order, so new files come after all others, whatever their names: first the files
of the output's first run (`job.json` names them), then each batch that was appended, each sorted by name. A batch is a
record, `_pipeline/appended/0001.json`, created once before any row of it is computed; from then on its files belong to
the job, and runs need no flag to go on with them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pipeline.data.output.parts import PartStore
from pipeline.data.source import Source
from pipeline.errors import EnvironmentFailed, FingerprintError, OutputError
from pipeline.job.planning.fingerprint import file_digests, first_files

FOLDER = "_pipeline/appended"
FORMAT = 1


@dataclass(frozen=True)
class Batches:
    """The batches of an output, each with its files by name and what is known of each; `new`: one that is not on record
    yet. `more`: whether there may be one, which is what --append asks for."""

    appended: tuple[Mapping[str, str], ...] = ()
    first: Mapping[str, str] | None = None  # the first run's files; None where there was no run
    more: bool = False
    new: Mapping[str, str] | None = None

    @classmethod
    def of(cls, store: PartStore, append: bool = False) -> "Batches":
        """Return those on record. Raises OutputError where one is damaged."""
        batches = []
        for name in sorted(store.folder.names(FOLDER)):
            try:
                record = json.loads(store.folder.read(f"{FOLDER}/{name}") or b"")
                if record["format"] != FORMAT:
                    raise OutputError(f"{store.folder.shown(f'{FOLDER}/{name}')}: written by another version")
                batches.append({str(file): str(digest) for file, digest in record["files"].items()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise OutputError(
                    f"{store.folder.shown(f'{FOLDER}/{name}')}: damaged ({error}); was it edited?"
                ) from error
        return cls(tuple(batches), first_files(store), append)

    def arranged(self, source: Source) -> tuple[Source, "Batches"]:
        """`source` with its files in the order of the batches, and the batches with a new one where --append found new
        files. Raises FingerprintError where an appended file has changed or is gone."""
        digests = file_digests(source)
        known = {name for batch in self.appended for name in batch}
        for batch in self.appended:
            for name, digest in batch.items():
                if digests.get(name) != digest:
                    now = digests.get(name, "gone")
                    raise FingerprintError(f"input.path: {name} was appended as a file of {digest}, and is now {now}")
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
        """With the new one."""
        return len(self.appended) + (self.new is not None)

    def is_later(self, name: str) -> bool:
        """Whether a file is not of the first run, as far as is known before the files are looked at."""
        is_new = self.more and self.first is not None and name not in self.first
        return is_new or any(name in batch for batch in self.appended)

    @property
    def later_files(self) -> set[str]:
        """Those that are not of the first run."""
        return {name for batch in (*self.appended, self.new or {}) for name in batch}

    def num_rows(self, source: Source) -> int:
        """Of the new batch."""
        return sum(file.num_rows for file in source.files if file.relative in (self.new or {}))

    def record(self, store: PartStore, num_rows: int, versions: Mapping[str, str], now: datetime) -> None:
        """Make the new batch part of the job. Raises EnvironmentFailed where another run was first."""
        if self.new is None:
            return
        body: dict[str, Any] = {"format": FORMAT, "files": dict(self.new), "rows": num_rows, "at": now.isoformat()}
        place = f"{FOLDER}/{len(self.appended) + 1:04d}.json"
        if not store.folder.create(place, json.dumps(body | {"versions": dict(versions)}, indent=1).encode()):
            raise EnvironmentFailed(
                f"{store.folder.shown(place)}: another run has appended files to this output just now; run again"
            )


def num_appended(store: PartStore) -> int:
    """How many batches are on record, from one listing."""
    return len(store.folder.names(FOLDER))


def batch_numbers(store: PartStore) -> dict[str, int]:
    """Of each appended file the number of its batch, from 1; the first run's files are not in it."""
    return {name: i for i, batch in enumerate(Batches.of(store).appended, 1) for name in batch}
