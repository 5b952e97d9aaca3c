"""A small job over a fake engine, and one local Ray for all tests of a file that need one."""

import json
import os
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config import JobConfig, load_job
from pipeline.data.output.parts import PartStore
from pipeline.data.units import UnitSpec
from pipeline.errors import Interrupted
from pipeline.job.actor.backends import OwnEngine
from pipeline.job.actor.resolved_job import prompt_spec, sampling_params, unit_spec
from pipeline.job.dataflow.in_process import InProcessDataflow
from pipeline.job.dataflow.spec import FlowSpec
from pipeline.job.running.run import run_job
from tests.job.fake_engine import answer, text_of

FAKES = OwnEngine("tests.job.fake_engine:FakeEngine", "tests.job.fake_engine:load_tokenizer")


TEXTS: list[str | None] = [f"text {i} " + "x" * (i % 13) for i in range(50)]


class Job:
    """A job file, its input and its model in one folder. `config(...)` writes and loads the file with changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.settings = {
            "input": {"path": str(folder / "in"), "columns": ["id"]},
            "prompt": {"template": "Say {text}"},
            "model": {"path": str(folder / "model")},
            "engine": {"device": "cpu"},
            "sampling": {"max_tokens": 6},
            "output": {"path": str(self.output), "rows_per_file": 8},
            "run": {"window_rows": 20, "max_error_rate": 0.5, "drain_timeout": "5 s"},
        }
        (folder / "in").mkdir()
        self.fake()

    def rows(self, texts: list[str | None], per_file: int = 1000) -> "Job":
        for number, start in enumerate(range(0, max(1, len(texts)), per_file)):
            some = texts[start : start + per_file]
            table = pa.table(
                {"id": pa.array(range(start, start + len(some)), pa.int64()), "text": pa.array(some, pa.string())}
            )
            pq.write_table(table, self.folder / "in" / f"f{number}.parquet", row_group_size=10)
        return self

    def fake(self, **behaviour) -> "Job":
        model = self.folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"fake": behaviour}))
        if not (model / "tokenizer.json").exists():
            (model / "tokenizer.json").write_text("{}")
        return self

    def config(self, **sections) -> JobConfig:
        settings = {**self.settings, **sections}
        for name, section in settings.items():
            if isinstance(section, dict):
                settings[name] = {**self.settings.get(name, {}), **section}
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(settings))
        return load_job(path)

    def parts(self) -> list[Path]:
        return sorted(self.output.glob("part-*.parquet"))

    def table(self) -> pa.Table:
        return pa.concat_tables([pq.read_table(part) for part in self.parts()])

    def check(self, texts: list[str | None], per_file: int = 1000, seed: int = 0) -> None:
        """Assert that the output holds each input row once, with the answer of an undisturbed run."""
        from pipeline.job.actor.tokenize import row_seed

        rows = {row["id"]: row for row in self.table().to_pylist()}
        assert self.table().num_rows == len(texts) == len(rows)
        for i, text in enumerate(texts):
            row = rows[i]
            location = (f"f{i // per_file}.parquet", i % per_file)
            assert (row["source_file"], row["source_row"]) == location
            if text is None:
                assert (row["error"], row["generated_text"], row["finish_reason"]) == ("null_prompt", None, "error")
                continue
            if row["error"] is not None:
                continue
            assert row["generated_text"] == text_of(answer(list(f"Say {text}".encode()), row_seed(seed, *location), 6))


def units_as_written(config: JobConfig) -> UnitSpec:
    """Return the unit spec of a job whose model and input lines add no settings to the job file."""
    prompt, params = prompt_spec(config, config.prompt), sampling_params(config.sampling)
    return unit_spec(config, prompt, config.task.row_texts(), params, kept=())


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


@pytest.fixture(scope="module")
def local_ray():
    import ray

    from pipeline.job.dataflow.ray_session import connect

    assert connect(None, cores=8)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


class Started:
    """Number of dataflows that were started: a finished job starts none."""

    count = 0


@pytest.fixture
def without_ray(monkeypatch):
    """Run units in worker threads of this process, whatever the number of windows and actors."""
    begin = InProcessDataflow.__init__

    def counted(self, spec, run_began_us):
        Started.count += 1
        begin(self, spec, run_began_us)

    monkeypatch.setattr(FlowSpec, "needs_ray", False)
    monkeypatch.setattr("pipeline.job.running.driver.TICK_S", 0.2)
    monkeypatch.setattr(InProcessDataflow, "__init__", counted)
    monkeypatch.setattr(Started, "count", 0)


@pytest.fixture
def one_unit_in_flight(monkeypatch):
    """Limit engines to one unit at a time, so that a stopped run leaves units of a small job undone."""
    monkeypatch.setattr("pipeline.job.planning.actor_specs.units_in_flight", lambda *_: 1)


def run(job, signals=(), **sections):
    """Run the job with changed sections. `signals`: (when, number), each sent once, when `when(status)` is true."""
    statuses, to_send, seen = [], list(signals), sections.pop("show", lambda status: None)

    def show(status):
        statuses.append(status)
        seen(status)
        if to_send and to_send[0][0](status):
            os.kill(os.getpid(), to_send.pop(0)[1])

    options = {
        key: sections.pop(key)
        for key in ("accept_numerics", "retry_failed", "redo", "append", "sample", "logs", "metrics")
        if key in sections
    }
    report = run_job(job.config(**sections), backend=FAKES, progress=show, **options)
    return report, statuses


def success(job):
    return json.loads((job.output / "_SUCCESS").read_text())


def runs(job):
    return [json.loads(path.read_text()) for path in sorted((job.output / "_pipeline" / "runs").iterdir())]


def stop_in_a_unit(job, number=signal.SIGTERM) -> list[dict]:
    """Stop a run of 16 rows in one unit when some have finished; return the rows that it keeps."""
    stop = [(lambda status: status.rows_done > 0, number)]
    with pytest.raises(Interrupted):
        run(job, stop, run={"drain_timeout": "0.0 s"}, output={"rows_per_file": 16})
    folder = PartStore(job.settings["output"]["path"], job.settings.get("storage_options", {}).get("s3")).folder
    (kept,) = folder.names("_pipeline/partial")
    done = json.loads(folder.read(f"_pipeline/partial/{kept}"))["rows"]
    assert 0 < len(done) < 16
    return done
