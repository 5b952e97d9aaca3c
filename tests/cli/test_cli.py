"""The command line: exit codes, what goes to which stream, and what people read."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import errors
from pipeline.cli.progress import PlainProgress, progress_for, status_line
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore
from pipeline.data.output.result_columns import output_schema
from pipeline.formatting import duration
from pipeline.job.telemetry.status import Status
from pipeline.report.cost import build_report
from pipeline.report.render import markdown, text
from pipeline.report.row_stats import ErrorExample, RowStats
from pipeline.report.run_record import ActorRecord, RunRecord, SkippedInput, no_phases

JOB = """\
name: demo
input: {path: data, columns: [id]}
prompt: {template: "Sum up:\\n{text}\\n"}
model: {path: demo}
sampling: {max_tokens: 9}
output: {path: out}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small job that is valid."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    table = pa.table({"id": [1, 2, 3], "text": ["one \x1b[31mred", "two {id}", None], "error": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch):
    """Sets the environment that botocore reads, for filesystems that are made afterwards."""
    from s3fs import S3FileSystem

    def put(endpoint_url: str, key: str = "AKIATESTKEY", secret: str = "none") -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        S3FileSystem.clear_instance_cache()

    yield put
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def job_that(monkeypatch: pytest.MonkeyPatch):
    """Puts a function in the place of `run_job`."""

    def put(function) -> None:
        monkeypatch.setattr("pipeline.job.run.run_job", function)

    return put


def finished_run(**changes) -> RunRecord:
    actor = ActorRecord(0, no_phases() | {"decode": 5_000_000}, {"generated_tokens": 20, "num_steps": 1})
    run = RunRecord("run-1", "2026-01-01T00:00:00+00:00", "finished", 6_000_000, actors=[actor], hourly_usd=1.0)
    return replace(run, **changes)


def leave_output(root: Path, run: RunRecord, outcome: str, rows: int = 2) -> PartStore:
    """An output folder as a run leaves it."""
    store = PartStore(str(root / "out"))
    store.probe()
    schema = output_schema(pa.schema([]), {}, False)
    row = {"generated_text": "x", "num_input_tokens": 5, "num_cached_tokens": 0, "num_generated_tokens": 10}
    table = pa.Table.from_pylist([row] * rows, schema=schema)
    store.write(PartName("1a2b3c4d", 0, 0, 1, rows), table)
    store.create("_pipeline/job.json", json.dumps({"job": "demo", "fingerprint": "1a2b3c4d" * 8}).encode())
    store.replace("_pipeline/runs/run-1.json", json.dumps(run.to_json()).encode())
    status = Status("run-1", "generating", outcome, rows_total=3, rows_done=2, eta_s=30.0)
    store.replace("_pipeline/status.json", json.dumps(status.to_json()).encode())
    if outcome == "finished":
        store.success(json.dumps({"parts": 1, "completed_rows": rows, "error_rows": 0}).encode())
    return store


def test_help_teaches_with_examples(pipe):
    code, out, _ = pipe("--help")
    assert code == 0
    assert "pipeline run jobs/summarize.yaml" in out
    assert "75  interrupted" in out
    benchmarks = ("bench engine", "bench job", "bench scheduler", "bench ladder", "bench plan")
    for command in ("run", "validate", "generate", "status", "report", "verify", "compact", "doctor", *benchmarks):
        code, out, _ = pipe(*command.split(), "--help")
        assert code == 0
        assert f"Examples:\n    pipeline {command}" in out


def test_help_imports_nothing_heavy():
    """Half a second for a help text is where people stop asking for it."""
    script = (
        "import sys\nfrom pipeline.cli import main as cli\nsys.argv = ['pipeline', 'run', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'pyarrow', 'pydantic', 'numpy', 'yaml', 'rich'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_validate_says_what_the_job_is(work, pipe):
    code, out, err = pipe("validate", "job.yaml")
    assert code == 0, err
    assert "demo: valid" in out
    assert "data: 1 file, 3 rows" in out
    assert "max_tokens 9" in out
    assert "First prompt (a.parquet row 0, 21 bytes)" in out
    assert "| Sum up:\n    | one \\x1b[31mred\n" in out, "control characters of the data never reach the terminal"
    assert "\x1b" not in out
    assert not (work / "out").exists(), "looking must not write"


def test_validate_names_the_draft_model(work, pipe):
    _, out, _ = pipe("validate", "job.yaml", "--set", "model.draft=demo:draft")
    assert "  Draft     demo:draft (embedded)\n" in out
    assert "Draft" not in pipe("validate", "job.yaml")[1]


def test_validate_as_json(work, pipe):
    code, out, _ = pipe("validate", "job.yaml", "--json", "--limit", "2")
    found = json.loads(out)
    assert code == 0
    assert found["valid"]
    assert found["input"]["rows"] == 3
    assert found["input"]["rows_to_do"] == 2
    assert found["first_prompt"]["text"] == "Sum up:\none \x1b[31mred\n"
    assert list(found["output_columns"])[:2] == ["id", "generated_text"]


def test_validate_tells_all_mistakes_of_the_file(work, pipe):
    (work / "job.yaml").write_text(JOB.replace("max_tokens: 9", "max_tokens: 0").replace("model:", "modle:"))
    code, out, err = pipe("validate", "job.yaml")
    assert (code, out) == (2, "")
    assert err.startswith("3 mistakes:")
    assert "job.yaml:4: modle: unknown key\n    Did you mean `model`?" in err
    assert "job.yaml:5: sampling.max_tokens: expected an integer of at least 1; got 0" in err


def test_validate_tells_all_mistakes_of_the_data(work, pipe):
    code, _, err = pipe(
        "validate", "job.yaml", "--set", "input.columns=[id, nmae]", "--set", "prompt.template={texts}",
        "--set", "sampling.max_tokens={column: text}", "--set", "model.path=./nowhere",
        "--set", "output.path=data",
    )  # fmt: skip
    assert code == 2
    assert "5 mistakes:" in err
    assert "no column 'nmae'" in err
    assert "did you mean 'text'?" in err
    assert "column 'text' is text, expected numbers" in err
    assert "./nowhere: no such folder" in err
    assert "output.path must be a new folder" in err


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("input.path=nowhere", "--set: input.path: nowhere: does not exist"),
        ("input.columns=[error]", "--set: output.rename: the input has columns of the same names"),
        ("prompt.template={id}", None),
        ("output.path=memory://test-cli/out", None),
        ("output.path=nothing://bucket/x", "cannot be opened (ValueError)"),
        ("model.path=memory://test-cli/model", "memory://test-cli/model: no config.json in this folder"),
        ("model.path=nothing://bucket/x", "nothing://bucket/x: cannot be opened (ValueError)"),
        ("model.path=job.yaml", "job.yaml: a file; this program reads safetensors checkpoints"),
        ("model.path=data", "data: has no config.json; give the folder of"),
        ("model.path=owner/name", None),
        ("model.draft=demo:draft", None),
        ("model.draft=./nowhere", "--set: model.draft: ./nowhere: no such folder, and not a Hugging Face id"),
        ("model.draft=data", "data: has no config.json; give the folder of"),
        ("model.storage={anon: true}", "model.storage: only a url takes options; found anon"),
    ],
)
def test_validate_looks_at_data_model_and_output(work, pipe, setting: str, expected: str | None):
    code, _, err = pipe("validate", "job.yaml", "--set", setting)
    assert code == (0 if expected is None else 2)
    if expected is not None and "output.rename" in expected:
        assert "output.rename: {error: error_2}" in err
    elif expected is not None:
        assert expected in err


def test_validate_lists_the_files_that_a_job_skips(work, pipe):
    (work / "data" / "b.parquet").write_bytes(b"")
    code, _, err = pipe("validate", "job.yaml")
    assert code == 2
    assert "b.parquet" in err
    code, out, err = pipe("validate", "job.yaml", "--set", "input.on_corrupt=skip")
    assert code == 0, err
    assert "Skipped   1 damaged file: b.parquet (" in out
    found = json.loads(pipe("validate", "job.yaml", "--set", "input.on_corrupt=skip", "--json")[1])
    assert [f["file"] for f in found["input"]["skipped_files"]] == ["b.parquet"]


def test_a_store_that_does_not_answer_is_no_mistake_of_the_job(work, pipe, aws, monkeypatch):
    from pipeline.stores.retries import RetryPolicy

    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: RetryPolicy(max_tries=1))
    aws("http://127.0.0.1:1")
    places = [f"--set={key}=s3://bucket/x" for key in ("output.path", "input.path", "model.path")]
    code, out, err = pipe("validate", "job.yaml", *places, "--json")
    assert code == 3, err
    assert json.loads(out)["error"]["kind"] == "EnvironmentFailed"
    for key in ("model.path", "input.path", "output.path"):
        assert f"{key}: " in err
    code, _, err = pipe("validate", "job.yaml", *places, "--set", "prompt.template=x")
    assert code == 2, "a mistake is told first"


def test_validate_shows_a_first_row_that_is_an_error_and_an_input_without_rows(work, pipe):
    pq.write_table(pa.table({"id": [1], "text": pa.array([None], pa.string())}), work / "data" / "a.parquet")
    assert "becomes an error row: null_prompt" in pipe("validate", "job.yaml")[1]
    pq.write_table(pa.table({"id": [1], "text": ["x"]}).slice(0, 0), work / "data" / "a.parquet")
    assert "one empty part" in pipe("validate", "job.yaml")[1]


def test_run_prints_the_report(work, pipe, job_that):
    seen = {}

    def run_job(config, *, accept_numerics, retry_failed, progress):
        seen.update(config=config, accept_numerics=accept_numerics, retry_failed=retry_failed)
        progress(Status(phase="generating", rows_total=3, rows_done=1))
        print("noise of a library")
        return build_report("demo", "1a2b3c4d", [finished_run()], PartTotals(3), 3)

    job_that(run_job)
    arguments = ("--limit", "2", "--set", "run.actors=2", "--accept-numerics", "--retry-failed")
    code, out, err = pipe("run", "job.yaml", *arguments)
    assert code == 0
    assert "3 of 3: 3 completed, 0 errors" in out
    assert "_pipeline/report.md" in out
    assert "generating: 33.3 %, 1/3 rows" in err
    assert (seen["config"].input.limit, seen["config"].run.actors) == (2, 2)
    assert seen["accept_numerics"]
    assert seen["retry_failed"]
    pipe("run", "job.yaml")
    assert not seen["retry_failed"]


@pytest.mark.parametrize(
    "error",
    [errors.ConfigError, errors.InputError, errors.ModelError, errors.FingerprintError, errors.OutputError,
     errors.TooManyRowErrors, errors.EnvironmentFailed, errors.Interrupted, errors.PipelineError],
)  # fmt: skip
def test_every_error_has_its_exit_code(work, pipe, job_that, error):
    def run_job(*_, **__):
        raise error("what happened")

    job_that(run_job)
    code, out, err = pipe("run", "job.yaml")
    assert (code, out) == (error.exit_code, "")
    assert "Error: what happened" in err
    assert err.count("the same command goes on") == (error.exit_code in (1, 3, 75))
    code, out, err = pipe("run", "job.yaml", "--json")
    assert code == error.exit_code
    assert json.loads(out)["error"] == {
        "kind": error.__name__, "message": "what happened", "exit_code": code, "mistakes": [],
    }  # fmt: skip


def test_a_defect_is_70_with_its_trace_and_ctrl_c_is_75(work, pipe, job_that):
    def broken(*_, **__):
        raise RuntimeError("boom")

    job_that(broken)
    code, _, err = pipe("run", "job.yaml")
    assert code == 70
    assert "RuntimeError: boom" in err
    assert "a defect of this program" in err

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    job_that(interrupted)
    assert pipe("run", "job.yaml")[0] == 75


@pytest.mark.parametrize("arguments", [["rn"], ["run"], ["run", "job.yaml", "--limit", "0"], ["run", "a", "--nope"]])
def test_wrong_usage_is_2(work, pipe, arguments):
    code, out, err = pipe(*arguments)
    assert (code, out) == (2, "")
    assert "Usage:" in err


def test_json_keeps_stdout_clean_of_what_libraries_and_children_print(work):
    """In a process of its own, as it is about file descriptors: Ray and C libraries print when actors die, also
    after the job has ended and out of buffers that are flushed at exit."""
    script = (
        "import atexit, ctypes, os, subprocess, sys, threading\nimport pipeline.job.run\n"
        "from pipeline.cli import main as cli\n"
        "def run_job(*a, **k):\n"
        "    print('noise'); os.system('echo noise of a child'); os.write(1, b'(raylet) noise of C')\n"
        "    ctypes.CDLL(None).printf(b'noise in a buffer of C')\n"
        "    subprocess.Popen(['sh', '-c', 'sleep 0.5; echo noise of a child that stays'])\n"
        "    threading.Timer(0.2, print, ['noise of a thread']).start()\n"
        "    atexit.register(os.write, 1, b'noise at exit')\n"
        "    from pipeline.report.cost import build_report\n"
        "    from pipeline.data.output.part_totals import PartTotals\n"
        "    return build_report('demo', '1a2b3c4d', [], PartTotals(), 0)\n"
        "pipeline.job.run.run_job = run_job\n"
        "sys.argv = ['pipeline', 'run', 'job.yaml', '--json']\ncli.main()\n"
    )
    source = Path(errors.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          check=False, env=os.environ | {"PYTHONPATH": str(source)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"] == "demo"
    assert done.stderr.count("noise") == 7, done.stderr


def test_a_reader_that_has_enough_ends_the_command_quietly(work):
    script = Path(sys.executable).with_name("pipeline")
    for arguments in ("--help", "validate job.yaml"):
        line = f"set -o pipefail; {script} {arguments} | true"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
        assert done.stderr == ""
        assert done.returncode in (0, 1)


def test_a_job_whose_input_and_output_lie_in_a_store(work, pipe, aws, monkeypatch):
    """From validate to compact over S3, with the credentials in the job file and nowhere else."""
    from tests.faults.store import SECRET, FaultyStore
    from tests.job.conftest import FAKES
    from tests.job.local_flow import LocalFlow

    monkeypatch.setattr("pipeline.job.dataflow.graph.Dataflow", LocalFlow)
    monkeypatch.setattr("pipeline.job.run.Backend", lambda: FAKES)
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text('{"fake": {}}')
    (work / "model" / "tokenizer.json").write_text("{}")
    with FaultyStore() as store:
        bucket = store.bucket
        bucket.upload(work / "data" / "a.parquet", "in/a.parquet")
        storage = json.dumps(dict(bucket.storage))
        job = JOB.replace("path: data,", f"path: '{bucket.url('in')}', storage: {storage},")
        job = job.replace("path: out", f"path: '{bucket.url('out')}', storage: {storage}")
        job = job.replace("path: demo", "path: model").replace("sampling:", "run: {max_error_rate: 1}\nsampling:")
        (work / "job.yaml").write_text(job)
        for command, expected in [
            (["validate"], "s3://bucket/in: 1 file, 3 rows"),
            (["run"], "3 of 3: 2 completed, 1 errors"),
            (["validate"], "s3://bucket/out: 3 rows are there"),
            (["status"], "job.yaml: finished"),
            (["report"], "3 of 3: 2 completed, 1 errors"),
            (["compact", "--to", "merged", "--order", "input"], "1 parts, 3 rows (1 error rows) in 1 files"),
            (["compact", "--to", bucket.url("merged")], "1 parts, 3 rows (1 error rows) in 1 files"),
            (["run"], "3 of 3: 2 completed, 1 errors"),
        ]:
            code, out, err = pipe(command[0], "job.yaml", *command[1:])
            assert code == 0, err
            assert expected in out, command
            assert SECRET not in out + err
        aws(**bucket.storage)
        code, out, err = pipe("status", bucket.url("out"))
        assert code == 0, err
        assert f"{bucket.url('out')}: finished" in out
        everything = b"".join(bucket.get(key) for key in bucket.tags())
        assert SECRET.encode() not in everything
    assert pq.read_table(work / "merged").column("id").to_pylist() == [1, 2, 3]


def test_bench_plan(pipe, monkeypatch):
    from pipeline.bench.job.plan import PlanBench, PlanCost

    asked = {}

    def bench_plan(**options):
        asked.update(options)
        options["say"]("planning")
        cost = PlanCost(1, 5, 10**6, 20, 2000, *(0.5, 10**6) * 4)
        return PlanBench((cost,), 10, 10, 10, 100, 1, {"cores": "2"})

    monkeypatch.setattr("pipeline.bench.job.plan.bench_plan", bench_plan)
    code, out, err = pipe("bench", "plan", "--scale", "1", "--files", "5", "--repeats", "1", "--json")
    assert (code, err) == (0, "planning\n")
    assert json.loads(out)["bench"] == "plan"
    assert (asked["scales"], asked["files"], asked["repeats"], asked["parts_per_window"]) == ((1,), 5, 1, 60)
    assert "1x" in pipe("bench", "plan")[1]
    assert asked["scales"] == (1, 10, 100)


def test_status_of_a_folder_and_of_a_job(work, pipe):
    leave_output(work, finished_run(), "finished")
    for place in ("out", "job.yaml"):
        code, out, _ = pipe("status", place)
        assert code == 0
        assert f"{place}: finished\n" in out
        assert "66.7 %, 2/3 rows" in out
    raw = json.loads(pipe("status", "out", "--json")[1])
    assert (raw["rows_done"], raw["stale"]) == (2, None)


def test_status_of_a_run_whose_process_is_gone(work, pipe):
    import socket

    child = subprocess.Popen(["sleep", "60"])
    versions = {"host": socket.gethostname(), "pid": str(child.pid)}
    leave_output(work, finished_run(outcome="running", versions=versions), "running")
    try:
        assert "out: running\n" in pipe("status", "out")[1]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    code, out, _ = pipe("status", "out")
    assert code == 0
    assert "out: stale\n" in out
    assert "`pipeline run` goes on" in out


def test_status_of_a_run_that_was_not_heard_of_for_long(work, pipe):
    """Of another machine nobody can say whether the process is there."""
    store = leave_output(work, finished_run(outcome="running", versions={"host": "elsewhere", "pid": "1"}), "running")
    status = json.loads(store.read("_pipeline/status.json"))
    now = datetime.now(UTC)
    for told_at, head in ((now, "running"), (now - timedelta(hours=3), "stale"), (None, "running")):
        told = {"told_at": told_at.isoformat()} if told_at else {}
        store.replace("_pipeline/status.json", json.dumps(status | told).encode())
        out = pipe("status", "out")[1]
        assert f"out: {head}\n" in out
        assert ("Nothing was heard of it for 3 h 00 min. If its process on elsewhere is gone" in out) == (
            head == "stale"
        )


def test_report_is_the_folders_or_made_anew_when_a_run_was_killed(work, pipe):
    store = leave_output(work, finished_run(), "finished")
    kept = build_report("demo", "x", [finished_run()], PartTotals(rows=3), 3)
    store.replace("_pipeline/report.json", json.dumps(kept.to_json()).encode())
    code, out, _ = pipe("report", "out")
    assert code == 0
    assert out == text(kept) + "\n"
    killed = finished_run(run_id="run-2", outcome="killed", started_at="2026-01-02T00:00:00+00:00")
    store.replace("_pipeline/runs/run-2.json", json.dumps(killed.to_json()).encode())
    raw = json.loads(pipe("report", "job.yaml", "--json")[1])
    assert [run["run_id"] for run in raw["runs"]] == ["run-1", "run-2"]
    assert raw["rows"]["written"] == 2, "counted from the parts"
    assert raw["rows"]["input"] == 3


@pytest.mark.parametrize(
    ("command", "place", "expected"),
    [
        ("status", "nowhere", "nowhere: no such folder"),
        ("status", "data/a.parquet", "is neither an output folder nor a job file"),
        ("status", "data", "no run of a job has left a status here"),
        ("report", "data", "no run of a job has left a record here"),
        ("report", "none.yaml", "none.yaml: no such file"),
    ],
)
def test_places_without_a_job(work, pipe, command: str, place: str, expected: str):
    code, out, err = pipe(command, place)
    assert (code, out) == (2, "")
    assert expected in err


def test_a_finished_output_without_its_parts_is_told(work, pipe):
    store = leave_output(work, finished_run(), "finished")
    kept = build_report("demo", "x", [finished_run()], PartTotals(rows=3), 3)
    store.replace("_pipeline/report.json", json.dumps({**kept.to_json(), "outcome": "finished"}).encode())
    next(Path(store.path).glob("part-*")).unlink()
    assert "out: damaged\n" in pipe("status", "out")[1]
    for command in ("status", "report"):
        assert "it holds 0 parts, _SUCCESS counts 1" in pipe(command, "out")[1]
        assert "0 parts" in json.loads(pipe(command, "out", "--json")[1])["stale"]


def test_an_edited_status_is_told(work, pipe):
    store = leave_output(work, finished_run(), "finished")
    store.replace("_pipeline/status.json", b"[1]")
    code, _, err = pipe("status", "out")
    assert code == 2
    assert "not one JSON object" in err


def test_plain_progress_speaks_at_changes_every_few_seconds_and_seldom_when_nothing_moves():
    now = [100.0]
    stream = StringIO()
    with PlainProgress(stream, every_s=5, still_every_s=30, clock=lambda: now[0]) as progress:
        progress(Status(phase="planning"))
        for second in range(40):
            now[0] += 1
            progress(Status(phase="loading", rows_total=100, elapsed_s=second))
        for second in range(12):
            now[0] += 1
            progress(Status(phase="running", rows_total=100, rows_done=second))
        progress(Status(phase="finished", rows_total=100, rows_done=100))
        progress(Status(phase="finished", rows_total=100, rows_done=100, error_rows=1))
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "planning", "loading", "loading (30 s)", "running", "running: 5.0 %", "running: 10.0 %",
        "finished: 100.0 %", "finished: 100.0 %",
    ]  # fmt: skip
    assert "(1 errors)" in lines[-1], "the last state is always told"


EVIL = "evil\x1b[31mRED\x1b]0;title\x07\x1b[2J\x9b\u202e"


def commands_no_terminal(text: str) -> bool:
    return all(char.isprintable() for char in text.replace("\n", ""))


def test_what_data_is_called_commands_no_terminal(work, pipe, job_that):
    """A file's name, a row's message, a model folder's name: in every command's words and in its JSON."""
    (work / "data" / "a.parquet").rename(work / "data" / f"{EVIL}.parquet")
    (work / EVIL).mkdir()
    example = ErrorExample(f"{EVIL}.parquet", 2, f"column {EVIL}\nis null")
    stats = RowStats(errors={"null_prompt": (example,)})
    run = finished_run(row_stats=stats, skipped_files=[SkippedInput(EVIL, 1, EVIL)])
    leave_output(work, run, f"finished {EVIL}")
    kept = build_report(EVIL, "x", [run], PartTotals(3, error_rows={"null_prompt": 1}), 3)
    assert commands_no_terminal(text(kept))
    assert commands_no_terminal(markdown(kept))
    (work / "out" / "_pipeline" / "report.json").write_text(json.dumps(kept.to_json()))

    def run_job(*_, progress, **__):
        progress(Status(phase=f"planning: {EVIL}"))
        raise errors.TooManyRowErrors(f"2 error rows\n  {example.line('null_prompt')}")

    job_that(run_job)
    for command in (
        ["validate", "job.yaml"], ["validate", "job.yaml", "--set", f"model.path=./{EVIL}"], ["report", "out"],
        ["status", "out"], ["run", "job.yaml"], ["report", EVIL], ["doctor", "--model", f"./{EVIL}"],
        ["generate", "--model", f"./{EVIL}", "--prompt", "x"],
    ):  # fmt: skip
        for more in ([], ["--json"]):
            code, out, err = pipe(*command, *more)
            assert code != 70, err
            assert commands_no_terminal(out + err), (command, out, err)
            assert "evil" in out + err
    assert json.loads(pipe("run", "job.yaml", "--json")[1])["error"]["message"].count("\x1b") == 6, "as it is"


def test_a_defects_trace_commands_no_terminal(work, pipe, job_that):
    def broken(*_, **__):
        raise RuntimeError(EVIL)

    job_that(broken)
    code, _, err = pipe("run", "job.yaml")
    assert code == 70
    assert err.count("\n") > 5
    assert commands_no_terminal(err)


def test_a_status_in_one_line():
    status = Status(phase="running", rows_total=2000, rows_done=1000, error_rows=3, input_tokens_per_s=1234.5,
                    generated_tokens_per_s=99, eta_s=300)  # fmt: skip
    assert status_line(status) == ("running: 50.0 %, 1,000/2,000 rows (3 errors), 1,234 tok/s in, 99 out, 5 min left")
    ended = replace(status, outcome="interrupted", phase="interrupted")
    assert status_line(ended) == "interrupted: 50.0 %, 1,000/2,000 rows (3 errors)"
    assert [duration(s) for s in (0, 40, 720, 11_100, 200_000)] == ["0 s", "40 s", "12 min", "3 h 05 min", "2 d 7 h"]


def test_a_live_bar_is_drawn_on_a_terminal(monkeypatch):
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with progress_for() as progress:
        progress(Status(phase="generating [x]", rows_total=2000, rows_done=1000, eta_s=300))
    drawn = terminal.getvalue()
    assert "generating [x]" in drawn
    assert "1,000/2,000 rows" in drawn
    assert "5 min left" in drawn
    with progress_for() as progress:
        progress(Status(phase=f"reading {EVIL}"))
    assert "evil\\x1b[31mRED\\x1b]0;title" in terminal.getvalue()
    assert "\x1b]0;" not in terminal.getvalue()
