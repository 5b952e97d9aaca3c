"""One section of the GPU session: `python -m pipeline.bench.gpu.sections TASK`, as `session/processes.py` starts it."""

import importlib
import sys

from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.task import Task
from pipeline.errors import PipelineError


def main() -> int:
    """The exit code: that of a PipelineError where something failed."""
    task, setting = Task.from_command_line(sys.argv[1])
    result = Result(task, setting)
    result.write()
    section = importlib.import_module(f"pipeline.bench.gpu.sections.{task.section}")
    with result.part(task.name):
        section.run(result, **task.options)
    return PipelineError.exit_code if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
