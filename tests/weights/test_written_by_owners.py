"""Checkpoints written by the libraries that own their formats load whole, and each weight is the one that the library
itself dequantizes. `fixtures/make.py` made them and lists the versions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.weights.formats import read_format
from pipeline.weights.tensor_reader import StoredLinear
from tests.model.test_load import load
from tests.model_folders import Named, small_config

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.safetensors"))
SHAPES = {"model.layers.0.self_attn.k_proj": (32, 64), "model.layers.0.mlp.down_proj": (64, 96)}
CONFIG = small_config(64, 96, 1, 4, 2, model_type="llama", tie_word_embeddings=False, dtype="float32")


def read(file: Path) -> tuple[Named, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the checkpoint's tensors, the weights as the library dequantizes them, the quantization_config."""
    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    shown = {name.removesuffix(".dequantized"): t for name, t in tensors.items() if name.endswith(".dequantized")}
    return Named({name: t for name, t in tensors.items() if not name.endswith(".dequantized")}), shown, config


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_weights_are_those_that_the_library_dequantizes(file: Path, tmp_path: Path) -> None:
    tensors, shown, config = read(file)
    norms = ("model.norm", *(f"model.layers.0.{kind}_layernorm" for kind in ("input", "post_attention")))
    rest = {f"{name}.weight": torch.ones(64) for name in norms}
    rest |= {f"{name}.weight": torch.zeros(320, 64) for name in ("lm_head", "model.embed_tokens")}
    save_file({**tensors, **rest}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
    load(tmp_path)  # nothing is missing or left over
    form = read_format(config, file)
    assert set(shown) == set(SHAPES)
    for name, expected in shown.items():
        ours = form.read_linear(StoredLinear(name, SHAPES[name], tensors)).dequantize(torch.float32)
        assert ours.shape == expected.shape
        if expected.dtype == torch.float16:  # that of the scales: both round the same product once
            assert torch.equal(ours.to(torch.float16), expected)
        else:  # GPTQModel rounds the scales to bfloat16 before, compressed-tensors the weights of FP4
            assert bool(((ours - expected.float()).abs() <= 2**-7 * ours.abs()).all())
        assert float(ours.abs().max()) > 0.1
