"""The section `targets`: a missed target is named, sent to `run.notify`, and has an exit code."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.config.sections.limits import TargetsSection
from pipeline.errors import LimitReached
from pipeline.job.running.notify import Notifier, notify
from pipeline.report.targets import Target, targets_of
from tests.job.conftest import FAKES, TEXTS, run

pytestmark = pytest.mark.usefixtures("without_ray")
PRICE = {"hourly_usd": 1.0}


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_target_is_met_at_its_limit_and_missed_if_its_figure_is_unknown():
    for key, actual, missed in [
        ("max_row_p95", 2.0, False),
        ("max_row_p95", 2.1, True),
        ("min_batch_efficiency", 2.0, False),
        ("min_batch_efficiency", 1.9, True),
        ("max_usd_per_1m_generated", None, True),
    ]:
        assert Target(key, 2.0, actual).is_missed is missed, key


def test_every_key_of_the_section_has_a_figure(job):
    settings = dict.fromkeys(TargetsSection.model_fields, 0.5) | {"max_row_p95": "1 s"}
    report, _ = run(job.rows(TEXTS), targets=settings, cost=PRICE)
    assert {target.key for target in report.targets} == set(settings)
    assert None not in {target.actual for target in report.targets}
    assert targets_of({}, dict.fromkeys(settings)) == ()


def test_missed_targets_are_named_and_notified(job, tmp_path):
    notified = tmp_path / "notified.jsonl"
    targets = {"max_row_p95": "0.0001 s", "min_generated_per_s": 0.001}
    report, _ = run(job.rows(TEXTS), targets=targets, run={"notify": str(notified)})
    assert [target.key for target in report.missed] == ["max_row_p95"]
    (event,) = lines(notified)
    assert (event["event"], event["job"]) == ("targets_missed", "job")
    assert event["missed"][0]["target"] == "max_row_p95"
    assert "max_row_p95" in (job.output / "_pipeline" / "report.md").read_text()
    kept = json.loads((job.output / "_pipeline" / "report.json").read_text())["targets"]
    assert [target["key"] for target in kept if target["is_missed"]] == ["max_row_p95"]
    other = {"path": str(job.folder / "other")}
    report, _ = run(job, output=other, targets={"min_generated_per_s": 0.001}, run={"notify": str(notified)})
    assert (report.missed, len(lines(notified))) == ((), 1), "no event if all targets are met"


@pytest.mark.usefixtures("one_unit_in_flight")
def test_near_and_reached_limits_are_notified(job, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.job.running.limits.RESERVE_S", 0.3)
    monkeypatch.setattr("pipeline.job.running.driver.RESERVE_S", 0.3)
    notified = tmp_path / "notified.jsonl"
    job.fake(step_s=0.1, load_s=2.0, max_num_seqs=2).rows(TEXTS)
    with pytest.raises(LimitReached):
        run(job, run={"max_runtime": "3 s", "notify": str(notified)})
    events = [(event["event"], event["limit"]) for event in lines(notified)]
    assert events[-1] == ("limit_reached", "run.max_runtime")
    assert set(events[:-1]) <= {("limit_near", "run.max_runtime")}


def test_a_webhook_gets_json_and_one_that_fails_is_a_warning():
    got = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.headers["Content-Type"], json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(204 if len(got) == 1 else 500)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    warned: list[str] = []
    url = f"http://127.0.0.1:{server.server_port}/hook"
    notify(url, {"event": "targets_missed", "job": "é"}, warned.append)
    assert got == [("application/json", {"event": "targets_missed", "job": "é"})]
    assert warned == []
    notify(url, {"event": "x"}, warned.append)
    assert "HTTPError" in warned[0]
    server.shutdown()
    notify("/nowhere/at/all.jsonl", {"event": "x"}, warned.append)
    assert "run.notify /nowhere/at/all.jsonl: FileNotFoundError" in warned[1]
    notify(None, {"event": "x"}, warned.append)
    assert len(warned) == 2


@pytest.mark.parametrize(("code", "expected"), [(4, 4), (0, 0)])
def test_a_scheduler_sees_missed_targets_by_the_exit_code(job, monkeypatch, code, expected):
    monkeypatch.setattr("pipeline.job.running.run.backend_of", lambda config: FAKES)
    job.config(targets={"max_row_p95": "0.0001 s"})
    job.rows(TEXTS)
    result = CliRunner().invoke(cli, ["run", str(job.folder / "job.yaml"), "--target-exit-code", str(code)])
    assert result.exit_code == expected, result.output
    assert ("Targets missed: max_row_p95" in result.stderr) is bool(code)
    assert "max_row_p95" in result.stdout


def test_a_hook_that_does_not_answer_delays_no_run():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, warned = f"http://127.0.0.1:{silent.getsockname()[1]}/", []
        notifier, began = Notifier(url, warned.append), time.monotonic()
        for number in range(30):
            notifier.put({"event": f"e{number}"})
        assert time.monotonic() - began < 1
        notifier.close()
        assert time.monotonic() - began < 8
    assert "too slow; an event was dropped: e29" in warned[-1]
