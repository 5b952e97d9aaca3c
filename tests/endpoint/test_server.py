"""Servers that a run starts: their progress, their end, and what their output shows."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.endpoint import engine as module
from pipeline.endpoint.engine import EndpointEngine
from pipeline.endpoint.server import Server, command_of, free_port
from pipeline.endpoint.spec import EndpointConfig
from pipeline.errors import EnvironmentFailed
from tests.endpoint import fake_server
from tests.endpoint.test_engine import assert_right, request, steps

FAKE = (sys.executable, "-m", fake_server.__name__, "--model", "{model}")
PARENT = """
import sys, time
from pipeline.endpoint.server import Server
server = Server(["sh", "-c", "sleep 300 & sleep 300"], 1, frozenset())
print(server._process.pid, flush=True)
time.sleep(300)
"""


def group_is_running(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, found = stat.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


def wait_for_the_end(group: int) -> None:
    deadline_s = time.monotonic() + 20
    while group_is_running(group):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_slow_start_shows_the_servers_log_and_closing_ends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PROBE_S", 0.1)
    logs: list[str] = []
    serve = (*FAKE, "--behaviour", json.dumps({"start_s": 0.6}))
    engine = EndpointEngine(EndpointConfig(serve=serve, requested_model="my-model"), logs.append)
    try:
        assert engine.resolved["model"] == "my-model"
        assert any(line.startswith("Loading my-model: ") for line in logs)
        engine.add(request(1, is_chat=True))
        assert_right(steps(engine))
        assert engine._server is not None
        group = engine._server._process.pid
        assert group_is_running(group)
    finally:
        engine.close()
    wait_for_the_end(group)


def test_a_server_that_ends_fails_with_its_last_lines():
    config = EndpointConfig(serve=(*FAKE, "--no-such-flag"), requested_model="m")
    with pytest.raises(EnvironmentFailed, match=r"(?s)ended while starting.*arguments: --no-such-flag.*exit code 2"):
        EndpointEngine(config, lambda text: None)
    with pytest.raises(EnvironmentFailed, match="no-such-program: cannot be started"):
        EndpointEngine(EndpointConfig(serve=("no-such-program",)), lambda text: None)


def test_the_group_ends_with_a_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    assert group_is_running(group)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_for_the_end(group)


def test_output_and_environment_hold_no_secrets(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    server = Server(["sh", "-c", "echo key sk-secret; echo path=$PYTHONPATH."], 1, frozenset({"sk-secret"}))
    wait_for_the_end(server._process.pid)
    server.close()
    assert server.tail().splitlines() == ["key ***", "path=.", "the server ended: exit code 0"]
    output = capfd.readouterr().out
    assert "server: key ***" in output
    assert "sk-secret" not in output


def test_commands_are_filled_in():
    assert command_of(["s", "{model}"], "m", 7) == ["s", "m", "--host", "127.0.0.1", "--port", "7"]
    assert command_of(["s", "-p={port}", "{host}"], None, 7) == ["s", "-p=7", "127.0.0.1"]
    assert free_port() > 0
