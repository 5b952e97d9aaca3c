"""A run that is paused in the middle, another that does the rest, and the first one resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.job.conftest import TEXTS, run, runs

pytestmark = pytest.mark.usefixtures("without_ray")

ROOT = Path(__file__).parents[3]


def test_a_run_that_resumes_late_changes_nothing(job):
    job.rows(TEXTS).fake(step_s=0.1)
    job.settings["run"] |= {"window_rows": 100}  # one window, so without Ray
    job.config()
    late = subprocess.Popen([sys.executable, "-m", "tests.job.drive", str(job.folder / "job.yaml")], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not job.parts():  # it has written something, and is in the middle of the rest
        assert time.monotonic() < deadline
        assert late.poll() is None
        time.sleep(0.02)
    family = [late.pid, *(child.pid for child in psutil.Process(late.pid).children(recursive=True))]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    existing = {part.name for part in job.parts()}
    try:
        run(job)
        job.check(TEXTS)
        assert len(job.parts()) > len(existing), "the first run left nothing to do"
        before = {part.name: (part.stat().st_ino, part.read_bytes()) for part in job.parts()}
    finally:
        for pid in family:
            os.kill(pid, signal.SIGCONT)
    assert late.wait(timeout=60) == 0, "it finds everything done"
    assert {part.name: (part.stat().st_ino, part.read_bytes()) for part in job.parts()} == before
    job.check(TEXTS)
    first = runs(job)[0]
    assert first["duplicate_units"] + first["units_already_written"] > 0, "its wasted work is recorded"
