"""The engine on the kernels for NVIDIA GPUs gives the reference's greedy tokens: here in Triton's interpreter, captured
steps included, whose replay is run by calling the captured function again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB, Family, quantize_randomly, write_checkpoint

pytest.importorskip("triton")

QWEN2 = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_sliding_window": True,
    "sliding_window": 21,
    "max_window_layers": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


def test_the_engine_on_gpu_kernels_gives_the_reference_tokens(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", Family("qwen2", "qwen2"), QWEN2, seed=4)
    model = quantize_randomly(tmp_path / "plain", tmp_path / "int4", group_size=64, zero_point=True, seed=5)
    command = [sys.executable, "-m", "tests.engine.gpu_kernels", str(model)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "tokens equal" in ended.stdout
