"""Random checkpoints: transformers and the engine read the same files, and AWQ has a dense twin."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks import shapes
from benchmarks.shapes import bench_model, dequantized, model_size
from pipeline.errors import ConfigError
from pipeline.model.config import read_config
from pipeline.model.load import WeightReader
from pipeline.tokenization.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["tiny", "tiny-awq"])
def test_every_tensor_is_used_and_the_tokenizer_has_the_vocabulary(tmp_path, name):
    model = bench_model(name, str(tmp_path))
    config = read_config(model.folder)
    assert (config.quantization is not None) == name.endswith("awq")
    assert "random weights" in model.description
    assert model_size(name) == (config.size, config.weights_on_card())
    reader = WeightReader(model.folder, config)
    reader.embedding()
    assert len(list(reader.layers())) == config.num_layers
    reader.final_norm()
    reader.lm_head()
    reader.finish()
    tokenizer = Tokenizer.from_folder(str(model.folder))
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.decode([1024, 2047]) == " 01024 02047"


def test_a_shape_is_written_once_and_is_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SHARD_BYTES", 1 << 20)
    logged = []
    first = bench_model("tiny", str(tmp_path / "a"), logged.append)
    assert bench_model("tiny", str(tmp_path / "a"), logged.append) == first
    assert len(logged) == 1
    second = bench_model("tiny", str(tmp_path / "b"))
    shards = sorted(file.name for file in first.folder.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        one, other = load_file(first.folder / shard), load_file(second.folder / shard)
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.folder.name]


def test_the_dense_twin_of_an_awq_shape_holds_what_the_engine_dequantizes(tmp_path):
    folder = bench_model("tiny-awq", str(tmp_path)).folder
    dense = dequantized(folder, torch.float32)
    assert dequantized(folder, torch.float32) == dense
    packed, plain = (list(WeightReader(f, read_config(f)).layers()) for f in (folder, dense))
    for ours, theirs in zip(packed, plain):
        assert torch.equal(ours.qkv.dequantize(torch.float32), theirs.qkv.weight_NK)
        assert torch.equal(ours.down.dequantize(torch.float32), theirs.down.weight_NK)
        inputs = theirs.down.weight_NK.shape[1]
        assert 0.8 < theirs.down.weight_NK.std() * inputs**0.5 < 1.3
    with pytest.raises(ConfigError, match="not an AWQ"):
        dequantized(dense, torch.float32)
    assert "quantization_config" not in json.loads((dense / "config.json").read_text())
    assert next(AutoModelForCausalLM.from_pretrained(dense).parameters()).dtype == torch.float32
