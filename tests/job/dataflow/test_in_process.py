"""Jobs that need no Ray: their runs read no more than they compute, and end on every failure."""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from pipeline.data.output.parts import DoneUnits
from pipeline.errors import InputError, PipelineError
from pipeline.job.dataflow import in_process
from pipeline.job.dataflow.in_process import InProcessDataflow
from pipeline.job.dataflow.spec import EndOfUnits
from pipeline.job.planning.actor_specs import flow_spec
from pipeline.job.planning.plan import make_plan, remaining_windows
from pipeline.machine.host import now_us
from tests.job.conftest import FAKES, TEXTS, run


def spec_of(job, rows_per_file=8, **run):
    config = job.config(run={"window_rows": 1000, **run}, output={"rows_per_file": rows_per_file})
    plan = make_plan(config, "cpu")
    return flow_spec(plan, tuple(remaining_windows(plan, DoneUnits())), FAKES, "0001-run")


@pytest.mark.parametrize(
    ("run", "needs_ray"),
    [
        ({}, False),
        ({"actors": 2}, True),
        ({"window_rows": 20}, True),
    ],
)
def test_one_engine_and_one_window_need_no_ray(job, run, needs_ray):
    assert spec_of(job.rows(TEXTS), **run).needs_ray is needs_ray


@pytest.mark.parametrize(("address", "joined"), [("", None), ("local", None), ("10.0.0.1:6379", "10.0.0.1:6379")])
def test_the_address_of_ray_comes_from_the_environment(job, address, joined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("pipeline.job.dataflow.ray_session.cluster_cpus", lambda *_, **__: 1.0)
    spec = spec_of(job.rows(TEXTS))
    assert (spec.ray_address, spec.needs_ray) == (joined, address != "")


def test_a_small_job_never_imports_ray_and_its_engine_starts_before_transformers_is_imported(job):
    job.rows(TEXTS)
    job.config(run={"window_rows": 1000})
    script = """
import sys
from pipeline.config import load_job
from pipeline.job.running.run import run_job
from tests.job.conftest import FAKES
print("transformers" in sys.modules)
print(run_job(load_job(sys.argv[1]), backend=FAKES).rows.written, "ray" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(job.folder / "job.yaml")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "50", "False", "False"]
    job.check(TEXTS)


@pytest.mark.parametrize("error", [InputError("f0.parquet is missing"), RuntimeError("a defect")])
def test_what_ends_the_reading_ends_the_run(job, monkeypatch, error):
    def reading(*_):
        raise error

    monkeypatch.setattr(in_process, "read_units", reading)
    with pytest.raises(PipelineError, match=str(error)) as raised:
        run(job.rows(TEXTS), run={"window_rows": 1000})
    assert raised.type is (InputError if isinstance(error, InputError) else PipelineError)


def test_a_flow_that_is_ended_leaves_no_thread(job):
    flow = InProcessDataflow(spec_of(job.rows(TEXTS).fake(step_s=0.1), rows_per_file=2), now_us())
    while flow.next(5.0) is None:
        pass
    flow.close()
    deadline = time.monotonic() + 60
    while any(thread.name in ("dataflow", "unit") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_units_are_read_as_they_are_computed(job, monkeypatch):
    """Two units are in flight, two more wait, and the reader holds one."""
    read, max_ahead, done = 0, 0, 0
    real = in_process.read_units

    def reading(*arguments):
        nonlocal read, max_ahead
        for unit in real(*arguments):
            read += 1
            max_ahead = max(max_ahead, read - done)
            yield unit

    spec = replace(spec_of(job.rows(TEXTS).fake(step_s=0.01), rows_per_file=2), units_in_flight=2)
    monkeypatch.setattr(in_process, "read_units", reading)
    flow = InProcessDataflow(spec, now_us())
    try:
        while True:
            done += flow.next(5.0) is not None
    except EndOfUnits:
        assert done == read == 25
        assert max_ahead <= 12  # with finished ones that are not counted yet; without a bound all 25
    finally:
        flow.close()
