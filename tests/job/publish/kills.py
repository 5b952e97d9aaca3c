"""Kill publications, repeat them, and look for each row once.

Each publication is a process of its own. It is killed (SIGKILL) at one of several moments: for the fake Hub before a
request is handled, or after that and before its answer; for a Delta table when its first new file appears, at its
commit, or after a share of the time that a publication takes. Half of the kills strike a first publication, half one
that replaces an earlier state of the output. After each kill, readers must find all rows of one state or, before the
first publication, none. Then the publication is repeated.
"""

import io
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import huggingface_hub.hf_api  # noqa: F401 - imported before the processes fork
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pipeline.data.output.parts import PartStore
from pipeline.job.publish.delta import DeltaDestination
from pipeline.job.publish.finished import FinishedOutput
from pipeline.job.publish.hub import HubDestination
from pipeline.job.publish.publication import Published, publish
from tests.job.publish.fake_hub import TOKEN, FakeHub

HUB_TARGET = "hf://datasets/me/answers"
Rows = list[tuple[Any, ...]]


def use_fake_hub(url: str, patch: pytest.MonkeyPatch) -> None:
    """Point huggingface_hub to the fake Hub. It speaks no Xet, the other protocol for uploads."""
    patch.setenv("HF_TOKEN", TOKEN)
    patch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def to_hub(output: Path, target: str = HUB_TARGET, *, public: bool = False, replace: bool = False) -> Published:
    destination = HubDestination(target, public=public, replace=replace)
    return publish(FinishedOutput.open(PartStore(str(output))), destination, lambda text: None)


def to_delta(output: Path, table: Path, *, replace: bool = False) -> Published:
    destination = DeltaDestination(f"delta:{table}", replace=replace)
    return publish(FinishedOutput.open(PartStore(str(output))), destination, lambda text: None)


def rows_of(table: pa.Table) -> Rows:
    """Return the rows without order; repeated ones stay."""
    return sorted((row["source_file"], row["source_row"], row["generated_text"] or "") for row in table.to_pylist())


def rows_in_folder(output: Path) -> Rows:
    return rows_of(pa.concat_tables(pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))))


def rows_on_hub(hub: FakeHub, branch: str = "main") -> Rows:
    """Return the rows by the card's pattern."""
    files = hub.datasets["me/answers"].files(branch) if hub.datasets else {}
    parts = [data for name, data in sorted(files.items()) if name.startswith("data/") and name.endswith(".parquet")]
    return rows_of(pa.concat_tables(pq.read_table(io.BytesIO(data)) for data in parts)) if parts else []


def rows_in_table(path: Path) -> Rows:
    if not DeltaTable.is_deltatable(str(path)):
        return []
    return rows_of(pa.table(DeltaTable(str(path)).to_pyarrow_table()))


def _publish_in_child(output: Path, target: str, began: Any) -> None:
    """Publish in a process of the fork server. target: the url of the fake Hub, or a table's path. began: event."""
    began.set()
    if target.startswith("http"):
        use_fake_hub(target, pytest.MonkeyPatch())
        to_hub(output)
    else:
        to_delta(output, Path(target))


class Publisher:
    """Starts publications in processes that are forked from a small server, which has imported everything and has no
    threads."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def begin(self, output: Path, target: str) -> Any:
        """Start a publication, and return its process when it begins."""
        began = self._context.Event()
        process = self._context.Process(target=_publish_in_child, args=(output, target, began), daemon=True)
        process.start()
        assert began.wait(60)
        return process

    def finish(self, output: Path, target: str) -> float:
        """Publish undisturbed, and return the seconds that it took."""
        process, began_s = self.begin(output, target), time.monotonic()
        process.join(120)
        assert process.exitcode == 0
        return time.monotonic() - began_s


def kill_on_hub(publisher: Publisher, old: Path, new: Path, num_kills: int) -> Counter[str]:
    """Kill publications to the fake Hub, and return the requests at which they were killed."""
    moments, struck = _moments_on_hub(publisher, old, new), Counter[str]()
    for kill in range(num_kills):
        of_kind = moments[kill % 2]
        count, is_done = of_kind[round(kill // 2 * (len(of_kind) - 1) / max(1, (num_kills - 1) // 2))]
        with FakeHub() as hub:
            if kill % 2:
                publisher.finish(old, hub.url)
            before = rows_on_hub(hub)
            first, victims = len(hub.requests), list[int]()

            def strike(request: str, done: bool, hub=hub, first=first, at=(count, is_done), victims=victims) -> bool:
                if victims and (len(hub.requests) - first, done) == at:
                    os.kill(victims.pop(), signal.SIGKILL)
                    struck[f"{'after' if done else 'before'} {request.partition('/')[2].split('/')[0]}"] += 1
                    return True
                return False

            hub.strike = strike
            process = publisher.begin(new, hub.url)
            victims.append(process.pid)
            process.join(60)
            assert process.exitcode == -signal.SIGKILL, (kill, process.exitcode)
            assert rows_on_hub(hub) in (before, rows_in_folder(new)), f"kill {kill}"
            publisher.finish(new, hub.url)
            assert rows_on_hub(hub) == rows_in_folder(new), f"kill {kill}"
            titles = [title for title in hub.datasets["me/answers"].titles if title.startswith("Publish")]
            assert len(titles) == 1 + kill % 2, "one commit for each state"
    return struck


def _moments_on_hub(publisher: Publisher, old: Path, new: Path) -> list[list[tuple[int, bool]]]:
    """Return the moments of a first publication and of one that replaces another, as (request, whether it is done)."""
    with FakeHub() as hub:
        publisher.finish(old, hub.url)
        first = len(hub.requests)
        publisher.finish(new, hub.url)
        counts = [first, len(hub.requests) - first]
    return [[(request, done) for request in range(2, count + 1) for done in (False, True)] for count in counts]


def kill_on_delta(publisher: Publisher, old: Path, new: Path, num_kills: int, folder: Path) -> Counter[str]:
    """Kill publications to Delta tables in `folder`, and return what they had done."""
    seconds = [publisher.finish(old, str(folder / "first")), publisher.finish(new, str(folder / "first"))]
    struck = Counter[str]()
    for kill in range(num_kills):
        table = folder / f"table-{kill}"
        if kill % 2:
            publisher.finish(old, str(table))
        before, files = rows_in_table(table), set(table.glob("**/*"))
        process = publisher.begin(new, str(table))
        suffix = (".parquet", None, ".json", None)[kill // 2 % 4]
        if suffix is None:
            time.sleep(seconds[kill % 2] * (kill // 2 + 0.5) / ((num_kills + 1) // 2))
        while suffix and process.is_alive() and not set(table.glob(f"**/*{suffix}")) - files:
            time.sleep(0.0005)
        process.kill()
        process.join(60)
        made = {path.suffix for path in set(table.glob("**/*")) - files}
        struck["committed" if ".json" in made else "wrote files" if ".parquet" in made else "began"] += 1
        assert rows_in_table(table) in (before, rows_in_folder(new)), f"kill {kill}"
        publisher.finish(new, str(table))
        assert rows_in_table(table) == rows_in_folder(new), f"kill {kill}"
        assert DeltaTable(str(table)).version() == kill % 2, "one transaction for each state"
    return struck


def two_states(folder: Path) -> tuple[Path, Path]:
    """Compute a job with a failing row, and again after its cure; return copies of its output before and after."""
    from pipeline.job.dataflow.spec import FlowSpec
    from tests.job.conftest import TEXTS, Job, run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowSpec, "needs_ray", False)
        job = Job(folder).rows([*TEXTS[:20], "text ☠", None]).fake(kill="☠", cured_by=str(folder / "cured"))
        run(job)
        old = Path(shutil.copytree(job.output, folder / "old"))
        (folder / "cured").touch()
        run(job, retry_failed=True)
    return old, job.output
