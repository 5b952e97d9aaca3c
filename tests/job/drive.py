"""A driver in its own process for a job of fakes, for tests that kill it.

Run it as `python -m tests.job.drive JOB.yaml [--append]`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.config import load_job
from pipeline.errors import PipelineError
from pipeline.job.running.run import run_job
from tests.job.conftest import FAKES

ROOT = Path(__file__).parents[2]


def drive_and_kill(job_file: Path, parts: Callable[[], list]) -> None:
    """Start a driver and kill it once two parts are written."""
    command = [sys.executable, "-m", "tests.job.drive", str(job_file)]
    driver = subprocess.Popen(command, cwd=ROOT, env=os.environ, start_new_session=True)
    while len(parts()) < 2:
        assert driver.poll() is None
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()


if __name__ == "__main__":
    try:
        run_job(load_job(sys.argv[1]), backend=FAKES, append="--append" in sys.argv)
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
