"""All launches of an engine are compiled for a simulated card, and found in the cache the second time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EnvironmentFailed
from pipeline.kernels.select import keep_gpu_kernels_in

ROOT = Path(__file__).parents[3]
MODEL = "pipeline/demo/models/target"


def compiled_in(cache: Path) -> dict[str, Any]:
    unwanted = "TRITON_INTERPRET", "TRITON_CACHE_DIR"
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compile_ahead_process", MODEL, str(cache)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_kernels_are_compiled_once_and_kept(tmp_path: Path) -> None:
    first = compiled_in(tmp_path / "triton")
    total = first["after"]
    assert total >= 15
    assert first["messages"] == [f"compiling GPU kernels, {done} of {total}" for done in range(1, total + 1)]
    assert (first["before"], first["missed"]) == (0, total)
    second = compiled_in(tmp_path / "triton")
    assert (second["before"], second["after"], second["missed"]) == (total, total, 0)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailed, match=r"file/triton: cannot keep compiled GPU kernels .* set PIPELINE_CACHE"):
        keep_gpu_kernels_in(tmp_path / "file" / "triton")
