"""Command line: exit codes, which text goes to which stream, and no text controls a terminal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipeline import errors
from pipeline.data.output.part_totals import PartTotals
from pipeline.job.telemetry.status import Status
from pipeline.report.build import build_report
from pipeline.report.record.row_stats import ErrorExample, RowStats
from pipeline.report.record.run_record import SkippedInput
from pipeline.report.render import markdown, text
from tests.cli.conftest import EVIL, JOB, finished_run, leave_output


def test_help_teaches_with_examples(pipe):
    code, out, _ = pipe("--help")
    assert code == 0
    assert "pipeline run my.yaml" in out
    assert "75  interrupted" in out
    jobs = ("run", "validate", "status", "report", "verify", "compact", "logs")
    for command in (*jobs, "generate", "doctor", "init", "completion", "schema"):
        code, out, _ = pipe(command, "--help")
        assert code == 0
        assert f"Examples:\n    pipeline {command}" in out


def test_help_imports_nothing_heavy():
    """A help text must appear in well under half a second."""
    script = (
        "import sys\nfrom pipeline.cli import main as cli\nsys.argv = ['pipeline', 'run', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'pyarrow', 'pydantic', 'numpy', 'yaml', 'rich'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_run_prints_the_report(work, pipe, job_that):
    seen = {}

    def run_job(config, *, progress, logs, **options):
        seen.update(options, config=config)
        progress(Status(phase="generating", rows_total=3, rows_done=1))
        print("noise of a library")
        return build_report("demo", "1a2b3c4d", [finished_run()], PartTotals(3), 3)

    job_that(run_job)
    arguments = ("--limit", "2", "--set", "run.actors=2", "--accept-numerics", "--retry-failed")
    code, out, err = pipe("run", "job.yaml", *arguments)
    assert code == 0
    assert "3 of 3: 3 completed, 0 error rows" in out
    assert "_pipeline/report.md" in out
    assert "generating: 33.3%, 1/3 rows" in err
    config = seen.pop("config")
    assert (config.input.limit, config.run.actors) == (2, 2)
    off = {
        "accept_numerics": False,
        "retry_failed": False,
        "redo": (),
        "append": False,
        "sample": None,
        "metrics": None,
    }
    assert seen == off | {"accept_numerics": True, "retry_failed": True}
    pipe("run", "job.yaml", "--sample", "7", "--append", "--metrics", "[::]:9400", "--preset", "cpu")
    assert seen.pop("config").engine.max_num_seqs == 32
    assert seen == off | {"append": True, "sample": 7, "metrics": "[::]:9400"}
    pipe("run", "job.yaml", "--redo", "invalid, truncated")
    assert seen.pop("config").sampling.max_tokens > 0
    assert seen == off | {"redo": ("invalid", "truncated")}
    code, _, err = pipe("run", "job.yaml", "--redo", "failed")
    assert (code, "expected truncated, invalid, or both" in err) == (2, True)
    assert pipe("run", "job.yaml", "--metrics", "9400")[0] == 2
    code, _, err = pipe("run", "job.yaml", "--preset", "nosuch")
    assert (code, "a100" in err, "h100" in err) == (2, True, True)


def test_a_scheduled_run_has_the_date_of_its_time_in_the_variables_zone(work, pipe, job_that):
    paths = []

    def run_job(config, **_):
        paths.append(config.output.path)
        return build_report("demo", "1a2b3c4d", [finished_run()], PartTotals(3), 3)

    job_that(run_job)
    text = (work / "job.yaml").read_text().replace("path: out", "path: 'out/${date}'")
    (work / "job.yaml").write_text(text + "vars: {date: {today: Europe/Berlin}}\n")
    for moment in ("@1795475100", "2026-11-23T23:05:00+00:00", "@1795475100"):
        assert pipe("run", "job.yaml", "--logical-date", moment)[0] == 0
    assert paths == ["out/2026-11-24"] * 3
    for moment in ("@x", "2026-11-23T23:05:00", "now", "@"):
        code, _, err = pipe("run", "job.yaml", "--logical-date", moment)
        assert (code, "expected a time with its zone" in err) == (2, True)


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
    assert err.count("the same command resumes") == (error.exit_code in (1, 3, 75))
    code, out, err = pipe("run", "job.yaml", "--json")
    assert code == error.exit_code
    assert json.loads(out)["error"] == {
        "kind": error.__name__, "message": "what happened", "exit_code": code, "mistakes": [],
    }  # fmt: skip


def test_a_defect_is_70_with_a_traceback_and_ctrl_c_is_75(work, pipe, job_that):
    def broken(*_, **__):
        raise RuntimeError(f"boom {EVIL}")

    job_that(broken)
    code, _, err = pipe("run", "job.yaml")
    assert code == 70
    assert "RuntimeError: boom" in err
    assert "This is a bug" in err
    assert err.count("\n") > 5
    assert is_harmless_on_a_terminal(err)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    job_that(interrupted)
    assert pipe("run", "job.yaml")[0] == 75


@pytest.mark.parametrize("arguments", [["rn"], ["run"], ["run", "job.yaml", "--limit", "0"], ["run", "a", "--nope"]])
def test_wrong_usage_is_2(work, pipe, arguments):
    code, out, err = pipe(*arguments)
    assert (code, out) == (2, "")
    assert "Usage:" in err


def test_json_keeps_prints_of_libraries_and_children_out_of_stdout(work):
    """Run in a new process with its own file descriptors. Ray and C libraries print when actors die, also after the end
    of the job and from buffers that are flushed at exit."""
    script = (
        "import atexit, ctypes, os, subprocess, sys, threading\nimport pipeline.job.running.run\n"
        "from pipeline.cli import main as cli\n"
        "def run_job(*a, **k):\n"
        "    print('noise'); os.system('echo noise of a child'); os.write(1, b'(raylet) noise of C')\n"
        "    ctypes.CDLL(None).printf(b'noise in a buffer of C')\n"
        "    subprocess.Popen(['sh', '-c', 'sleep 0.5; echo noise of a child that stays'])\n"
        "    threading.Timer(0.2, print, ['noise of a thread']).start()\n"
        "    atexit.register(os.write, 1, b'noise at exit')\n"
        "    from pipeline.report.build import build_report\n"
        "    from pipeline.data.output.part_totals import PartTotals\n"
        "    return build_report('demo', '1a2b3c4d', [], PartTotals(), 0)\n"
        "pipeline.job.running.run.run_job = run_job\n"
        "sys.argv = ['pipeline', 'run', 'job.yaml', '--json']\ncli.main()\n"
    )
    source = Path(errors.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120,
                          check=False, env=os.environ | {"PYTHONPATH": str(source)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"] == "demo"
    assert done.stderr.count("noise") == 7, done.stderr


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly(work):
    script = Path(sys.executable).with_name("pipeline")
    for arguments in ("--help", "schema", "completion bash", "validate job.yaml"):
        line = f"set -o pipefail; {script} {arguments} | true"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
        assert done.stderr == ""
        assert done.returncode in (0, 1)


def test_a_job_with_input_and_output_in_a_store(work, pipe, aws, monkeypatch):
    """All commands from validate to compact work over S3 with credentials only in the job file."""
    from tests.faults.store import SECRET, FaultyStore
    from tests.job.conftest import FAKES

    monkeypatch.setattr("pipeline.job.running.run.backend_of", lambda config: FAKES)
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text('{"fake": {}}')
    Tokenizer(WordLevel({"?": 0}, "?")).save(str(work / "model" / "tokenizer.json"))
    with FaultyStore() as store:
        bucket = store.bucket
        bucket.upload(work / "data" / "a.parquet", "in/a.parquet")
        for name in ("config.json", "tokenizer.json"):
            bucket.upload(work / "model" / name, f"model/{name}")
        storage = json.dumps(dict(bucket.storage))
        job = (
            JOB.replace("path: data,", f"path: '{bucket.url('in')}',")
            + f"storage_options: {{'s3://bucket': {storage}}}\n"
        )
        job = job.replace("path: out", f"path: '{bucket.url('out')}'")
        job = job.replace("path: demo", "path: model").replace("sampling:", "run: {max_error_rate: 1}\nsampling:")
        (work / "job.yaml").write_text(job)
        for command, expected in [
            (["validate"], "s3://bucket/in: 1 file, 3 rows"),
            (["validate", "--set", f"model.path={bucket.url('model')}"], "s3://bucket/model"),
            (["run"], "3 of 3: 2 completed, 1 error row"),
            (["validate"], "s3://bucket/out: 3 rows exist"),
            (["status"], "job.yaml: finished"),
            (["report"], "3 of 3: 2 completed, 1 error row"),
            (["compact", "--output", "merged", "--order", "input"], "1 part, 3 rows (1 error row) in 1 file"),
            (["compact", "--output", bucket.url("merged")], "1 part, 3 rows (1 error row) in 1 file"),
            (["run"], "Finished already: 3 rows, 1 error row in s3://bucket/out"),
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


def is_harmless_on_a_terminal(text: str) -> bool:
    return all(char.isprintable() for char in text.replace("\n", ""))


def test_names_from_data_control_no_terminal(work, pipe, job_that):
    """Control characters in a file's name, a row's message or a model folder's name are escaped in text and JSON."""
    (work / "data" / "a.parquet").rename(work / "data" / f"{EVIL}.parquet")
    (work / EVIL).mkdir()
    example = ErrorExample(f"{EVIL}.parquet", 2, f"column {EVIL}\nis null")
    stats = RowStats(errors={"null_prompt": (example,)})
    run = finished_run(row_stats=stats, skipped_files=[SkippedInput(EVIL, 1, EVIL)])
    leave_output(work, run, f"finished {EVIL}")
    kept = build_report(EVIL, "x", [run], PartTotals(3, error_rows={"null_prompt": 1}), 3)
    assert is_harmless_on_a_terminal(text(kept))
    assert is_harmless_on_a_terminal(markdown(kept))
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
            assert is_harmless_on_a_terminal(out + err), (command, out, err)
            assert "evil" in out + err
    assert json.loads(pipe("run", "job.yaml", "--json")[1])["error"]["message"].count("\x1b") == 6, "as it is"
