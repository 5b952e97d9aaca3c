"""The demonstration job with two ranks an engine: the rows of one rank, also after kills and on a cluster."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.dataset as ds
import pytest
from ray.cluster_utils import Cluster

from pipeline.engine.parallel.group import RANK_MODULE

pytestmark = pytest.mark.timeout(900)  # Ray starts slowly on a machine that runs other tests
ROOT = Path(__file__).parents[3]
NUM_ROWS = 96
UNIT_ROWS = 16
# One unit fills an engine, so that units end one after the other.
SETTINGS = (
    "engine.dtype=float32", f"engine.max_num_seqs={UNIT_ROWS}", "sampling.max_tokens=24",
    f"run.window_rows={NUM_ROWS // 2}", f"output.rows_per_file={UNIT_ROWS}",
)  # fmt: skip


def start(output: Path, *settings: str, **environ: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pipeline", "run", "jobs/summarize.yaml", "--limit", str(NUM_ROWS)]
    for setting in (*SETTINGS, f"output.path={output}", *settings):
        command += ["--set", setting]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environ, start_new_session=True, **pipe)


def finish(run: "subprocess.Popen[str]") -> None:
    printed = run.communicate(timeout=600)[0]
    assert run.returncode == 0, printed


def rows(output: Path) -> dict[int, str]:
    table = ds.dataset([str(part) for part in output.glob("*.parquet")]).to_table(["source_row", "generated_text"])
    found = dict(zip(*(column.to_pylist() for column in table.columns)))
    assert len(found) == table.num_rows == NUM_ROWS
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    output = tmp_path_factory.mktemp("one") / "out"
    finish(start(output, f"run.window_rows={NUM_ROWS}"))  # one window needs no Ray
    return rows(output)


def ranks_below(pid: int) -> list[psutil.Process]:
    """Return the running processes of other ranks that descend from a process."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if RANK_MODULE in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition, run: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_rows_after_a_killed_rank_and_a_killed_driver(tmp_path: Path, expected: dict[int, str]) -> None:
    output, two = tmp_path / "out", "engine.tensor_parallel_size=2"
    run = start(output, two)
    wait_for(lambda: ranks_below(run.pid), run)
    time.sleep(2)
    for rank in ranks_below(run.pid):
        rank.kill()
    wait_for(lambda: list(output.glob("*.parquet")), run)
    others = ranks_below(run.pid)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert 0 < len(list(output.glob("*.parquet"))) < NUM_ROWS // UNIT_ROWS
    psutil.wait_procs(others, timeout=10)
    assert not any(process.is_running() for process in others)
    finish(start(output, two))
    assert rows(output) == expected


def test_rows_on_a_cluster_of_two_nodes(tmp_path: Path, expected: dict[int, str]) -> None:
    """Each engine reserves two of the GPUs that its node pretends to have, so both nodes take part."""
    head = {"num_cpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        settings = "engine.device=cpu", "engine.tensor_parallel_size=2", "run.actors=2", "run.cpus_per_actor=1"
        finish(start(tmp_path / "out", *settings, "run.gpus_per_actor=2", RAY_ADDRESS=cluster.address))
    finally:
        cluster.shutdown()
    assert rows(tmp_path / "out") == expected
