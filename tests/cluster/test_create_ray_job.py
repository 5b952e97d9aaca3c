"""The pod of a CronJob creates a RayJob through Kubernetes' API, once."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

import certifi
import pytest

from pipeline.cluster.create_ray_job import create

RAY_JOB = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "night-1"}, "spec": {"entrypoint": "x"}}
CONFLICT = {"reason": "Conflict", "message": "the quota was modified"}


class Api(BaseHTTPRequestHandler):
    """Fake of Kubernetes' API for a create: 201, 409 for a name that exists, 403 without the token."""

    created: ClassVar[dict] = {}
    refusal: ClassVar[tuple[int, dict] | None] = None

    def do_POST(self):
        url, body = urlsplit(self.path), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert parse_qs(url.query) == {"fieldValidation": ["Strict"]}
        assert self.headers["Content-Type"] == "application/json"
        key = url.path, body["metadata"]["name"]
        if self.headers["Authorization"] != "Bearer the-token":
            code, answer = 403, {"reason": "Forbidden", "message": "no token"}
        elif self.refusal is not None:
            code, answer = self.refusal
        elif key in self.created:
            code, answer = 409, {"reason": "AlreadyExists"}
        else:
            code, answer = 201, body
            self.created[key] = body
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def api():
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        Api.created, Api.refusal = {}, None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def account(tmp_path):
    (tmp_path / "token").write_text("the-token\n")
    (tmp_path / "namespace").write_text("batch")
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    return tmp_path


def test_a_scheduled_run_creates_its_ray_job_once(api, account):
    assert create(RAY_JOB, api, account)
    assert not create(RAY_JOB, api, account)
    assert Api.created == {("/apis/ray.io/v1/namespaces/batch/rayjobs", "night-1"): RAY_JOB}
    assert create(RAY_JOB | {"metadata": {"name": "night-2"}}, api, account)


def test_a_refusal_of_kubernetes_fails_the_pod(api, account):
    for code, answer in [(400, {"message": "unknown field spec.ttl"}), (409, CONFLICT)]:
        Api.refusal = code, answer
        with pytest.raises(HTTPError, match=f"{code}.*{answer['message']}"):
            create(RAY_JOB, api, account)
    Api.refusal = None
    (account / "token").write_text("another")
    with pytest.raises(HTTPError, match=r"403.*no token"):
        create(RAY_JOB, api, account)
