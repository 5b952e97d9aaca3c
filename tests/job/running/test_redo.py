"""`--redo`: rows that were cut or are invalid are computed again under other limits, and no other row changes."""

import contextlib
import json
import shutil

import pyarrow.parquet as pq
import pytest

from pipeline.data.output.parts import PartStore
from pipeline.data.output.retried import KEY
from pipeline.errors import ConfigError, EnvironmentFailed, FingerprintError
from pipeline.job.actor.tokenize import row_seed
from pipeline.job.output.audit import audit
from pipeline.report.render import text
from pipeline.stores.local_folder import LocalFolder
from tests.faults.store import FaultyStore
from tests.job.conftest import TEXTS, run, runs, success
from tests.job.fake_engine import answer, text_of
from tests.job.planning.test_append_killed import DyingFolder, files

pytestmark = pytest.mark.usefixtures("without_ray")

QUICK = {"run": {"drain_timeout": "0.1 s"}, "output": {"rows_per_file": 4}}
BEGUN = r"--redo truncated with sampling.max_tokens=20 was begun and is not finished(.|\n)*same values"
JSON = {"structured_outputs": {"json_object": True}}  # no answer of the fake engine is an object


def redo(job, max_tokens, kinds=("truncated",), **sections):
    sampling = {**sections.pop("sampling", {}), "max_tokens": max_tokens}
    return run(job, redo=kinds, sampling=sampling, **sections)[0]


def by_id(job) -> dict[int, dict]:
    return {row["id"]: row for row in job.table().to_pylist()}


def cut(rows: dict[int, dict]) -> set[int]:
    return {i for i, row in rows.items() if row["finish_reason"] == "length"}


def noted(job) -> dict[int, dict]:
    """Return the limits of each row that the parts' footers name."""
    found = {}
    for part in job.parts():
        for entry in json.loads((pq.read_metadata(part).metadata or {}).get(KEY.encode(), b"[]")):
            found |= {row: entry["limits"] for _, row in entry["rows"]}
    return found


def replaced(job) -> int:
    """Return the number of parts whose footers name rows."""
    return sum(KEY.encode() in pq.read_metadata(part).metadata for part in job.parts())


def batches(job) -> list[str]:
    folder = job.output / "_pipeline/redo"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def check(job, before: dict[int, dict], again: dict[int, int]) -> None:
    """Assert that the output has each row once, that the rows of `again` (row -> max_tokens) have the answers under
    these limits, and that all others are unchanged."""
    rows = by_id(job)
    assert job.table().num_rows == len(rows) == len(before)
    for i, row in rows.items():
        if i not in again:
            assert row == before[i]
            continue
        ids = answer(list(f"Say {TEXTS[i]}".encode()), row_seed(0, "f0.parquet", i), again[i])
        reason = "length" if len(ids) == again[i] else "stop"
        assert (row["generated_text"], row["finish_reason"]) == (text_of(ids), reason)
    assert audit(PartStore(str(job.output)), deep=True, log=lambda text: None).sound
    assert success(job)["input_rows"] == len(before)


@pytest.fixture
def short(job):
    """A finished job of 50 rows, some of which were cut."""
    job.rows(TEXTS)
    run(job)
    job.first = by_id(job)
    job.cut = cut(job.first)
    assert 3 < len(job.cut) < 25
    return job


def test_cut_rows_are_computed_again_and_others_stay(short):
    parts = {path.name: path.read_bytes() for path in short.parts()}
    report = redo(short, 20, cost={"hourly_usd": 3600.0})
    check(short, short.first, dict.fromkeys(short.cut, 20))
    assert noted(short) == {i: {"sampling.max_tokens": 20} for i in short.cut}
    assert batches(short) == ["0001.done.json", "0001.json"]
    changed = {path.name for path in short.parts() if path.read_bytes() != parts[path.name]}
    with_cut = {
        path.name for path in short.parts() if cut({i: short.first[i] for i in pq.read_table(path)["id"].to_pylist()})
    }
    assert changed == with_cut
    last = runs(short)[-1]
    tokens = sum(row["num_generated_tokens"] for i, row in by_id(short).items() if i in short.cut)
    assert (last["redo"], last["rows_written"], last["generated_tokens"]) == (["truncated"], len(short.cut), tokens)
    line = f"{len(short.cut)} truncated rows with sampling.max_tokens 20 (run 0002): {tokens} tokens out, "
    assert line in text(report)
    retried = next(line for line in text(report).splitlines() if "truncated rows" in line)
    assert "$" in retried
    assert sum(length.completed.rows for length in report.lengths) == 50
    assert sum(length.completed.generated_tokens for length in report.lengths) == report.tokens.generated


def test_rows_are_computed_once_under_the_same_limits(short):
    redo(short, 8)
    still = cut(by_id(short))
    assert still
    assert still < short.cut
    report = redo(short, 8)
    assert (report.was_complete, batches(short)) == (True, ["0001.done.json", "0001.json"])
    redo(short, 30)
    check(short, short.first, {**dict.fromkeys(short.cut, 8), **dict.fromkeys(still, 30)})
    assert len(batches(short)) == 4
    assert run(short)[0].was_complete, "a run without the option belongs to the job's own limits"


def test_invalid_rows(job):
    run(job.rows(TEXTS), sampling=JSON, run={"max_error_rate": 1.0})
    first = by_id(job)
    invalid = {i for i, row in first.items() if row["error"] == "grammar_error"}
    assert len(invalid) + len(cut(first)) == 50
    report = redo(job, 7, ("invalid",), sampling=JSON, run={"max_error_rate": 1.0})
    assert runs(job)[-1]["rows_written"] == len(invalid)
    assert "invalid rows with sampling.max_tokens 7" in text(report)
    rows = by_id(job)
    assert {i for i in first if rows[i] != first[i]} <= invalid
    assert set(noted(job)) == invalid
    redo(job, 9, ("truncated", "invalid"), sampling=JSON, run={"max_error_rate": 1.0})
    assert noted(job) == {i: {"sampling.max_tokens": 9} for i in range(50)}


@pytest.mark.parametrize("samples_as", ["lists", "rows"])
def test_a_row_with_a_cut_sample_is_computed_again_as_a_whole(job, samples_as):
    output, sampling = {"samples_as": samples_as}, {"n": 3, "temperature": 1.0}
    run(job.rows(TEXTS[:20]), output=output, sampling=sampling)
    before = job.table().to_pylist()
    again = {
        row["id"]
        for row in before
        if "length" in (row["finish_reason"] if samples_as == "lists" else [row["finish_reason"]])
    }
    assert 0 < len(again) < 20
    report = redo(job, 40, output=output, sampling=sampling)
    after = job.table().to_pylist()
    assert len(after) == len(before)
    assert [row for row in after if row["id"] not in again] == [row for row in before if row["id"] not in again]
    assert set(noted(job)) == again
    assert sum(length.completed.rows for length in report.lengths) == 20
    assert sum(length.completed.generated_tokens for length in report.lengths) == report.tokens.generated
    assert audit(PartStore(str(job.output)), deep=True, log=lambda text: None).sound


def test_rows_that_a_condition_drops_are_never_cut(job):
    conditions = {"input": {"when": "id < 30"}, "output": {"accept": "finish_reason = 'stop'"}}
    run(job.rows(TEXTS), **conditions)
    again = cut(by_id(job))
    assert {i for i, row in by_id(job).items() if row["dropped_by"] == "output.accept"} == again
    redo(job, 50, **conditions)
    rows = by_id(job)
    assert set(noted(job)) == again
    assert {i for i in again if rows[i]["dropped_by"] is None} == again - cut(rows)
    assert success(job)["dropped_rows"]["input.when"] == 20


def test_a_part_that_is_lost_during_a_redo_is_computed_under_the_jobs_own_limits_first(short, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "swap", lambda *_: (_ for _ in ()).throw(EnvironmentFailed("full")))
        with pytest.raises(EnvironmentFailed):
            redo(short, 20)
    short.parts()[0].unlink()
    with pytest.raises(FingerprintError, match="not all rows are computed yet"):
        redo(short, 20)
    with pytest.raises(FingerprintError, match="was begun and is not finished"):
        run(short)
    assert not (short.output / "_SUCCESS").exists()
    assert by_id(short) == short.first
    redo(short, 20)
    check(short, short.first, dict.fromkeys(short.cut, 20))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_redo_that_dies_at_any_write_is_finished_with_the_same_values_only(job, monkeypatch):
    run(job.rows(TEXTS[:16]), **QUICK)
    rows, finished, at, states = by_id(job), files(job), 0, set()
    again, num_replaced = dict.fromkeys(cut(rows), 20), 0
    while True:
        at += 1
        for before in (True, False):
            shutil.rmtree(job.output)
            for name, data in finished.items():
                (job.output / name).parent.mkdir(parents=True, exist_ok=True)
                (job.output / name).write_bytes(data)
            with monkeypatch.context() as patch:
                folder = DyingFolder(patch, at, before)
                with contextlib.suppress(BaseException):
                    redo(job, 20, **QUICK)
            if not folder.dead:
                begun, done = ("0001.json",), ("0001.done.json", "0001.json")
                assert {((), 0), (begun, 0), (begun, 1), (done, num_replaced)} < states
                assert num_replaced > 1
                return
            done, is_half_done = set(noted(job)), batches(job) == ["0001.json"]
            states.add((tuple(batches(job)), replaced(job)))
            if is_half_done and before:
                half = files(job)
                for values in ({"redo": ("truncated", "invalid")}, {"sampling": {"max_tokens": 21}}, {}):
                    options = {"redo": ("truncated",), "sampling": {"max_tokens": 20}, **values} if values else {}
                    with pytest.raises(FingerprintError, match=BEGUN):
                        run(job, **options, **QUICK)
                for option in ("retry_failed", "append"):
                    with pytest.raises(FingerprintError, match=BEGUN):
                        run(job, **{option: True}, **QUICK)
                assert files(job) == half
            redo(job, 20, **QUICK)
            check(job, rows, again)
            assert batches(job) == ["0001.done.json", "0001.json"]
            num_replaced = replaced(job)
            if is_half_done:
                assert runs(job)[-1]["rows_written"] == len(again.keys() - done), "no row is computed twice"


def test_in_a_store(job):
    job.rows(TEXTS)
    with FaultyStore() as faulty:
        bucket = faulty.bucket
        in_store = {"storage_options": {"s3": dict(bucket.storage)}, "output": {"path": bucket.url("out")}}
        run(job, **in_store)
        report = redo(job, 20, **in_store)
        counts = json.loads(bucket.get("out/_SUCCESS"))
        assert 3 < report.runs[-1].rows_written < 25
        assert (counts["completed_rows"], counts["num_generated_tokens"]) == (50, report.tokens.generated)
        assert json.loads(bucket.get("out/_pipeline/redo/0001.json"))["limits"] == {"sampling.max_tokens": 20}
        assert redo(job, 20, **in_store).was_complete


def test_limits_that_cannot_apply_are_refused(short, job):
    def refused(error, match, kinds=("truncated",), **sections):
        with pytest.raises(error, match=match):
            run(short, redo=kinds, **sections)
        assert by_id(short) == short.first
        assert len(runs(short)) == 1
        assert batches(short) == []

    refused(ConfigError, r"--redo truncated: expected another limit(.|\n)*sampling.max_tokens=N")
    refused(
        ConfigError, r"sampling.max_tokens 5: with --redo expected more than the job's 6", sampling={"max_tokens": 5}
    )
    refused(ConfigError, r"rows have their own values, from a column", sampling={"max_tokens": {"column": "id"}})
    refused(FingerprintError, r"prompt\.template", prompt={"template": "Read {text}"}, sampling={"max_tokens": 20})
    refused(FingerprintError, r"sampling\.temperature", sampling={"max_tokens": 20, "temperature": 1.0})
    refused(ConfigError, "--sample and --redo", sampling={"max_tokens": 20}, sample=3)
    refused(ConfigError, "--redo: expected without --retry-failed", sampling={"max_tokens": 20}, retry_failed=True)
    with pytest.raises(FingerprintError, match=r"max_tokens: 6 -> 20(.|\n)*With --redo truncated,invalid"):
        run(short, sampling={"max_tokens": 20})


def test_a_task_without_completions_is_refused(job):
    job.settings.pop("sampling")
    task = {"type": "choice", "labels": ["yes", "no"]}
    run(job.rows(TEXTS), task=task)
    with pytest.raises(ConfigError, match="is for completions; the task of this job is choice"):
        run(job, task=task, redo=("truncated",), engine={"max_model_len": 100})


def test_rows_with_steps_pass_all_of_them_again(job):
    check = {"name": "check", "prompt": {"template": "{draft} ok?"}, "sampling": {"max_tokens": 5}}
    job.settings |= {"steps": [check]}
    conditions = {"input": {"when": "id < 16"}, "output": {"accept": "check.num_generated_tokens > 1"}}
    run(job.rows(TEXTS[:20]), **conditions)
    first = by_id(job)
    again = cut(first)
    assert 1 < len(again) < 16
    report = redo(job, 30, **conditions)
    rows = by_id(job)
    assert {i for i in first if rows[i] != first[i]} == again
    assert set(noted(job)) == again
    for i, row in rows.items():
        is_short = row["check"] is not None and row["check"]["num_generated_tokens"] <= 1
        assert (row["check"] is None) == (i >= 16)
        assert row["dropped_by"] == ("input.when" if i >= 16 else "output.accept" if is_short else None)
    assert [step.completed.rows for step in report.steps] == [16, 16]
    assert sum(step.completed.generated_tokens for step in report.steps) == report.tokens.generated


def test_copies_of_equal_rows_are_counted_once(job):
    report, _ = run(job.rows([text for text in TEXTS[:10] for _ in range(2)]))
    assert report.rows.copied == 10
    redo(job, 30)
    assert len(noted(job)) % 2 == 0
    report = redo(job, 40)
    assert report.rows.copied == 10
