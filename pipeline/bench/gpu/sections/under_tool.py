"""A kernel under compute-sanitizer or ncu, where they are installed."""

import shutil
import subprocess
import sys

from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.task import Task

TOOLS = {
    "compute-sanitizer": ["--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "20"],
    "ncu": ["--set", "full", "--profile-from-start", "off", "--clock-control", "none", "--launch-count", "12"],
}
LINES = 400  # the last lines of a tool's output that are kept


def run(result: Result, tool: str, model: str, kernel: str) -> None:
    """Raises AssertionError where the tool found something, or the kernel could not be run under it."""
    if shutil.which(tool) is None:
        result.keep(f"{tool} is not installed")
        return
    alone = Task(f"{result.task.name}-alone", "kernel_alone", 0.0, {"model": model, "kernel": kernel})
    module = [sys.executable, "-m", "pipeline.bench.gpu.sections", alone.command_line(result.setting)]
    ran = subprocess.run([tool, *TOOLS[tool], *module], capture_output=True, text=True, check=False)
    lines = (ran.stdout + ran.stderr).strip().splitlines()
    result.keep("\n".join([f"{tool}, {kernel}: exit code {ran.returncode}", *lines[-LINES:]]))
    if ran.returncode:
        raise AssertionError(f"{tool} ended with exit code {ran.returncode} on {kernel}; its output is above")
