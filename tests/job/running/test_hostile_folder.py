"""A job in a folder whose modules have the names of Python's, the libraries' and the pipeline's modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.machine import interpreter
from pipeline.machine.interpreter import child_environment
from tests.job.conftest import Job

ROOT = Path(__file__).parents[3]
TEXTS: list[str | None] = [f"text {i}" for i in range(20)]


@pytest.fixture
def job(tmp_path) -> Job:
    for name in ("random.py", "types.py", "numpy.py", "torch.py", "jinja2.py", "ray.py", "pipeline/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise ImportError('{name} of the working directory')")
    return Job(tmp_path).rows(TEXTS)


def test_the_console_script_runs_a_chat_job_among_them(job):
    job.config(model={"path": "demo:target"}, prompt={"chat": True}, run={"max_error_rate": 0})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [Path(sys.executable).with_name("pipeline"), "run", "job.yaml"]
    done = subprocess.run(command, cwd=job.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert job.table()["id"].to_pylist() == list(range(len(TEXTS)))


def test_a_child_gets_the_modules_of_this_process_without_the_working_directory(monkeypatch, tmp_path):
    def given() -> list[str]:
        return child_environment()["PYTHONPATH"].split(os.pathsep)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *sys.path])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert given() == [path for path in sys.path[2:] if path]
    assert child_environment(A="1") == {**os.environ, "PYTHONPATH": ":".join(given()), "PYTHONSAFEPATH": "1", "A": "1"}
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "link"))
    assert given()[0] == str(tmp_path), "an explicit entry is kept"
    monkeypatch.setenv("PYTHONPATH", f":{ROOT}")
    assert str(tmp_path) not in given(), "an empty entry is dropped"
    monkeypatch.setattr(interpreter, "PACKAGE_PARENT", str(tmp_path))
    assert given()[0] == str(tmp_path), "the package's own folder is kept"
    monkeypatch.setattr(sys, "path", ["/usr/lib/python"])
    assert given() == ["/usr/lib/python", str(tmp_path)]
