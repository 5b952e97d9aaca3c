"""Digests, differences between jobs, and the units that remain."""

import json
import os
from datetime import datetime

import pytest
import yaml
from pydantic import Field

from pipeline.checkpoints.digest import FULL_BYTES, model_digest
from pipeline.config.job import JobConfig
from pipeline.config.sections.engine import EngineSection
from pipeline.config.sections.limits import CostSection
from pipeline.config.values import IDENTITY, NUMERICS
from pipeline.data.output.parts import DoneUnits, PartName, PartStore
from pipeline.errors import FingerprintError, OutputError
from pipeline.job.dataflow.reading import check_units
from pipeline.job.dataflow.spec import WindowTask
from pipeline.job.planning.fingerprint import claim, difference, shown
from pipeline.job.planning.plan import make_plan, remaining_windows
from pipeline.job.telemetry.run_log import RunLog, load_runs
from pipeline.job.telemetry.writer import Telemetry
from pipeline.stores.retries import RetryCounts
from tests.job.conftest import TEXTS


def test_a_model_digest_sees_every_file_that_matters(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(FULL_BYTES)
    path = tmp_path / "model.safetensors"
    path.write_bytes(weights)
    digest = model_digest(tmp_path)
    assert set(digest) == {"config.json", "model.safetensors"}
    os.utime(path, (0, 0))
    (tmp_path / "README.md").write_text("changed")
    assert model_digest(tmp_path) == digest
    last, near_header = bytearray(weights), bytearray(weights)
    last[-1] ^= 1
    near_header[12] ^= 1
    for other in (bytes(last), bytes(near_header), weights + b"\0"):
        path.write_bytes(other)
        assert model_digest(tmp_path)["model.safetensors"] != digest["model.safetensors"]
    path.write_bytes(weights[: FULL_BYTES // 2])  # small files are hashed whole
    small = model_digest(tmp_path)["model.safetensors"]
    data = bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    assert model_digest(tmp_path)["model.safetensors"] != small


def test_differences_are_listed_by_key():
    old = {"prompt": {"template": "a" * 300 + "old" + "b" * 300, "chat": None}, "seed": 0, "same": [1]}
    new = {"prompt": {"template": "a" * 300 + "new" + "b" * 300, "chat": {"system": "x"}}, "seed": 1, "same": [1]}
    changes = difference(old, new)
    assert [key for key, _, _ in changes] == ["prompt.chat", "prompt.template", "seed"]
    text = shown(changes)
    assert 'prompt.chat: nothing -> {"system": "x"}' in text
    assert "aoldb" in text
    assert "anewb" in text
    assert max(map(len, text.splitlines())) < 300
    assert "and 5 more" in shown([(f"k{i}", 0, 1) for i in range(25)])


def test_the_remaining_units_of_each_window(job):
    job.rows([f"t{i}" for i in range(50)])
    plan = make_plan(job.config(), "cpu")
    assert [w.num_rows for w in plan.windows] == [20, 20, 10]
    progress = DoneUnits()
    for window, unit, num_units in ((0, 0, 2), (0, 1, 2), (1, 2, 3)):
        progress.add(PartName(plan.fingerprint.short, window, unit, num_units, 5))
    left = remaining_windows(plan, progress)
    assert [(task.window.index, task.done, task.units_of) for task in left] == [
        (1, frozenset({2}), 3),
        (2, frozenset(), None),
    ]


def test_parts_that_were_cut_differently_are_refused(job):
    job.rows(["a"])
    (window,) = make_plan(job.config(), "cpu").windows
    with pytest.raises(OutputError, match=r"cut into 5 units before and into 0 now.*remove part-0123abcd-w00000-\*"):
        check_units(WindowTask(window, {1: 8}, 5), [], PartStore(str(job.output)), "0123abcd")


def test_the_fingerprint_follows_what_the_output_depends_on(job):
    job.rows(["a", "b"])

    def digest(**sections):
        return make_plan(job.config(**sections), "cpu").fingerprint.digest

    same = digest()
    assert digest(run={"actors": 3, "max_error_rate": 0.9}, engine={"dtype": "float32", "max_num_seqs": 2}) == same
    others = [
        {"prompt": {"template": "{text}"}}, {"sampling": {"temperature": 0.5}}, {"sampling": {"seed": 1}},
        {"input": {"columns": []}}, {"output": {"rows_per_file": 7}}, {"run": {"window_rows": 7}},
    ]  # fmt: skip
    assert len({same, *(digest(**sections) for sections in others)}) == 7


@pytest.fixture
def started(tmp_path):
    """Return a function that records in the output a run that has just begun, and returns its log."""
    store = PartStore(str(tmp_path / "o"))
    store.folder.probe()
    telemetry = Telemetry(store.folder)

    def start(**versions) -> RunLog:
        log = RunLog(store, {}, CostSection(), {}, telemetry, RetryCounts())
        record = log.record().to_json()
        record["versions"] |= versions
        store.folder.replace(f"_pipeline/runs/{log.run_id}.json", json.dumps(record).encode())
        return log

    start.store = store
    yield start
    telemetry.close()


@pytest.mark.parametrize(
    ("versions", "outcome"),
    [
        ({}, "running"),
        ({"pid": "4194305"}, "killed"),  # above the largest possible one
        ({"pid": "1"}, "killed"),  # as in a restarted container: it exists, but is another process
        ({"process": "another boot pid:[1] 7"}, "killed"),
        ({"host": "elsewhere", "pid": "4194305"}, "running"),  # unknown on this host
        ({"process": "", "pid": "4194305"}, "killed"),  # as an earlier version recorded it
        ({"process": ""}, "running"),
    ],
)
def test_a_run_whose_process_has_ended_was_killed(started, versions, outcome):
    first, second = started(**versions), started()
    assert [run.outcome for run in load_runs(started.store)] == [outcome, "running"]
    assert first.run_id < second.run_id


def test_runs_are_in_the_order_of_their_numbers_beyond_9999(started):
    record = started().record().to_json()
    for number in ("9999", "10000"):
        run_id = f"{number}-20260101-000000-abcd"
        started.store.folder.replace(f"_pipeline/runs/{run_id}.json", json.dumps(record | {"run_id": run_id}).encode())
    assert [run.run_id.split("-")[0] for run in load_runs(started.store)] == ["0001", "9999", "10000"]
    assert started().run_id.startswith("10001-")


class LaterEngine(EngineSection):
    later: int = Field(default=3, json_schema_extra=IDENTITY)
    rounding: str = Field(default="none", json_schema_extra=NUMERICS)


class LaterJob(JobConfig):
    engine: LaterEngine = LaterEngine()
    draws: LaterEngine | None = None


def test_a_key_that_a_later_version_adds_is_its_default_in_outputs_begun_before(job):
    """The key at its default changes neither the digest nor the agreement with a recorded job; set, it does."""
    before = make_plan(job.rows(TEXTS).config(), "cpu").fingerprint
    settings = yaml.safe_load((job.folder / "job.yaml").read_text())
    store = PartStore(str(job.output))
    claim(store, "test", before, False, {}, datetime(2026, 1, 1))

    def later(**engine):
        return make_plan(LaterJob.model_validate({**settings, "engine": {"device": "cpu", **engine}}), "cpu")

    assert later().fingerprint.digest == before.digest
    assert "later" in later().fingerprint.identity["engine"]
    claimed = claim(store, "test", later().fingerprint, False, {}, datetime(2026, 1, 1))
    assert claimed.digest == before.digest
    assert later(later=4).fingerprint.digest != before.digest
    with pytest.raises(FingerprintError, match=r"engine\.later: nothing -> 4"):
        claim(store, "test", later(later=4).fingerprint, False, {}, datetime(2026, 1, 1))
    with pytest.raises(FingerprintError, match="--accept-numerics"):
        claim(store, "test", later(rounding="up").fingerprint, False, {}, datetime(2026, 1, 1))


def test_a_default_that_a_later_version_changes_is_another_job(job):
    ours = make_plan(job.rows(TEXTS).config(), "cpu").fingerprint
    store = PartStore(str(job.output))
    claim(store, "test", ours, False, {}, datetime(2026, 1, 1))
    path = job.output / "_pipeline" / "job.json"
    recorded = json.loads(path.read_text())
    recorded["identity"]["sampling"]["top_k"] = 40
    path.write_text(json.dumps(recorded))
    with pytest.raises(FingerprintError, match=r"sampling.top_k: 40 -> 0"):
        claim(store, "test", ours, False, {}, datetime(2026, 1, 1))
