"""Jobs through Ray Data, over a fake engine: every row once, whatever process ends on the way."""

import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import ray
from ray.data.block import BlockStats

from pipeline.data.output.parts import DoneUnits, PartStore
from pipeline.data.units import Unit
from pipeline.errors import ConfigError, ModelError
from pipeline.job.dataflow.graph import Windows, _connect, block_of, units_of
from pipeline.job.dataflow.reading import read_units
from pipeline.job.planning.actor_specs import flow_spec
from pipeline.job.planning.plan import make_plan, remaining_windows
from pipeline.job.running.run import run_job
from pipeline.machine.host import available_cores
from tests.job.conftest import FAKES, run

TEXTS: list[str | None] = [f"text {i} " + "x" * (i % 13) for i in range(120)]
ROOT = Path(__file__).parents[3]


def engines() -> list[psutil.Process]:
    """Return the engine processes below this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "pipeline.job.process.main" in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_until(holds, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_windows_units_and_actors_give_each_row_once(job, local_ray):
    texts = [*TEXTS[:30], None, *TEXTS[31:]]
    job.fake(step_s=0.04).rows(texts, per_file=50)  # so long that it is seen running
    statuses = []
    report = run_job(job.config(run={"actors": 2}), backend=FAKES, progress=statuses.append)
    job.check(texts, per_file=50)
    (record,) = [json.loads(p.read_text()) for p in (job.output / "_pipeline" / "runs").iterdir()]
    assert record["units_written"] == len(job.parts()) == sum(actor["units"] for actor in record["actors"])
    assert all(actor["units"] > 0 for actor in record["actors"])
    assert record["duplicate_units"] == 0
    assert sum(report.phases_us.values()) == report.machine_us
    for actor in record["actors"]:
        assert 0 <= record["wall_us"] - sum(actor["phases_us"].values()) < 3_000_000
    assert report.tokens.generated == report.work.computed_generated_tokens
    assert record["resolved"]["max_num_seqs"] == 8
    assert {"planning", "starting Ray", "running", "verifying", "finished"} <= {s.phase for s in statuses}


def test_a_row_function_with_its_surroundings_is_sent_to_the_actors(job, local_ray):
    job.rows(TEXTS[:30])
    lock, suffix = threading.Lock(), "of this test"

    async def locked(row, generate):
        with lock:
            return None

    async def flow(row, generate):
        done = await generate(f"{row['text']} {suffix}")
        return {"process": os.getpid(), "tokens": done.num_prompt_tokens}

    with pytest.raises(ConfigError, match=r"row_fn: cannot be sent .*lock.* in the function"):
        run_job(job.config(), backend=FAKES, row_fn=locked, version="1")
    other = job.config(output={"path": str(job.folder / "other")})
    run_job(other, backend=FAKES, row_fn=flow, version="1", columns={"process": "int64", "tokens": "int32"})
    rows = [row for part in (job.folder / "other").glob("part-*") for row in pq.read_table(part).to_pylist()]
    assert [row["tokens"] for row in sorted(rows, key=lambda row: row["id"])] == [
        len(f"{t} {suffix}") for t in TEXTS[:30]
    ]
    assert os.getpid() not in {row["process"] for row in rows}


def test_every_unit_that_is_left_is_a_row_and_a_block_of_its_own(job, local_ray, without_ray):
    run(job.rows(TEXTS))
    for part in job.parts():
        if "-w00000-u0001of" not in part.name:
            part.unlink()
    plan = make_plan(job.config(), "cpu")
    left = remaining_windows(plan, PartStore(str(job.output)).list())
    units = units_of(flow_spec(plan, tuple(left), FAKES, "0001-run"))
    blocks = [ray.get(ref) for bundle in units.iter_internal_ref_bundles() for ref in bundle.block_refs]
    names = [(block["window"][0].as_py(), block["unit"][0].as_py()) for block in blocks]
    assert [block.num_rows for block in blocks] == [1] * 17
    assert sorted(names) == [(w, u) for w in range(6) for u in range(3) if (w, u) != (0, 1)]
    unit = Unit.from_bytes(blocks[0]["data"][0].as_py())
    assert (unit.window, unit.index) == names[0]


def test_a_read_task_carries_its_windows_files_alone(job, local_ray):
    job.rows([f"text {i}" for i in range(1000)], per_file=10)  # 100 files, two a window
    plan = make_plan(job.config(), "cpu")
    left = remaining_windows(plan, DoneUnits())
    spec = flow_spec(plan, tuple(left), FAKES, "0001-run")
    tasks = Windows(spec).get_read_tasks(1)
    assert len(tasks) == 50
    sizes = set()
    for window, task in zip(left, tasks, strict=True):
        packed = pickle.dumps(task.read_fn)
        assert packed.count(b".parquet") == 2
        sizes.add(len(packed))
        assert list(task()) == [block_of(unit) for unit in read_units(window, spec.reading)]
    assert max(sizes) < 2000  # the driver holds one for each window
    shared = task.read_fn.args[-1]
    assert len(pickle.dumps(ray.get(shared))) < 3000


def test_what_ray_keeps_in_the_driver_does_not_grow_with_the_units(job, local_ray):
    job.rows([f"text {i}" for i in range(300)])
    plan = make_plan(job.config(output={"rows_per_file": 1}), "cpu")
    units = units_of(flow_spec(plan, tuple(remaining_windows(plan, DoneUnits())), FAKES, "0001-run"))
    seen, kept = 0, []
    for batch in units.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
        seen += batch.num_rows
        if seen % 50 == 0:
            kept.append(sum(isinstance(thing, BlockStats) for thing in gc.get_objects()) - (300 - seen))
    assert seen == 300
    assert max(kept) < 100, f"in addition to the blocks still to come: {kept}"


def test_a_local_ray_has_cores_for_the_readers_and_a_cluster_room_for_few(job, monkeypatch):
    cores = []
    monkeypatch.setattr("pipeline.job.dataflow.graph.connect", lambda address, cores_: cores.append(cores_))
    job.rows([f"text {i}" for i in range(1000)], per_file=10)
    plan = make_plan(job.config(run={"actors": 40, "cpus_per_actor": 1}), "cpu")
    spec = flow_spec(plan, tuple(remaining_windows(plan, DoneUnits())), FAKES, "0001-run")
    _connect(spec)
    assert cores == [max(available_cores(), 40 + 5 + 1)]
    nodes = [{"Alive": True, "Resources": {"CPU": 16.0}}, {"Alive": True, "Resources": {}}, {"Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    num_readers = []
    monkeypatch.setattr(ray.data, "read_datasource", lambda *_, compute, **__: num_readers.append(compute.size))
    units_of(spec)
    units_of(replace(spec, ray_address="auto"))
    assert num_readers == [5, 2]


def test_a_killed_actor_is_replaced_and_a_failing_engine_ends_the_run(job, local_ray):
    job.fake(step_s=0.05).rows(TEXTS)

    def kill_actor():
        while not job.parts():
            time.sleep(0.02)
        (engine,) = engines()
        engine.parent().kill()

    threading.Thread(target=kill_actor, daemon=True).start()
    report = run_job(job.config(), backend=FAKES)
    job.check(TEXTS)
    assert len(report.runs[0].actors) == 2
    wait_until(lambda: not engines())

    job.fake(fail_load="ModelError")
    started = time.monotonic()
    with pytest.raises(ModelError, match="fake failure"):
        run_job(job.config(output={"path": str(job.folder / "other")}), backend=FAKES)
    assert time.monotonic() - started < 30


def test_a_driver_killed_at_any_moment_leaves_whole_parts_and_the_next_run_does_the_rest(job, local_ray, monkeypatch):
    job.fake(step_s=0.1).rows(TEXTS)
    monkeypatch.setenv("RAY_ADDRESS", local_ray)
    config = job.config()
    command = [sys.executable, "-m", "tests.job.drive", str(job.folder / "job.yaml")]
    driver = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE)
    wait_until(lambda: job.parts() or driver.poll() is not None)
    assert driver.poll() is None, driver.stderr.read()
    time.sleep(random.uniform(0, 1.0))
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: not engines())
    done = {path.name: path.stat().st_mtime_ns for path in job.parts()}
    assert 0 < len(done) < 15
    report = run_job(config, backend=FAKES)
    job.check(TEXTS)
    assert {path.name: path.stat().st_mtime_ns for path in job.parts() if path.name in done} == done
    assert [run.outcome for run in report.runs] == ["killed", "finished"]
    assert report.runs[1].units_written == len(job.parts()) - len(done)
    assert report.runs[1].duplicate_units == 0
    assert report.runs[0].machine_us > 0
    assert report.work.wasted_is_lower_bound
