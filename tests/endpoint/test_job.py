"""Jobs whose rows a server computes, from job file to output folder."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.config import load_job
from pipeline.errors import ConfigError
from pipeline.job.running.run import run_job
from tests.endpoint.fake_server import FakeServer, answer_text

RUNS = "_pipeline/runs/*.json"
KEY = "sk-very-secret-1234567890"


def job_file(folder: Path, url: str, num_rows: int, **sections: dict[str, Any]) -> Path:
    texts = [f"row{i}. a b c" + " d" * 20 * (i == 5) for i in range(num_rows)]
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet")
    job: dict[str, dict[str, Any]] = {
        "input": {"path": str(folder / "in.parquet")},
        "prompt": {"template": "say {text}"},
        "server": {"base_url": url},
        "sampling": {"max_tokens": 4},
        "output": {"path": str(folder / "out"), "rows_per_file": 8},
        "run": {"max_error_rate": 0.5},
    }
    for name, section in sections.items():
        job[name] = {**job.get(name, {}), **section}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the output's rows by text; each is there once."""
    found = pq.read_table(folder / "out", columns=["text", "generated_text", "error", "error_message"]).to_pylist()
    assert len({row["text"] for row in found}) == len(found)
    return {row["text"].split(".")[0]: row for row in found}


def assert_right(row: dict[str, Any]) -> None:
    assert (row["error"], row["generated_text"]) == (None, answer_text(f"say {row['text']}", 4))


def test_rows_errors_and_no_key_in_any_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Callable[..., tuple[int, str, str]]
):
    monkeypatch.setenv("FAKE_KEY", KEY)
    quoted = {"match": "row7.", "status": 400, "body": {"error": {"message": f"no, {KEY}"}}}
    with FakeServer(api_key=KEY, too_long=15, content_filter={"match": "row6."}, error=quoted) as server:
        backend = {"base_url": server.url, "api_key": "${FAKE_KEY}"}
        path = job_file(tmp_path, server.url, 60, server=backend)
        run_job(load_job(path))
        code, shown, progress = pipe("validate", str(path), "--json")
    found = rows(tmp_path)
    errors = {"row5": "prompt_too_long", "row6": "content_filter", "row7": "invalid_request"}
    assert {name: row["error"] for name, row in found.items() if row["error"]} == errors
    assert "status 400" in found["row7"]["error_message"]
    for name in found.keys() - errors.keys():
        assert_right(found[name])
    assert len(found) == 60
    assert code == 0
    assert json.loads(shown)
    assert KEY not in shown + progress
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 8
    for file in files:
        assert KEY.encode() not in file.read_bytes(), file
    assert KEY not in str([row["error_message"] for row in found.values()])


def test_a_finished_job_says_so_in_one_line(tmp_path: Path, pipe: Callable[..., tuple[int, str, str]]):
    with FakeServer() as server:
        path = str(job_file(tmp_path, server.url, 3))
        assert "Results" in pipe("run", path)[1]
        code, shown, _ = pipe("run", path)
        report = json.loads(pipe("run", path, "--json")[1])
    output = tmp_path / "out"
    expected = f"Finished already: 3 rows, 0 error rows in {output}. `pipeline report {output}` shows the report.\n"
    assert (code, shown, report["was_complete"]) == (0, expected, True)


def test_equal_rows_are_sent_once(tmp_path: Path):
    texts, prices = [f"row{i % 3}. a b" for i in range(8)], {"input": 1.0, "output": 2.0}
    with FakeServer() as server:
        path = job_file(tmp_path, server.url, 1, cost={"usd_per_million": prices})
        pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
        report = run_job(load_job(path))
        sent = [json.dumps(request.body) for request in server.requests]
    assert [sum(f"say row{i}." in body for body in sent) for i in range(3)] == [1, 1, 1]
    found = pq.read_table(tmp_path / "out", columns=["text", "generated_text", "error"]).to_pylist()
    assert sorted(row["text"] for row in found) == sorted(texts)
    for row in found:
        assert_right(row)
    assert report.rows.copied == 5
    assert report.tokens.generated == 8 * 4
    assert report.work.computed_generated_tokens == server.ledger.generated_tokens
    assert report.work.wasted_generated_tokens == server.ledger.generated_tokens - report.tokens.decoded
    assert report.cost.total_usd == pytest.approx(server.ledger.usd({**prices, "cached_input": 1.0}))


def test_a_killed_run_resumes_with_the_same_model_only(tmp_path: Path):
    with FakeServer(slots=8, seconds_per_request=0.15) as server:
        path = job_file(tmp_path, server.url, 120)
        driver = subprocess.Popen([sys.executable, "-m", "pipeline", "run", str(path)], stderr=subprocess.DEVNULL)
        output, deadline_s = tmp_path / "out", time.monotonic() + 60
        while not (any(output.glob("part-*")) and any("fake-model" in file.read_text() for file in output.glob(RUNS))):
            assert driver.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert len(list(output.glob("part-*"))) < 15
        server.behaviour.seconds_per_request, server.behaviour.model = 0.0, "other-model"
        for _ in range(2):  # a refused run does not count
            with pytest.raises(ConfigError, match="serves 'other-model', and the output was begun with 'fake-model'"):
                run_job(load_job(path))
        server.behaviour.model = "fake-model"
        run_job(load_job(path))
        num_requests = len(server.requests)
        run_job(load_job(path))  # complete: sends nothing
        assert len(server.requests) == num_requests
    found = rows(tmp_path)
    assert len(found) == 120
    for row in found.values():
        assert_right(row)


UNUSED = "has no effect with a server"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": {"dtype": "bfloat16"}}, "engine.dtype", UNUSED),
    ({"speculation": {"method": "off"}}, "speculation.method", UNUSED),
    ({"model": {"path": "some/model", "quantization": "int8"}}, "model.quantization", UNUSED),
    (
        {"model": {"path": "some/model", "adapters": {"a": "b"}, "adapter": "a"}},
        "model.adapters",
        "is not supported with",
    ),
    ({"task": {"type": "classify"}}, "task.type", "classify is not supported with a server"),
    ({"task": {"type": "embed"}}, "task.dimensions", "required with a server"),
    ({"task": {"type": "embed", "dimensions": 8, "pooling": "mean"}}, "task.pooling", UNUSED),
    ({"sampling": {"prompt_logprobs": 1}}, "sampling.prompt_logprobs", "not supported with a server"),
    ({"sampling": {"generation_config": "model"}}, "sampling.generation_config", "needs the checkpoint"),
    ({"quality": {"sample": 0.1}}, "quality.sample", "not supported with a server"),
    ({"prompt": {"chat": {"chat_template": "{{ messages }}"}}}, "prompt.chat.chat_template", UNUSED),
    ({"run": {"actors": 2}}, "run.actors", "must be 1 with server.base_url"),
    ({"server": {"base_url": None}}, "server", "expected one of base_url and serve"),
    ({"server": {"base_url": "h:1"}}, "server.base_url", "expected http://HOST:PORT/v1"),
    ({"server": {"base_url": "http://me:pw@h:1"}}, "server.base_url", "cannot contain a user"),
]


@pytest.mark.parametrize(("sections", "key", "message"), WRONG)
def test_wrong_keys_are_refused(tmp_path: Path, sections: dict[str, Any], key: str, message: str):
    path = job_file(tmp_path, "http://localhost:9", 1, **sections)
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert any(f": {key}: " in line and message in line for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("value", "key"),
    [(f"{KEY}\n", KEY), (f" {KEY}\r\n", KEY), (KEY, KEY), (f"{KEY}\nx", None), (" ", None), ("schl\u00fcssel", None)],
)
def test_white_space_around_a_key_is_dropped_and_other_odd_characters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, key: str | None
):
    """Files and Kubernetes secrets end with a line feed."""
    monkeypatch.setenv("FAKE_KEY", value)
    path = job_file(tmp_path, "http://localhost:9", 1, server={"api_key": "${FAKE_KEY}"})
    if key is not None:
        assert load_job(path).server.api_key == key
        return
    with pytest.raises(ConfigError, match=r"server\.api_key: expected printable ASCII") as caught:
        load_job(path)
    assert value.strip() == "" or value not in str(caught.value)


def test_a_job_continues_when_one_of_two_servers_ends(tmp_path: Path):
    slow = {"slots": 8, "seconds_per_request": 0.02}
    with FakeServer(**slow) as server, FakeServer(die={"after": 60}, **slow) as dying:
        report = run_job(load_job(job_file(tmp_path, server.url, 300, server={"base_url": [server.url, dying.url]})))
    found = rows(tmp_path)
    assert len(found) == 300
    for name in found.keys() - {"row5"}:
        assert_right(found[name])
    assert dying.num_answered >= 30
    assert report.work.engine_restarts == 0


def test_a_rejected_row_and_a_refused_one_are_error_rows_without_a_restart(tmp_path: Path):
    rejected = {"match": "row3.", "status": 403, "body": {"error": {"message": "moderated"}}}
    refusal = {"match": "row4.", "kind": "I cannot help with that."}
    with FakeServer(error=rejected, refusal=refusal) as server:
        report = run_job(load_job(job_file(tmp_path, server.url, 40, prompt={"chat": {}})))
    found = rows(tmp_path)
    errors = {name: (row["error"], row["error_message"]) for name, row in found.items() if row["error"]}
    assert errors == {
        "row3": ("rejected", "the server rejects the request (status 403): moderated"),
        "row4": ("refused", "I cannot help with that."),
    }
    assert len(found) == 40
    for name in found.keys() - errors.keys():
        assert_right(found[name])
    assert report.work.engine_restarts == 0


@pytest.mark.parametrize("n", [1, 2])
def test_tool_calls_have_a_column_if_the_job_has_tools(tmp_path: Path, n: int):
    tools = {"extra_body": {"tools": [{"type": "function", "function": {"name": "weather"}}]}}
    sampling = {"temperature": 1.0, "n": n}
    with FakeServer(tool_calls={"match": "row3."}, error={"match": "row4.", "status": 400}) as server:
        run_job(load_job(job_file(tmp_path, server.url, 10, prompt={"chat": {}}, sampling=sampling, server=tools)))
    found = pq.read_table(tmp_path / "out")
    assert found.schema.names[-1] == "tool_calls"
    calls = dict(zip(found["text"].to_pylist(), found["tool_calls"].to_pylist()))
    of_row3 = calls.pop("row3. a b c")
    samples = [of_row3] if n == 1 else of_row3
    assert [[one["function"]["name"] for one in json.loads(sample)] for sample in samples] == [["weather"]] * n
    assert calls.pop("row4. a b c") is None
    assert {str(value) for value in calls.values()} == {"None" if n == 1 else "[None, None]"}


def test_other_names_of_the_model_can_be_accepted_from_run_to_run(tmp_path: Path):
    with FakeServer() as server:
        path = job_file(tmp_path, server.url, 20)
        run_job(load_job(path), sample=8)
        server.behaviour.model = "fake-model-2"
        with pytest.raises(ConfigError, match=r"'fake-model-2' in server\.accept_models"):
            run_job(load_job(path))
        run_job(load_job(job_file(tmp_path, server.url, 20, server={"accept_models": ["fake-model-2"]})))
    assert len(rows(tmp_path)) == 20
