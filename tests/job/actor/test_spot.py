"""Spot notices: the response of each cloud's metadata service, and a run that drains on a notice."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.errors import Interrupted
from pipeline.job.actor import spot
from pipeline.job.actor.spot import SpotNotice
from tests.job.conftest import TEXTS, run

pytestmark = pytest.mark.usefixtures("without_ray")

PREEMPT = b'{"Events": [{"EventType": "Preempt"}]}'
REBOOT = b'{"Events": [{"EventType": "Reboot"}]}'


class Metadata:
    """A machine's metadata service: answers by path, 404 for the rest or without the cloud's header."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.requested = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer(b"a token" if self.path == "/latest/api/token" else None)

            def do_GET(self) -> None:
                header = {"latest": "X-aws-ec2-metadata-token", "computeMetadata": "Metadata-Flavor"}
                wanted = header.get(self.path.split("/")[1], "Metadata")
                body = outer.answers.get(self.path) if self.headers.get(wanted) else None
                self._answer(body)
                outer.requested.set()

            def _answer(self, body: bytes | None) -> None:
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(spot, "POLL_S", 0.05)
    service = Metadata()
    yield service
    service.server.shutdown()
    service.server.server_close()


@pytest.mark.parametrize(
    ("cloud", "path", "nothing", "notice"),
    [
        ("aws", "/latest/meta-data/spot/instance-action", None, b'{"action": "terminate"}'),
        ("gcp", "/computeMetadata/v1/instance/preempted", b"FALSE", b"TRUE"),
        ("azure", "/metadata/scheduledevents?api-version=2020-07-01", REBOOT, PREEMPT),
    ],
)
def test_fault_51_a_notice_is_passed_on_once_when_it_arrives(metadata, cloud, path, nothing, notice):
    noticed = threading.Event()
    if nothing is not None:
        metadata.answers[path] = nothing
    watch = SpotNotice(cloud, noticed.set, pytest.fail, metadata.url)
    assert metadata.requested.wait(5.0) or cloud == "aws"
    assert not noticed.wait(0.3), "called before there was a notice"
    assert not watch.came
    metadata.answers[path] = notice
    assert noticed.wait(5.0)
    assert watch.came
    watch.close()


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_fault_51_without_a_service_there_is_no_notice_and_one_warning(cloud, monkeypatch):
    monkeypatch.setattr(spot, "POLL_S", 0.01)
    noticed, warned, warnings = threading.Event(), threading.Event(), []

    def warn(text):
        warnings.append(text)
        warned.set()

    watch = SpotNotice(cloud, noticed.set, warn, "http://127.0.0.1:9")
    assert warned.wait(10.0)
    assert not noticed.wait(0.3)
    watch.close()
    assert len(warnings) == 1
    assert f"run.spot_notice {cloud}: no metadata service responds" in warnings[0]


@pytest.mark.usefixtures("one_unit_in_flight")
def test_fault_51_a_spot_notice_drains_the_run_and_the_next_one_resumes(job, metadata, monkeypatch):
    job.rows(TEXTS).fake(step_s=0.05)
    monkeypatch.setattr(spot, "_AWS", metadata.url)

    def give_notice(status):
        if status.rows_done > 0:
            metadata.answers["/latest/meta-data/spot/instance-action"] = b"stop"
        return False

    with pytest.raises(Interrupted, match="spot notice"):
        run(job, [(give_notice, 0)], run={**job.settings["run"], "spot_notice": "aws"})
    run(job)
    job.check(TEXTS)
