"""Checkpoints written by the libraries that own their formats: each weight is the one that the library itself
dequantizes, and the whole runs through the engine. `fixtures/make.py` made them and says with which versions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.model.config import read_config
from pipeline.weights.formats import read_format
from pipeline.weights.tensor_reader import StoredLinear
from tests.model_folders import Named, small_config, write_tokenizer
from tests.weights.test_model_folders import check

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.safetensors"))
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
CONFIG = small_config(64, 96, 1, 4, 2, model_type="llama", tie_word_embeddings=False, dtype="float32")


def read(file: Path) -> tuple[Named, dict[str, torch.Tensor], dict[str, Any]]:
    """The checkpoint's tensors, the weights as the library dequantizes them, the quantization_config."""
    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    shown = {name.removesuffix(".dequantized"): t for name, t in tensors.items() if name.endswith(".dequantized")}
    return Named({name: t for name, t in tensors.items() if not name.endswith(".dequantized")}), shown, config


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_weights_are_those_that_the_library_dequantizes(file: Path) -> None:
    tensors, shown, config = read(file)
    form = read_format(config, file)
    assert len(shown) == 2
    for name, expected in shown.items():
        shape = SHAPES[name.removeprefix("model.layers.0.")]
        weight = form.read_linear(StoredLinear(name, shape, tensors))
        ours = weight.dequantize(torch.float32)
        assert ours.shape == expected.shape
        if expected.dtype == torch.float16:  # that of the scales: both round the same product once
            assert torch.equal(ours.to(torch.float16), expected)
        else:  # GPTQModel rounds the scales to bfloat16 before
            assert bool(((ours - expected.float()).abs() <= 2**-7 * ours.abs()).all())
        assert float(ours.abs().max()) > 0.1


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.stem)
def test_the_whole_runs_through_the_engine(file: Path, tmp_path: Path) -> None:
    tensors, _, config = read(file)
    form = read_format(config, file)
    random = torch.Generator().manual_seed(5)
    rest = {
        "model.embed_tokens.weight": torch.randn(320, 64, generator=random) * 0.2,
        "lm_head.weight": torch.randn(320, 64, generator=random) * 0.2,
        "model.norm.weight": torch.rand(64, generator=random) + 0.5,
        "model.layers.0.input_layernorm.weight": torch.rand(64, generator=random) + 0.5,
        "model.layers.0.post_attention_layernorm.weight": torch.rand(64, generator=random) + 0.5,
    }
    dense = {
        f"model.layers.0.{name}.weight": form.read_linear(
            StoredLinear(f"model.layers.0.{name}", shape, tensors)
        ).dequantize(torch.float32)
        for name, shape in SHAPES.items()
    }
    places = tmp_path / "quantized", tmp_path / "dense"
    for place, content, extra in zip(places, (tensors, dense), ({"quantization_config": config}, {})):
        place.mkdir()
        save_file({**rest, **content}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(CONFIG | extra))
        write_tokenizer(place)
    widened = "; 1 fused linears of several formats dequantized" if "mixed" in file.stem else ""
    stored = read_config(places[0]).quantization
    assert stored is not None
    rounded = ", activations not in 8 bits" if stored.has_activations else ""
    check(*places, f"{stored}{rounded}{widened}")


def test_the_fixtures_are_all_there_and_one_was_quantized_in_another_order() -> None:
    assert len(FIXTURES) == 11
    orders = {}
    for file in FIXTURES:
        tensors, _, _ = read(file)
        group = tensors.get("model.layers.0.mlp.down_proj.g_idx")
        if group is not None:
            orders[file.stem] = not np.array_equal(group.numpy(), np.sort(group.numpy()))
    assert orders["gptq-int4-order"]
    assert orders["gptq-v2-int4-asymmetric"]
    assert not orders["gptq-int8"]
