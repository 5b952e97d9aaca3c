"""`--append` killed at any write: no row is lost or doubled, and a plain run resumes once the batch is recorded."""

import contextlib
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.output.parts import PartStore
from pipeline.errors import FingerprintError
from pipeline.job.output.audit import audit
from pipeline.job.planning.appended import FOLDER
from pipeline.stores.local_folder import LocalFolder
from tests.job.conftest import TEXTS, Job, run, success

ROOT = Path(__file__).parents[3]
QUICK = {"run": {"drain_timeout": "0.1 s"}, "output": {"rows_per_file": 4}}
pytestmark = pytest.mark.usefixtures("without_ray")


def add(job: Job, name: str, ids: range) -> None:
    table = pa.table({"id": ids, "text": [f"more {i}" for i in ids]})
    pq.write_table(table, job.folder / "in" / name, row_group_size=10)


def check(job: Job, ids: set[int]) -> None:
    """Assert that the output has each row once and that `_SUCCESS` counts all."""
    found_ids = [row["id"] for row in job.table().to_pylist()]
    assert sorted(found_ids) == sorted(ids)
    assert success(job)["input_rows"] == len(ids)
    found = audit(PartStore(str(job.output)), True, lambda text: None)
    assert found.sound, found.problems


def files(job: Job) -> dict[str, bytes]:
    return {str(p.relative_to(job.output)): p.read_bytes() for p in job.output.rglob("*") if p.is_file()}


class Dead(BaseException):
    pass


class DyingFolder:
    """A folder that dies at the `at`-th write of driver and actors: `before` it, or after it as the last one."""

    def __init__(self, monkeypatch, at: int, before: bool) -> None:
        self.at, self.before, self.writes, self.dead = at, before, 0, False
        for name in ("create", "replace", "remove", "swap"):
            monkeypatch.setattr(LocalFolder, name, self._mortal(getattr(LocalFolder, name)))

    def _mortal(self, write):
        def mortal(*args):
            if threading.current_thread().name == "telemetry":  # it decides nothing, and the run waits for its end
                return None if self.dead else write(*args)
            if self.dead:
                raise Dead
            self.writes += 1
            self.dead = self.writes == self.at
            if self.dead and self.before:
                raise Dead
            done = write(*args)
            if self.dead:
                raise Dead
            return done

        return mortal


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_that_dies_at_any_write_is_resumed(job, monkeypatch):
    run(job.rows(TEXTS[:12]), **QUICK)
    add(job, "a.parquet", range(50, 58))
    before_append, at, recorded = files(job), 0, set()
    while True:
        at += 1
        for before in (True, False):
            for name in files(job).keys() - before_append.keys():
                (job.output / name).unlink()
            for name, data in before_append.items():
                (job.output / name).write_bytes(data)
            with monkeypatch.context() as patch:
                folder = DyingFolder(patch, at, before)
                with contextlib.suppress(BaseException):
                    run(job, append=True, **QUICK)
            if not folder.dead:
                assert recorded == {True, False}
                assert at > 5, "the record, _SUCCESS removed, two parts, _SUCCESS"
                return
            if (job.output / "_SUCCESS").exists():
                assert success(job)["input_rows"] == job.table().num_rows
            recorded.add((job.output / FOLDER / "0001.json").exists())
            if (job.output / FOLDER / "0001.json").exists():
                run(job, **QUICK)
            else:
                with pytest.raises(FingerprintError, match="--append"):
                    run(job, **QUICK)
                run(job, append=True, **QUICK)
            check(job, {*range(12), *range(50, 58)})
