"""Pooling of a checkpoint, read from the files of sentence-transformers."""

import json

import fsspec
import pytest

from pipeline.checkpoints.cache import fetch_model
from pipeline.checkpoints.pooling import StoredPooling, read_pooling
from pipeline.errors import ModelError

LAST = {"word_embedding_dimension": 8, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def save(folder, kinds, pooling=LAST):
    modules = [
        {"idx": n, "path": "1_Pooling" if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_pooling_and_normalization_are_read(tmp_path):
    assert read_pooling(tmp_path) is None
    assert read_pooling(save(tmp_path, ["Transformer", "Pooling", "Normalize"])) == StoredPooling("last", True)
    mean = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    assert read_pooling(save(tmp_path, ["Transformer", "Pooling"], mean)) == StoredPooling("mean", False)


def test_pooling_of_a_model_in_a_store(tmp_path):
    folder = save(tmp_path, ["Transformer", "Pooling"])
    for name in ("config.json", "model.safetensors", "onnx/model.onnx", "original/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    fsspec.filesystem("memory").put(f"{folder}/", "/pooled/", recursive=True)
    for _ in range(2):  # downloaded, then found complete
        logged: list[str] = []
        here = fetch_model("memory://pooled", {}, tmp_path / "cache", logged.append)
        assert read_pooling(here) == StoredPooling("last", False)
        files = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
        assert files == [".manifest.json", "1_Pooling/config.json", "config.json", "model.safetensors", "modules.json"]
    assert logged == []


def test_unsupported_modules_are_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match="unsupported module 'Dense'"):
        read_pooling(save(tmp_path, ["Transformer", "Pooling", "Dense"]))
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    with pytest.raises(ModelError, match="pooling_mode_mean_tokens, pooling_mode_max_tokens is enabled"):
        read_pooling(save(tmp_path, ["Pooling"], both))


def test_a_link_out_of_the_model_is_refused(tmp_path):
    folder = save(tmp_path, ["Pooling"]) / "1_Pooling" / "config.json"
    folder.unlink()
    (tmp_path.parent / "elsewhere.json").write_text("{}")
    folder.symlink_to(tmp_path.parent / "elsewhere.json")
    with pytest.raises(ModelError, match="outside the model folder"):
        read_pooling(tmp_path)
