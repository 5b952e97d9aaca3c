"""Events that are sent to `run.notify`."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.errors import LimitReached
from pipeline.job.running.notify import Notifier, notify
from tests.job.conftest import TEXTS, run

pytestmark = pytest.mark.usefixtures("without_ray")


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    notify(url, {"event": "quality_drop", "job": "é"}, warned.append)
    assert got == [("application/json", {"event": "quality_drop", "job": "é"})]
    assert warned == []
    notify(url, {"event": "x"}, warned.append)
    assert "HTTPError" in warned[0]
    server.shutdown()
    notify("/nowhere/at/all.jsonl", {"event": "x"}, warned.append)
    assert "run.notify /nowhere/at/all.jsonl: FileNotFoundError" in warned[1]
    notify(None, {"event": "x"}, warned.append)
    assert len(warned) == 2


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
