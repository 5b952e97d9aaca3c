"""A driver of its own process over a job of fakes, for tests that kill it: `python -m tests.job.drive
JOB.yaml [--append]`."""

import sys

from pipeline.config import load_job
from pipeline.errors import PipelineError
from pipeline.job.running.run import run_job
from tests.job.conftest import FAKES

if __name__ == "__main__":
    try:
        run_job(load_job(sys.argv[1]), backend=FAKES, append="--append" in sys.argv)
    except PipelineError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
