"""The memory table of the doctor, against figures worked out by hand."""

import json
from dataclasses import replace

import pytest
import torch

from pipeline.demo import demo_model
from pipeline.doctor import Subject, fit, memory_of
from pipeline.hardware import load_cards

# The demonstration model: 4 layers of 2 key-value heads of 64, 2,623,744 parameters of which 2,304 are norms.
NUM_WEIGHTS = 2_621_440
NUM_LINEAR = NUM_WEIGHTS - 1024 * 256  # without the embeddings, which are tied
KV_BFLOAT16 = 2 * 4 * 2 * 64 * 2


def test_cards_have_room_for_what_is_left_of_their_memory():
    table = memory_of(Subject(model="demo:target"))
    assert table is not None
    assert table.lengths == (512, 1024), "no longer than the model's context"
    assert [place.name for place in table.places[1:]] == [card.name for card in load_cards()]
    l4 = table.places[-2]
    assert (l4.name, l4.dtype, l4.memory_bytes, l4.weight_bytes) == ("L4", "bfloat16", 24 * 10**9, 2 * NUM_WEIGHTS)
    assert l4.kv_bytes_per_token == KV_BFLOAT16
    blocks = (21_600_000_000 - 2 * 2**30 - 2**29 - 2 * NUM_WEIGHTS) // (64 * KV_BFLOAT16)
    assert l4.sequences == (blocks // 8, blocks // 16)
    assert l4.sequences == (18_034, 9_017)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_this_machine_is_what_is_free_here(monkeypatch, dtype):
    monkeypatch.setattr(fit, "free_cpu_bytes", lambda: 1_000_000_000)
    table = memory_of(Subject(model="demo:target", device="cpu", dtype=dtype))
    assert table is not None
    here, width = table.places[0], 4 if dtype == "float32" else 2
    embeddings = 2 * 2 * 1024 * 256  # a table and a linear, each in the 16 bit that they are stored in
    assert here.weight_bytes == 2 * NUM_LINEAR + embeddings
    kv = KV_BFLOAT16 // 2 * width
    blocks = int((1_000_000_000 - here.weight_bytes) * 0.25) // (16 * kv)
    assert here.sequences == (blocks // 32, blocks // 64)


def test_a_cache_in_8_bits_holds_more(monkeypatch):
    monkeypatch.setattr(fit, "free_cpu_bytes", lambda: 1_000_000_000)
    wide, narrow = (
        memory_of(Subject(model="demo:target", device="cpu", kv_cache_dtype=kind)) for kind in ("auto", "fp8")
    )
    assert wide is not None
    assert narrow is not None
    assert (narrow.places[0].kv_dtype, narrow.places[-1].kv_dtype) == ("float8_e4m3fn", "float8_e4m3fn")
    assert {place.kv_bytes_per_token for place in narrow.places} == {2 * 4 * 2 * (64 + 4)}
    blocks = int((1_000_000_000 - narrow.places[0].weight_bytes) * 0.25) // (16 * 2 * 4 * 2 * (64 + 4))
    assert narrow.places[0].sequences == (blocks // 32, blocks // 64)
    assert narrow.places[-1].sequences[0] > 1.8 * wide.places[-1].sequences[0]


def test_a_model_that_does_not_fit_leaves_no_room(monkeypatch):
    monkeypatch.setattr(fit, "free_cpu_bytes", lambda: 1_000_000)
    small = replace(load_cards()[0], memory_bytes=2 * 2**30)
    monkeypatch.setattr(fit, "load_cards", lambda: (small,))
    table = memory_of(Subject(model="demo:target", device="cpu"))
    assert table is not None
    assert [place.sequences for place in table.places] == [(0, 0), (0, 0)]


def test_files_by_format_are_what_such_checkpoints_have():
    table = memory_of(Subject(model="demo:target-awq"))
    assert table is not None
    files = table.checkpoint_bytes
    for form, folder in (("16 bit", "target"), ("4 bit, groups of 128", "target-awq")):
        stored = (demo_model(folder) / "model.safetensors").stat().st_size
        assert files[form] == pytest.approx(stored, rel=0.02)
    assert files["8 bit"] == NUM_LINEAR + NUM_LINEAR // 128 + 2 * 1024 * 256


def test_the_command_shows_it_and_has_it_in_json(pipe, tmp_path):
    code, out, _ = pipe("doctor", "--model", "demo:target")
    assert code == 0
    assert "memory of the model" in out
    assert "RTX 4090" in out
    code, out, _ = pipe("doctor", "--model", "demo:target", "--json")
    told = json.loads(out)["memory"]
    assert [place["name"] for place in told["places"]][1] == "H200"
    assert told["places"][1]["sequences"] == [118_456, 59_228]
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    code, out, _ = pipe("doctor", "--model", str(tmp_path), "--json")
    assert (code, json.loads(out)["memory"]) == (2, None)
    assert json.loads(pipe("doctor", "--json")[1])["memory"] is None


def test_a_device_here_is_asked_for_its_own_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (5, 24_000_000_000))
    table = memory_of(Subject(model="demo:target"))
    assert table is not None
    assert table.places[0].sequences == (18_034, 9_017)
