"""One section of the GPU session on its own, as compute-sanitizer and ncu start it:
`python -m pipeline.bench.gpu.sections TASK`."""

import sys

from pipeline.bench.gpu.sections.process import run_task
from pipeline.bench.gpu.task import Task

if __name__ == "__main__":
    sys.exit(run_task(*Task.from_command_line(sys.argv[1])))
