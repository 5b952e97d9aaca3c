"""Checkpoints of several test files."""

from pathlib import Path

import pytest

from tests.engine.test_gpu_kernels import QWEN3
from tests.model_folders import Family, write_checkpoint
from tests.weights.packers import quantize_randomly


@pytest.fixture(scope="session")
def int4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint with 4-bit weights, norms on queries and keys, and a window on the second layer; next to it,
    "plain", the same in float32."""
    path = tmp_path_factory.mktemp("int4")
    write_checkpoint(path / "plain", Family("qwen3", "qwen3"), QWEN3, seed=4)
    return quantize_randomly(path / "plain", path / "int4", group_size=64, zero_point=True, seed=5)
