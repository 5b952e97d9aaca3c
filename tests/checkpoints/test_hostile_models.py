"""Hostile model folders (false headers, links, code, huge values) load, or raise a ModelError with file and key."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoints.file_checks import MAX_JSON_BYTES
from pipeline.errors import ModelError
from pipeline.kernels.reference import reference_kernels
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder
from pipeline.model.load import checkpoint_files
from pipeline.tokenization.tokenizer import Tokenizer
from tests.model.test_load import CONFIG, edit_config, rewrite
from tests.model_folders import Family, write_checkpoint
from tests.parity.harness import float32_engine, greedy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("hostile") / "m", Family("llama", "llama"), CONFIG, seed=0)
    rewrite(folder, lambda tensors: None)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def load(folder: Path) -> Decoder:
    return Decoder(folder, read_config(folder), reference_kernels(torch.float32, CPU), torch.float32, CPU)


def read(folder: Path) -> None:
    """Read everything of a model: its weights and its tokenizer."""
    load(folder)
    Tokenizer.from_folder(str(folder))


class Bomb:
    """Object that writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_refused_and_never_opened(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    bomb = pickle.dumps(Bomb(marker))
    pickle.loads(bomb)
    assert marker.exists(), "the bomb works"
    marker.unlink()
    (folder / "pytorch_model.bin").write_bytes(bomb)
    load(folder)  # pickles next to safetensors are ignored
    (folder / "model.safetensors").write_bytes(bomb)
    with pytest.raises(ModelError, match="not a valid safetensors file"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="only pickle weights found"):
        load(folder)
    assert not marker.exists()


def test_code_of_a_model_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil", "config", "tokenizer", "torch", "numpy"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    maps = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_config(folder, auto_map=maps | {"AutoTokenizer": ["tokenization_evil.Evil", None]}, custom_pipelines={"x": {}})
    with float32_engine(folder, max_model_len=64) as engine:  # our own code serves its model type
        assert engine.generate([[1, 2]], greedy(2))[0].error is None
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    for auto_map in ({"AutoTokenizer": ["tokenization_evil.Evil"] * 2}, ["tokenization_evil.Evil"] * 2):
        evil = tokenizer | {"tokenizer_class": "Evil", "auto_map": auto_map}
        (folder / "tokenizer_config.json").write_text(json.dumps(evil))
        with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
            Tokenizer.from_folder(str(folder))
    edit_config(folder, model_type="evil", architectures=["Evil"])
    with pytest.raises(ModelError, match=r"config\.json: model_type = 'evil'"):
        read_config(folder)
    assert not marker.exists()


NAMES = ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", "", "a\0.safetensors", "\ud800"]


@pytest.mark.parametrize("name", [*NAMES, "..\\a.safetensors", "x" * 300 + ".safetensors", None, ["a.safetensors"]])
def test_the_index_names_files_of_the_folder(folder: Path, name: object) -> None:
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match=r"plain|cannot be read"):
        checkpoint_files(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_links_out_of_the_folder_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / name).rename(outside / name)

    for target in (outside / name, Path("../outside") / name):
        (folder / name).symlink_to(target)
        with pytest.raises(ModelError, match=f"{name}: links to .*outside"):
            read(folder)
        (folder / name).unlink()
    (folder / "deeper").mkdir()
    for target in ("/dev/zero", folder / "deeper", name):
        (folder / name).symlink_to(target)
        with pytest.raises(ModelError, match=name):
            read(folder)
        (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=name):
        read(folder)


def test_links_inside_the_folder_and_a_hugging_face_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "model.safetensors").rename(folder / "weights" / "w")
    (folder / "model.safetensors").symlink_to("weights/w")
    load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "weights" / "w").rename(folder / "model.safetensors")
    (folder / "weights").rmdir()
    snapshot, blobs = (tmp_path / "models--o--n" / name for name in ("snapshots/abc", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    load(snapshot)
    (tmp_path / "by-another-name").symlink_to(snapshot)
    Tokenizer.from_folder(str(tmp_path / "by-another-name"))
    load(tmp_path / "by-another-name")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../model/config.json")
    with pytest.raises(ModelError, match=r"config\.json: links to"):
        load(snapshot)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_header(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


NORM = "model.norm.weight"
FALSE_HEADERS: dict[str, dict[str, Any]] = {
    "overlap": {"data_offsets": [0, 64]}, "past the end": {"data_offsets": [1 << 40, (1 << 40) + 64]},
    "backwards": {"data_offsets": [64, 0]}, "negative offset": {"data_offsets": [-64, 0]},
    "negative shape": {"shape": [-16]}, "shape that overflows": {"shape": [1 << 62, 1 << 62]},
    "huge shape": {"shape": [1 << 40]}, "unknown type": {"dtype": "F128"},
    "other type of that size": {"dtype": "I32"}, "half a byte": {"dtype": "F4", "shape": [128]},
    "no type": {"dtype": None}, "text for a shape": {"shape": "16"}, "too few dimensions": {"shape": []},
    "more dimensions": {"shape": [4, 4]},
}  # fmt: skip


@pytest.mark.parametrize("change", FALSE_HEADERS)
def test_false_headers_are_refused(folder: Path, change: str) -> None:
    path = folder / "model.safetensors"
    header, data = header_of(path)
    header[NORM] |= FALSE_HEADERS[change]
    write_header(path, header, data)
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        load(folder)


@pytest.mark.parametrize("content", [
    b"",
    struct.pack("<Q", 1 << 60),
    struct.pack("<Q", (1 << 64) - 1) + b"{}",
    struct.pack("<Q", 99 << 20) + b"{",
    struct.pack("<Q", 8) + b"not json",
    struct.pack("<Q", 6000) + b"[" * 6000,
    struct.pack("<Q", 2) + b"{}" + b"bytes that no tensor owns",
    b"\x00" * 64,
])  # fmt: skip
def test_files_that_are_not_safetensors_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a valid safetensors file"):
        load(folder)


def test_a_name_that_two_files_hold_or_one_holds_twice_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    header, data = header_of(path)
    twice = f'{json.dumps(header)[:-1]}, "{NORM}": {json.dumps(header["lm_head.weight"])}}}'
    write_header(path, twice.encode(), data)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)
    write_header(path, header, data)
    save_file({NORM: torch.zeros(16)}, folder / "b.safetensors")
    index = {"weight_map": {"x": "model.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is also in"):
        load(folder)


def test_mutated_headers_load_or_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", raw[:8])[0]
    rng = np.random.default_rng(41)
    refused = 0
    for _ in range(200):
        mutated = bytearray(raw)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, header_end))
            some = range(256) if rng.random() < 0.5 else b'0123456789{}[],":-'
            mutated[at] = int(rng.choice(list(some)))
        path.write_bytes(bytes(mutated) if rng.random() < 0.9 else bytes(mutated[: int(rng.integers(0, len(raw)))]))
        try:
            load(folder)
        except ModelError:
            refused += 1
    assert refused > 150


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": -1}, "hidden_size = -1"),
    ({"hidden_size": 1 << 40}, "hidden_size"),
    ({"hidden_size": 16.0}, "hidden_size = 16.0"),
    ({"hidden_size": True}, "hidden_size = True"),
    ({"hidden_size": "16"}, "hidden_size"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads = 3.*divisor of hidden_size"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"intermediate_size": 10**12}, "intermediate_size"),
    ({"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
    ({"vocab_size": 10**10}, "vocab_size"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta = nan"),
    ({"rope_parameters": {"rope_theta": 1e-300}}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor = 0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}}, "original_max"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor = 4",
    ),
    ({"rope_parameters": ["default"]}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": {}}}, "rope scaling"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"model_type": None}, "model_type"),
    ({"dtype": {"a": 1}}, "dtype"),
    ({"hidden_act": []}, "hidden_act"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"quantization_config": {"quant_method": "awq", "bits": [4]}}, r"quantization_config\.bits"),
    ({"model_type": "x" * 10**6}, "model_type = 'xxx"),
]


@pytest.mark.parametrize(("values", "message"), HOSTILE)
def test_huge_negative_and_invalid_values_are_refused_by_name(folder: Path, values: dict, message: str) -> None:
    edit_config(folder, **values)
    with pytest.raises(ModelError, match=r"config\.json: ") as caught:
        read_config(folder)
    assert caught.match(message)
    assert len(str(caught.value)) < 1000


def test_values_that_do_not_belong_to_the_weights_name_the_tensor(folder: Path) -> None:
    for key, value, tensor in (
        ("vocab_size", 1 << 24, "embed_tokens"),
        ("hidden_size", 1 << 16, "embed_tokens"),
        ("num_hidden_layers", 4096, r"layers\.2\.self_attn"),
        ("num_attention_heads", 4, "q_proj"),
        ("intermediate_size", 1 << 20, "gate_proj"),
    ):
        before = (folder / "config.json").read_text()
        edit_config(folder, **{key: value, "head_dim": 8})
        with pytest.raises(ModelError, match=tensor):
            load(folder)
        (folder / "config.json").write_text(before)


def test_a_context_of_millions_allocates_only_used_memory(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=1 << 24)
    with float32_engine(folder, max_model_len=None, kv_cache_memory_bytes=1 << 20) as engine:
        assert engine.max_model_len == engine.pool.num_blocks * engine.pool.block_size < 10_000
        assert engine.runner.rotations.num_positions == engine.max_model_len  # type: ignore[attr-defined]
        assert engine.generate([[1, 2]], greedy(2))[0].error is None


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_bombs_of_depth_and_size_are_refused(folder: Path, name: str) -> None:
    sound = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
    digits = b'{"vocab_size": ' + b"9" * 100_000 + b"}"
    deep = [b'{"x": ' + b"[" * depth + b"]" * depth + b"}" for depth in (200_000, 5000)]
    for content in (*deep, digits, b"", b"[]", b"null", b"\xff\xfe", sound[:-3]):
        (folder / name).write_bytes(content)
        with pytest.raises(ModelError) as caught:
            read(folder)
        assert len(str(caught.value)) < 2000
    with open(folder / name, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match=f"{name}: 1073741824 bytes, expected at most"):
        read(folder)


def test_the_tokenizer_builds_nothing_from_the_sizes_of_a_config(folder: Path) -> None:
    edit_config(folder, model_type="qwen2", num_hidden_layers=10**9, max_window_layers=1, use_sliding_window=True)
    tokenizer = Tokenizer.from_folder(str(folder))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_mutated_configs_are_read_or_refused(folder: Path) -> None:
    rng = np.random.default_rng(42)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": None, "rope_scaling": None, "head_dim": 8}
    odd = [None, True, -1, 0, 1, 3, 2**31, 2**63, 10**400, 1e308, 1e-320, float("nan"), float("inf"), "", "x", [], [1],
           {}]  # fmt: skip
    odd += [{"rope_type": kind, "factor": f} for kind in ("yarn", "llama3", "linear") for f in (0, 1, 1e300, "x", None)]
    odd += [{"quant_method": "awq", "bits": 4, "group_size": g} for g in (128, 0, None, [])]
    refused = 0
    for _ in range(200):
        mutated = dict(values)
        for key in rng.choice(sorted(values), int(rng.integers(1, 4))):
            mutated[str(key)] = odd[int(rng.integers(len(odd)))]
        path.write_text(json.dumps(mutated))
        try:
            load(folder)
        except ModelError:
            refused += 1
    assert refused > 100


def test_the_sound_folder_is_loaded(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(load(folder).embedding.weight_NK, tensors["model.embed_tokens.weight"])
    assert (folder / "config.json").stat().st_size < MAX_JSON_BYTES
