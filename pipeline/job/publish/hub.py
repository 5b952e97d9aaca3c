"""Publication as a dataset of the Hugging Face Hub.

The parts are uploaded first. The Hub addresses uploads by content, so a repeated call sends only what is missing, and
no reader sees them yet. Then one commit adds the parts, the card and the marker, and deletes parts of an earlier
publication. It names its parent, and the Hub refuses it if the branch has moved. The marker, `pipeline.json`, records
which output the commit holds.
"""

import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.output.parts import PartName
from pipeline.errors import ConfigError, EnvironmentFailed, OutputError, PipelineError
from pipeline.formatting import counted
from pipeline.job.publish.card import DATA, dataset_card
from pipeline.job.publish.finished import FinishedOutput
from pipeline.job.publish.publication import Unsettled
from pipeline.stores.redaction import error_text

HUB = "hf://"
MARKER, CARD = "pipeline.json", "README.md"
_TARGET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(.+))?")
_OF_THE_HUB = (".gitattributes",)  # in every new repository
_MAX_FILES = 10_000  # the Hub's limit for a folder
_BATCH_BYTES, _BATCH_FILES = 64 * 2**20, 100  # uploaded together, and held in memory
_MAX_NAMES = 5  # in messages


@dataclass(frozen=True)
class _Branch:
    """State of the branch at a commit: its files, and the contents of the marker, None without one."""

    commit: str
    files: frozenset[str]
    marker: Any

    @property
    def data(self) -> frozenset[str]:
        return frozenset(name for name in self.files if name.startswith(f"{DATA}/"))


class HubDestination:
    """Dataset `hf://datasets/OWNER/NAME[@BRANCH]`. A missing one is created."""

    def __init__(self, target: str, *, public: bool, replace: bool) -> None:
        """public: visibility of a new dataset. replace: overwrite files that the job has not published. Raises
        ConfigError for an invalid target, or without a token."""
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils import disable_progress_bars

        match = _TARGET.fullmatch(target)
        if match is None:
            raise ConfigError(f"{target}: expected hf://datasets/OWNER/NAME or hf://datasets/OWNER/NAME@BRANCH")
        self._token = get_token() or ""
        if not self._token:
            raise ConfigError(
                f"{target}: no token for the Hugging Face Hub; set HF_TOKEN to one with write access, or run "
                "`hf auth login`"
            )
        disable_progress_bars()
        self.target, self._public, self._replace = target, public, replace
        self._api = HfApi(token=self._token)
        self._dataset: Any = {"repo_id": match[1], "repo_type": "dataset"}
        self._revision = match[2] or "main"
        self._branch = _Branch("", frozenset(), None)

    def held(self, output: FinishedOutput) -> str | None:
        if len(output.parts) > _MAX_FILES:
            raise OutputError(
                f"{output.store.path}: {len(output.parts):,} parts, and a folder on the Hub holds {_MAX_FILES:,} files;"
                " merge them with `pipeline compact` and upload the new folder with `hf upload`"
            )
        with self._explained():
            commit = self._commit()
            files = frozenset(self._api.list_repo_files(**self._dataset, revision=commit))
            try:
                marker = json.loads(self._read(MARKER, commit)) if MARKER in files else None
            except ValueError:  # another program's file
                marker = None
        self._branch = branch = _Branch(commit, files, marker)
        return self._url(commit) if marker == _marker(output) and branch.data == _paths(output) else None

    def write(self, output: FinishedOutput, log: Callable[[str], None]) -> str:
        from httpx2 import TransportError
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete
        from huggingface_hub.errors import HfHubHTTPError

        branch = self._branch
        is_own = isinstance(branch.marker, dict) and branch.marker.get("fingerprint") == output.fingerprint
        self._check(output, is_own)
        with self._explained():
            card = self._read(CARD, branch.commit) if is_own and CARD in branch.files else None
            operations = [
                *self._upload(output, log),
                CommitOperationAdd(CARD, dataset_card(output, card).encode()),
                CommitOperationAdd(MARKER, f"{json.dumps(_marker(output), indent=1)}\n".encode()),
                *(CommitOperationDelete(name) for name in sorted(branch.data - _paths(output))),
            ]
            try:
                done = self._api.create_commit(
                    **self._dataset,
                    revision=self._revision,
                    operations=operations,
                    commit_message=f"Publish {output.report.job}: {counted(output.num_rows, 'row')}",
                    parent_commit=branch.commit,
                )
            except (HfHubHTTPError, TransportError) as error:
                if _may_pass(_status(error)):
                    raise Unsettled(f"the commit failed ({self._text(error)})") from error
                raise
        return self._url(done.oid)

    def _commit(self) -> str:
        """Return the commit of the branch, after creating the dataset and the branch if they do not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            self._api.repo_info(**self._dataset)
        except RepositoryNotFoundError:
            self._api.create_repo(**self._dataset, private=not self._public, exist_ok=True)
        try:
            return self._api.repo_info(**self._dataset, revision=self._revision).sha or ""
        except RevisionNotFoundError:
            self._api.create_branch(**self._dataset, branch=self._revision, exist_ok=True)
            return self._api.repo_info(**self._dataset, revision=self._revision).sha or ""

    def _read(self, name: str, commit: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = self._api.hf_hub_download(**self._dataset, filename=name, revision=commit, local_dir=folder)
            return Path(path).read_text(encoding="utf-8")

    def _url(self, commit: str) -> str:
        return f"{self._api.endpoint}/datasets/{self._dataset['repo_id']}/tree/{commit}"

    def _check(self, output: FinishedOutput, is_own: bool) -> None:
        """Raise OutputError if the commit would overwrite files that the job has not published, unless `replace`, or if
        the Hub would leave out some of its files."""
        branch, paths = self._branch, _paths(output)
        if ".gitignore" in branch.files:
            raise OutputError(f"{self.target}: has a .gitignore, by which the Hub may leave out parts; remove it there")
        if is_own:
            foreign = {name for name in branch.data if not _is_part(name, output)}
            problem = f"holds files in {DATA}/ that readers would take for parts"
        else:
            foreign = branch.files.difference(_OF_THE_HUB)
            problem = "holds another job's output" if branch.marker else "holds files that this job has not published"
        if foreign and not self._replace:
            raise OutputError(
                f"{self.target}: {problem}: {_named(foreign)}. With --replace one commit overwrites "
                f"{_named(branch.files.intersection({CARD, MARKER, *paths}))} and deletes "
                f"{_named(branch.data - paths)}; other files stay"
            )

    def _upload(self, output: FinishedOutput, log: Callable[[str], None]) -> Iterator[Any]:
        """Upload the parts in batches, and yield their operations for the commit."""
        from huggingface_hub import CommitOperationAdd

        def send() -> list[CommitOperationAdd]:
            self._api.preupload_lfs_files(**self._dataset, revision=self._revision, additions=batch)
            return batch  # without their bytes

        batch, held_bytes = [], 0
        for name, data in output.read(log):
            batch.append(CommitOperationAdd(f"{DATA}/{name}", data))
            held_bytes += len(data)
            if held_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
                yield from send()
                batch, held_bytes = [], 0
        yield from send()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the Hub and of its library into ours. The library raises RuntimeError for failed uploads, and
        ValueError for what the Hub would refuse."""
        from httpx2 import HTTPError

        try:
            yield
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            status = _status(error) or (400 if isinstance(error, ValueError) else None)
            raise self._problem(status, self._text(error)) from error

    def _problem(self, status: int | None, text: str) -> PipelineError:
        if _may_pass(status):
            return EnvironmentFailed(f"{self.target}: the Hub cannot be reached, or failed: {text}")
        advice = {
            401: "the Hub does not accept the token for this dataset; check HF_TOKEN or `hf auth whoami`",
            403: "the token may not write here; use one with write access",
            404: "not found, or hidden from this token; check the owner, the name and the branch",
        }.get(status or 0, "the Hub refuses the request")
        return OutputError(f"{self.target}: {advice}: {text}")

    def _text(self, error: BaseException) -> str:
        return error_text(error, frozenset({self._token}))


def _marker(output: FinishedOutput) -> dict[str, Any]:
    return {"format": 1, "job": output.report.job, "fingerprint": output.fingerprint, "digest": output.digest}


def _paths(output: FinishedOutput) -> set[str]:
    return {f"{DATA}/{name}" for name in output.parts}


def _is_part(path: str, output: FinishedOutput) -> bool:
    name = PartName.parse(path.removeprefix(f"{DATA}/"))
    return name is not None and name.fingerprint8 == output.fingerprint[:8]


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status in the error or its causes; None if no answer arrived."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return None if error is None else error.response.status_code


def _may_pass(status: int | None) -> bool:
    """Return whether another try may succeed: the branch has moved, the Hub was busy, or the answer was lost."""
    return status is None or status in (412, 429) or status >= 500


def _named(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_NAMES]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return f"{', '.join(shown)}{more}" if shown else "nothing"
