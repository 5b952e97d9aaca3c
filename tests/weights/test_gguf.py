"""GGUF files as checkpoints: tokens and logits are those of the dequantized weights in transformers."""

import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch

from pipeline.checkpoints.digest import model_digest
from pipeline.checkpoints.locate import checkpoint_problem, locate_model, model_kind
from pipeline.engine.startup.memory import weight_bytes
from pipeline.errors import ModelError
from pipeline.model.config import read_config
from pipeline.model.decoder import StackedLinears
from pipeline.weights.gguf import BLOCK_TYPES
from pipeline.weights.packed import GroupIntWeight
from tests.model_folders import FAMILIES, VOCAB, Family, load_reference, small_config, write_checkpoint
from tests.parity.harness import (
    LOGIT_TOLERANCE,
    Agreement,
    compare_greedy,
    float32_engine,
    greedy,
    greedy_reference,
    our_logits,
    reference_logits,
)
from tests.weights.gguf_files import packed, write_pair

NAMES = ("llama2", "llama3", "llama-linear-bias-tied", "qwen2-tied", "qwen2-yarn", "qwen3", "gemma2", "gemma3", "phi3",
         "phi3-long-partial", "starcoder2", "qwen3-moe", "qwen2-moe")  # fmt: skip
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q6_K"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def q4_k_m(name: str) -> str:
    """Types as in files of the name Q4_K_M."""
    return MIXED.get(name.split(".")[-1], "Q4_K")


def family(name: str) -> Family:
    return next(each for each in FAMILIES if each.name == name)


def make(
    folder: Path, name: str, kind_of=q4_k_m, num_files: int = 1, split: str = "gpt-2", **shape: int
) -> tuple[Path, Path]:
    """Return a GGUF file and its dense twin. Rows are of 256 inputs, as blocks of K types need."""
    chosen = family(name)
    options = {key: value for key, value in chosen.options.items() if key != "query_pre_attn_scalar"}
    config = small_config(256, 256, 2, 4, 2, initializer_range=0.1, rms_norm_eps=1e-5) | options | shape
    if "head_dim" in config:
        config["head_dim"] = 64
    if "moe_intermediate_size" in config:
        config |= {"use_sliding_window": False, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    if "short_factor" in config.get("rope_parameters", {}):
        rope = config["rope_parameters"]
        config["rope_parameters"] = rope | {key: rope[key] * 4 for key in ("short_factor", "long_factor")}
    if chosen.model_type.startswith("gemma"):
        config |= {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 19, "num_hidden_layers": 7}
        config.pop("sliding_window_pattern", None)
    plain = write_checkpoint(folder / "plain", chosen, config, seed=3)
    file = folder / "model.gguf"
    write_pair(plain, file, folder / "dense", kind_of, num_files=num_files, split=split)
    return file, folder / "dense"


def check(file: Path, dense: Path, **options: object) -> str:
    """Compare logits and greedy tokens; return the description of the weights."""
    model, rng = load_reference(dense), np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (5, 31)]
    seen = Agreement()
    with float32_engine(file, **options) as engine:
        for prompt in prompts:
            expected = reference_logits(model, prompt)
            difference = (our_logits(engine, prompt) - expected).abs().max()
            # sums of 256 inputs, not of some 64 as elsewhere
            assert float(difference) < 2 * LOGIT_TOLERANCE * max(1.0, float(expected.abs().max()) / 10)
        for prompt, ours in zip(prompts, engine.generate(prompts, greedy(16))):
            compare_greedy(model, prompt, ours.token_ids, greedy_reference(model, prompt, 16, ours.token_ids), seen)
        assert seen.near_ties == 0
        return engine.resolved["weights"]


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_of_each_type_have_the_values_of_the_gguf_package(kind: str) -> None:
    rng, block = np.random.default_rng(0), BLOCK_TYPES[kind]
    raw, expected = packed(rng.normal(0, 0.1, (24, 512)).astype(np.float32), kind, rng)
    q_MGg, scale_MG, zero_MG = block.unpack(torch.from_numpy(raw).reshape(-1, block.num_bytes))
    assert q_MGg.shape[-1] == block.group_size
    assert int(q_MGg.max()) < 1 << block.bits
    weight = GroupIntWeight(q_MGg.reshape(24, 512), scale_MG.view(24, -1), zero_MG.view(24, -1), block.group_size)
    found = weight.dequantize(torch.float32)
    assert torch.allclose(found, torch.from_numpy(expected), rtol=1e-6, atol=1e-6 * float(np.abs(expected).max()))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    """Each architecture, with the types of Q4_K_M."""
    assert "Q4_K, Q6_K" in check(*make(tmp_path, name))


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F16", "BF16"])
def test_each_type(kind: str, tmp_path: Path) -> None:
    weights = check(*make(tmp_path, "llama2", lambda name: kind, num_hidden_layers=1))
    assert weights == (f"GGUF {kind}, embedding {kind}" if kind in BLOCK_TYPES else "dense")


def test_a_split_checkpoint_is_read_by_the_name_of_any_of_its_files(tmp_path: Path) -> None:
    file, dense = make(tmp_path, "llama2", num_files=2)
    files = sorted(tmp_path.glob("model-*.gguf"))
    assert len(files) > 1
    assert not file.exists()
    folder = locate_model(str(files[-1]))
    assert locate_model(str(files[0])) == folder
    assert {path.name for path in files} <= set(model_digest(folder))
    check(files[0], dense)
    files[1].unlink()
    with pytest.raises(ModelError, match=re.escape(f"{files[1].name}: no such file")):
        locate_model(str(files[0]))


def test_a_folder_with_one_gguf_file_is_that_file_and_with_several_it_must_be_named(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama2", num_hidden_layers=1)
    folder = tmp_path / "downloaded"
    folder.mkdir()
    shutil.copy(file, folder / "small-Q4_K_M.gguf")
    (folder / "config.json").write_text("{}")  # of the original model, as some publishers add it
    assert checkpoint_problem(str(folder)) == ""
    assert locate_model(str(folder)) == locate_model(str(folder / "small-Q4_K_M.gguf"))
    (folder / "config.json").unlink()
    shutil.copy(file, folder / "small-Q8_0.gguf")
    assert checkpoint_problem(str(folder)) == f"has several GGUF files; name one of them: {folder}/small-Q4_K_M.gguf"
    assert model_kind(str(folder / "small-Q8_0.gguf")) == "folder"
    assert model_kind("owner/name/small-Q8_0.gguf") == "id"
    assert model_kind("s3://models/small-Q8_0.gguf") == "url"
    assert model_kind("nowhere/small-Q8_0.gguf") == "missing"


def test_a_replaced_file_is_another_model(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama2", num_hidden_layers=1)
    before = locate_model(str(file))
    assert locate_model(str(file)) == before
    digest = model_digest(before)
    moved = file.rename(tmp_path / "elsewhere.gguf").rename(file)
    assert model_digest(locate_model(str(moved))) == digest
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert model_digest(locate_model(str(file))) != digest


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["it", "'s", "ĠfooBar", "Ġ", "Ġ12345", "!", "ĊĊĠ", "Ġx"]),
        ("starcoder", ["it", "'s", "ĠfooBar", "ĠĠ", "1", "2", "3", "4", "5", "!", "ĊĊĠ", "Ġx"]),
        ("llama3", ["it", "'s", "ĠfooBar", "Ġ", "Ġ", "123", "45", "!ĊĊ", "Ġ", "Ġx"]),
        ("qwen2", ["it", "'s", "ĠfooBar", "Ġ", "Ġ", "1", "2", "3", "4", "5", "!ĊĊ", "Ġ", "Ġx"]),
        ("tekken", ["it", "'s", "Ġfoo", "Bar", "Ġ", "Ġ", "1", "2", "3", "4", "5", "!ĊĊ", "Ġ", "Ġx"]),
        ("gpt-4o", ["it's", "Ġfoo", "Bar", "Ġ", "Ġ", "123", "45", "!ĊĊ", "Ġ", "Ġx"]),
    ],
)
def test_texts_are_split_by_the_rule_of_the_file(rule: str, pieces: list[str], tmp_path: Path) -> None:
    """llama.cpp gave the same tokens for 10,000 texts with each rule."""
    file, _ = make(tmp_path, "llama2", num_hidden_layers=1, split=rule)
    tokenizer = tokenizers.Tokenizer.from_file(str(locate_model(str(file)) / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's fooBar  12345!\n\n  x")] == pieces


def test_damaged_and_unsupported_files_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    file, _ = make(tmp_path, "llama2", num_hidden_layers=1)
    whole, other = file.read_bytes(), tmp_path / "other.gguf"
    rng = np.random.default_rng(0)
    for size in (0, 3, 24, 700, 5000, len(whole) // 2, len(whole) - 40):
        other.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"other\.gguf|not a valid GGUF"):
            locate_model(str(other))
    for _ in range(40):  # a damaged header: an error or a model that is read, and nothing else
        damaged = bytearray(whole)
        for at in rng.integers(0, 3000, 4):
            damaged[at] = int(rng.integers(0, 256))
        other.write_bytes(bytes(damaged))
        with suppress(ModelError):
            float32_engine(other).close()
    other.write_bytes(whole.replace(b"llama", b"lamma"))
    with pytest.raises(ModelError, match=r"general\.architecture = 'lamma': expected one of llama, qwen2"):
        locate_model(str(other))
    other.write_bytes(whole.replace(b"gpt-2", b"gpt-7"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre = 'gpt-7': expected one of"):
        locate_model(str(other))
    other.write_bytes(whole.replace(b"llama.embedding_length", b"llama.embedding_lengtg"))
    with pytest.raises(
        ModelError, match=r"other\.gguf: a field of the header is missing or malformed \(embedding_length = None"
    ):
        locate_model(str(other))
    assert not [path for path in (cache / "models").iterdir() if path.is_dir() and path.name.startswith(".")]


def test_a_file_that_is_cut_off_after_its_header_was_converted_is_refused(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama2", num_hidden_layers=1)
    folder = locate_model(str(file))
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(ModelError, match=r"model\.gguf: 9,000 bytes, expected at least .* cut off"):
        float32_engine(folder)


def test_types_without_kernels_are_refused_by_name(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "llama2", lambda name: "F16", num_hidden_layers=1)
    whole = file.read_bytes()
    at = whole.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    assert whole[at] == 1  # F16
    for number, name in ((20, "IQ4_NL"), (23, "IQ4_XS"), (39, "MXFP4")):
        file.write_bytes(whole[:at] + bytes([number]) + whole[at + 1 :])
        with pytest.raises(ModelError, match=f"tensor blk.0.ffn_up.weight is {name}: expected one of F32"):
            locate_model(str(file))


def test_the_account_of_memory_is_what_an_engine_holds(tmp_path: Path) -> None:
    """Within 2 %, on a CPU in float32."""
    file, _ = make(tmp_path, "llama2", intermediate_size=512)
    with float32_engine(file) as engine:
        decoder = engine.runner.decoder
        held = sum(tensor.nbytes for tensor in vars(decoder.embedding).values() if isinstance(tensor, torch.Tensor))
        linears = [decoder.lm_head]
        for layer in decoder.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linears += linear.parts if isinstance(linear, StackedLinears) else [linear]
        held += sum(array.nbytes for each in linears for array in each._weight if isinstance(array, np.ndarray))
    config = read_config(locate_model(str(file)))
    counted = weight_bytes(config, torch.device("cpu"), torch.float32)
    assert abs(counted - held) < 0.02 * held, (counted, held)


def test_without_the_package_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = make(tmp_path, "llama2", num_hidden_layers=1)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=re.escape("pip install 'parquet-batch-inference[gguf]'")):
        locate_model(str(file))
