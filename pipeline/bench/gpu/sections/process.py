"""A task's work in its own process: its section runs, and what failed is in its result."""

import importlib

from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.task import Setting, Task
from pipeline.errors import PipelineError


def run_task(task: Task, setting: Setting) -> int:
    """The exit code: that of a PipelineError where something failed."""
    result = Result(task, setting)
    result.write()
    with result.part(task.name):
        section = importlib.import_module(f"pipeline.bench.gpu.sections.{task.section}")
        section.run(result, **task.options)
    return PipelineError.exit_code if result.failures else 0
