"""Starting and joining Ray, its folder and its token; no effect at import or on the handlers of signals."""

import os
import subprocess
import sys
from datetime import datetime

import pytest
import ray
from ray._private.utils import validate_socket_filepath

from pipeline.errors import EnvironmentFailed
from pipeline.job.dataflow.ray_session import cluster_cpus, connect
from pipeline.machine.interpreter import child_environment
from pipeline.machine.ray_folder import ray_folder, ray_folder_problem


@pytest.mark.parametrize(
    ("nodes", "gpus", "cpus"),
    [
        ([{}, {"CPU": 8.0}, {"CPU": 6.0}], 0.0, 4.0),  # the head has none; it must fit on either of the others
        ([{"CPU": 66.0, "GPU": 8.0}, {"CPU": 16.0}], 1.0, 8.0),
        ([{"CPU": 14.0, "GPU": 1.0}], 0.5, 6.0),
        ([{"CPU": 2.0, "GPU": 8.0}], 1.0, 1.0),
        ([{}], 0.0, 1.0),
    ],
)
def test_an_actor_of_a_cluster_gets_its_share_of_a_node(monkeypatch, nodes, gpus, cpus):
    monkeypatch.setattr("pipeline.job.dataflow.ray_session.connect", lambda address: True)
    dead = {"Alive": False, "Resources": {"CPU": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [dead, *({"Alive": True, "Resources": node} for node in nodes)])
    assert cluster_cpus("auto", gpus, reserved=2) == cpus


def test_a_ray_that_does_not_start_is_retried_and_then_reported(monkeypatch):
    starts = []

    def init(**options):
        starts.append(options["address"])
        if len(starts) <= failures:
            raise Exception("The current node timed out during startup.")

    for name, stub in {"init": init, "shutdown": lambda: None, "is_initialized": lambda: False}.items():
        monkeypatch.setattr(ray, name, stub)
    failures = 2
    assert connect(None, 4)
    assert starts == ["local"] * 3
    starts.clear()
    failures = 3
    with pytest.raises(EnvironmentFailed, match=r"cannot be started on this machine: The current node timed out"):
        connect(None, 4)
    starts.clear()
    with pytest.raises(EnvironmentFailed, match=r"RAY_ADDRESS=10\.0\.0\.1:6379: the cluster cannot be joined"):
        connect("10.0.0.1:6379")
    assert starts == ["10.0.0.1:6379"]


def test_a_folder_that_ray_cannot_use_is_reported_before_it_starts(monkeypatch, tmp_path):
    """Ray itself would raise after its first seconds, and name no variable."""
    (tmp_path / "file").write_text("")
    longest = next(n for n in range(200) if not _fits(f"/{'x' * n}/ray")) - 1
    wrong = [f"/{'x' * (longest + 1)}", f"/{'ä' * (longest // 2 + 1)}", "/proc", str(tmp_path / "file"), "relative", ""]
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    for folder in wrong:
        for name in ("TMPDIR", "RAY_TMPDIR"):
            monkeypatch.delenv("RAY_TMPDIR", raising=False)
            monkeypatch.setenv(name, folder)
            with pytest.raises(EnvironmentFailed, match=r"Ray cannot keep its files in .* Set RAY_TMPDIR to a short"):
                connect(None, 4)
    assert ray_folder_problem(ray_folder({"RAY_TMPDIR": f"/{'x' * longest}", "TMPDIR": "/proc"})) == ""
    assert ray_folder_problem(ray_folder({})) == ""


def _fits(folder: str) -> bool:
    """Return True if Ray accepts a folder of this length with its longest name of a session."""
    session = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{(1 << 22) - 1}"
    try:
        validate_socket_filepath(f"{folder}/{session}/sockets/plasma_store")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("home", ["file", "relative", "writable"])
def test_a_token_for_a_home_that_takes_none(monkeypatch, tmp_path, home):
    (tmp_path / "file").write_text("")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that the test restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", home if home == "relative" else str(tmp_path / home))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    connect(None, 4)
    assert len(os.environ.get("RAY_AUTH_TOKEN", "")) == (0 if home == "writable" else 64)


def test_to_import_the_dataflow_changes_no_variable():
    code = "import os, ray.data; old = dict(os.environ); import pipeline.job.dataflow.graph; assert os.environ == old"
    environment = {name: value for name, value in child_environment().items() if not name.startswith("RAY_")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_ray_that_starts_and_ends_leaves_the_handlers_of_signals_alone_and_lets_them_through():
    """Ray's Python part replaces the handler of SIGTERM, and its native part the one below. Runs in a new process."""
    script = """
import os, signal, threading, time
from pipeline.job.dataflow import ray_session
class Stop(BaseException): pass
def handler(*_): raise Stop
for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, handler)
def receives(number):
    try:
        os.kill(os.getpid(), number)
        time.sleep(5)
    except Stop:
        return True
began = threading.Event()
init = ray_session.ray.init
ray_session.ray.init = lambda **options: (began.set(), init(**options))
def send():
    began.wait()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGHUP)
threading.Thread(target=send, daemon=True).start()
try:
    ray_session.connect(None, 4)
    print("started")
except Stop:
    print("stopped")
while not ray_session.ray.is_initialized(): time.sleep(0.1)
ray_session.restore_handlers()
print(receives(signal.SIGTERM))
print(ray_session.session_logs())
ray_session.disconnect()
print(receives(signal.SIGTERM))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, logs, third = done.stdout.split("\n")[:4]
    assert (first, second, third) == ("stopped", "True", "True")
    assert logs.endswith("/logs")
