"""`pipeline submit` to a Ray cluster that was started like in the documentation, with a token."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, TOKEN = 400, "0123456789abcdef" * 2
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Start a cluster on this machine and return a user's environment."""
    ports = [free_port(), free_port()]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"PATH": f"{BIN}:{env['PATH']}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # for the head at its end
    logs = tmp_path_factory.mktemp("head") / "log"
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=2", f"--port={ports[0]}",
               "--include-dashboard=true", f"--dashboard-port={ports[1]}", "--disable-usage-stats",
               "--object-store-memory=100000000"]  # fmt: skip
    with logs.open("w") as log:
        ray = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    env["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ports[1]}"
    deadline = time.monotonic() + 200  # a busy head lists jobs long before it accepts one
    accepted = [BIN / "ray", "job", "submit", "--no-wait", "--", "true"]
    while subprocess.run(accepted, env=env, capture_output=True).returncode:
        assert ray.poll() is None, logs.read_text()
        assert time.monotonic() < deadline, logs.read_text()
    yield env
    ray.terminate()
    ray.wait(60)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pipeline(env, *arguments, **changed):
    return subprocess.run([BIN / "pipeline", *arguments], env=env | changed, capture_output=True, text=True)


def start(env, *arguments):
    command = [BIN / "pipeline", "submit", *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def job(tmp_path):
    pq.write_table(pa.table({"text": [f"report {i} " * (1 + i % 9) for i in range(ROWS)]}), tmp_path / "in.parquet")
    (tmp_path / "nightly.yaml").write_text(f"""\
vars: {{date: null}}
input: {{path: {tmp_path}/in.parquet}}
prompt: {{column: text}}
model: {{path: demo:target-awq}}
engine: {{max_num_seqs: 4}}
speculation: off
sampling: {{max_tokens: 200, ignore_eos: true}}
output: {{path: "{tmp_path}/out-${{date}}", rows_per_file: 8}}
run: {{cpus_per_actor: 1, drain_timeout: 1 s}}
""")
    return [str(tmp_path / "nightly.yaml"), "--var", "date=2026-11-20"]


def test_a_job_is_joined_drained_and_resumed(head, job, tmp_path):
    output = tmp_path / "out-2026-11-20"
    first = start(head, *job)
    lines = [first.stderr.readline()]
    while "running: " not in lines[-1]:
        lines.append(first.stderr.readline())
        assert lines[-1], lines
    joined = start(head, *job, "--json")
    assert " is running at http://127.0.0.1:" in joined.stderr.readline()
    left = pipeline(head, "submit", *job, "--if-running", "leave", "--json")
    found = json.loads(left.stdout)
    assert (left.returncode, found["state"], found["exit_code"]) == (0, "RUNNING", None)
    assert found["submission_id"].startswith("nightly-")
    other = pipeline(head, "submit", *job, "--set", "sampling.max_tokens=3")
    assert other.returncode == 2
    assert f"pipeline cancel {found['submission_id']}" in other.stderr

    while not list(output.glob("part-*")):
        assert first.poll() is None
        time.sleep(0.1)
    ended = pipeline(head, "cancel", *job)
    assert (ended.returncode, "stopped after" in ended.stdout) == (0, True), ended.stderr
    stderr = first.communicate(timeout=60)[1]
    assert "draining" in stderr
    assert "Stopped by SIGTERM with " in stderr
    assert first.returncode == 75
    out, stderr = joined.communicate(timeout=60)
    assert (joined.returncode, json.loads(out)["state"]) == (75, "STOPPED")
    assert "planning" in stderr  # joined from the beginning
    written = sum(pq.read_metadata(part).num_rows for part in output.glob("part-*"))
    assert 0 < written < ROWS
    assert json.loads(pipeline(head, "status", *job, "--json").stdout)["outcome"] == "interrupted"
    ended_already = pipeline(head, "cancel", *job)
    assert (ended_already.returncode, "no run of this job" in ended_already.stderr) == (2, True)

    again = pipeline(head, "submit", *job)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(f"{found['submission_id'][:-1]}2: succeeded after")
    table = pq.read_table(output, columns=["source_row"])
    assert sorted(table["source_row"].to_pylist()) == list(range(ROWS))


def test_errors_of_a_driver_are_shown_here(head, job, tmp_path):
    mistaken = pipeline(head, "submit", *job, "--set", "prompt.column=txt")
    assert mistaken.returncode == 2
    assert "has no column 'txt'" in mistaken.stderr
    assert "dashboard_sdk" not in mistaken.stderr
    found = mistaken.stdout.split(":")[0]
    assert pipeline(head, "cancel", found).returncode == 0  # it has ended
    unknown = pipeline(head, "cancel", "nightly-1-1")
    assert (unknown.returncode, "nightly-1-1: no run of this job" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, 2, "requires a token"),
        ({"RAY_AUTH_TOKEN": "f" * 32}, 2, "Invalid authentication token"),
        ({"RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1"}, 3, "Pass --address http://HEAD:8265"),
    ],
)
def test_a_refused_submission_shows_the_reason(head, job, changed, code, message):
    refused = pipeline(head, "submit", *job, **changed)
    assert (refused.returncode, message in refused.stderr) == (code, True), refused.stderr
