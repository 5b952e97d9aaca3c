"""The engine on the kernels for NVIDIA GPUs gives the reference's greedy tokens: here in Triton's interpreter, captured
steps included, whose replay is run by calling the captured function again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB, Family, make_family, quantize_randomly, write_checkpoint

pytest.importorskip("triton")

QWEN3 = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
WINDOWED = Family("mistral-window", "mistral", {"sliding_window": 21, "head_dim": 16})


def test_the_engine_on_gpu_kernels_gives_the_reference_tokens(tmp_path: Path) -> None:
    models = tmp_path / "models"
    make_family(models / "windowed", WINDOWED, seed=3)
    write_checkpoint(tmp_path / "plain", Family("qwen3", "qwen3"), QWEN3, seed=4)
    quantize_randomly(tmp_path / "plain", models / "int4", group_size=32, zero_point=True, seed=5)
    shutil.rmtree(models / "int4-dense")
    command = [sys.executable, "-m", "tests.engine.gpu_kernels", str(models)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.count("tokens equal three times") == 2
