"""`pipeline quantize` end to end: what is written, that it loads and answers, and that a stopped run resumes."""

import hashlib
import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, AwqConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.demo.check import wrong_facts
from pipeline.demo.reports import make_report
from pipeline.model.config import read_config
from pipeline.model.load import WeightReader, output_rows
from pipeline.quantize import awq, layers
from pipeline.quantize.calibration import Calibration
from pipeline.quantize.checkpoint_writer import CheckpointWriter
from pipeline.quantize.grid import round_to_nearest
from tests.model_folders import FAMILIES, Family, load_reference, make_family, small_config, write_checkpoint
from tests.parity.harness import LOGIT_TOLERANCE, float32_engine, our_logits, reference_logits

CONFIG = small_config(64, 96, 3, 4, 2, initializer_range=0.08)
SMALL_FOR_AWQ = {"num_hidden_layers": 1, "num_key_value_heads": 4, "intermediate_size": 128}
TIED_WITH_BIAS = next(family for family in FAMILIES if family.name == "llama-linear-bias-tied")
QWEN3_5 = next(family for family in FAMILIES if family.name == "qwen3-5")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), TIED_WITH_BIAS, CONFIG | TIED_WITH_BIAS.options, 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("data") / "texts.parquet"
    pq.write_table(pa.table({"text": ["".join(rng.choice(list("abcdefgh ,."), 90)) for _ in range(40)]}), path)
    return path


def made(pipe, base: Path, out: Path, method: str, *arguments: str) -> str:
    code, text, err = pipe("quantize", str(base), "--output", str(out), "--method", method, *arguments)
    assert code == 0, err
    return text + err


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for shard in sorted(folder.glob("*.safetensors")) for name, t in load_file(shard).items()}


def unpacked(words: torch.Tensor, bits: int) -> np.ndarray:
    """Written apart from the product's packing: each word's bits as text, cut from the right."""
    rows = []
    for row in words.numpy().astype(np.int64) & 0xFFFFFFFF:
        texts = [f"{word:032b}" for word in row]
        rows.append([int(t[32 - bits * (i + 1) : 32 - bits * i], 2) for t in texts for i in range(32 // bits)])
    return np.array(rows)


def by_output(words: torch.Tensor) -> np.ndarray:
    """Unpack AWQ's words: of each, values 0, 4, 1, 5, 2, 6, 3, 7 are outputs 0 to 7."""
    return unpacked(words, 4).reshape(len(words), -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(len(words), -1)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("rtn", ["--group-size", "32"]), ("int8", []), ("gptq", ["--group-size", "32"])],
)  # fmt: skip
def test_the_files_hold_the_weights_as_their_formats_say_and_the_engine_reads_the_same(
    pipe, base, data, tmp_path, method, arguments
):
    given = [*arguments, "--calibration", str(data)] if method == "gptq" else arguments
    out = tmp_path / "out"
    shown = made(pipe, base, out, method, *given)
    assert f"pipeline eval {out} --against {base}" in shown
    plain, stored = tensors_of(base), tensors_of(out)
    linears = [name.removesuffix(".weight") for name in plain if name.endswith("_proj.weight")]
    assert len(linears) == 3 * 7
    values = {}
    for name in linears:
        if method == "int8":
            scale = stored[f"{name}.weight_scale"].float().numpy()
            q, zero = unpacked(stored[f"{name}.weight_packed"], 8), np.full(scale.shape, 128)
            assert stored[f"{name}.weight_shape"].tolist() == list(plain[f"{name}.weight"].shape)
        else:
            qweight, qzeros, scales = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
            assert scales.dtype == torch.float16
            scale, q, zero = scales.float().numpy().T, by_output(qweight).T, by_output(qzeros).T
            assert len(np.unique(zero)) > 4
        group = np.arange(q.shape[1]) // (q.shape[1] // scale.shape[1])
        values[name] = (q - zero[:, group]) * scale[:, group]
        if method != "int8":
            from awq.utils.packing_utils import dequantize_gemm  # takes seconds to import

            library = dequantize_gemm(qweight, qzeros, scales.float(), 4, 32)
            np.testing.assert_array_equal(library.numpy().T, values[name].astype(np.float32))
        off = np.abs(values[name] - plain[f"{name}.weight"].numpy()) / scale[:, group]
        assert off.max() < (0.51 if method != "gptq" else 8)
        assert off.mean() < (0.3 if method != "gptq" else 1)
    others = set(plain) - {f"{name}.weight" for name in linears}
    assert all(torch.equal(plain[name], stored[name]) for name in others)
    reader = WeightReader(out, read_config(out))
    for index, layer in enumerate(reader.layers()):
        for field, parts in reader.config.linears(index).items():
            expected = np.concatenate([values[f"model.{name}"] for name, _, _ in parts])
            read = getattr(layer, field).dequantize(torch.float32).numpy()
            np.testing.assert_array_equal(read, expected.astype(np.float32))


def test_8_bit_floats_are_the_nearest_there_are(pipe, base, tmp_path):
    made(pipe, base, tmp_path / "out", "fp8")
    plain, stored = tensors_of(base), tensors_of(tmp_path / "out")
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unique()
    reader = WeightReader(tmp_path / "out", read_config(tmp_path / "out"))
    [*_, last] = reader.layers()
    name = "model.layers.2.mlp.down_proj"
    value, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
    assert value.dtype == torch.float8_e4m3fn
    wanted = plain[f"{name}.weight"] / scale
    off, least = (value.float() - wanted).abs(), (every - wanted[..., None]).abs().amin(-1)
    torch.testing.assert_close(off, least, rtol=1e-5, atol=1e-5)
    assert torch.equal(value.float().abs().amax(1), torch.full((64,), 448.0))
    torch.testing.assert_close(last.down.dequantize(torch.float32), value.float() * scale, rtol=0, atol=0)


def test_all_that_belongs_to_a_checkpoint_comes_along(pipe, base, tmp_path):
    made(pipe, base, tmp_path / "out", "int8")
    out = tmp_path / "out"
    config, plain = json.loads((out / "config.json").read_text()), json.loads((base / "config.json").read_text())
    assert config.pop("quantization_config")["format"] == "pack-quantized"
    assert config == plain
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(out))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(out).values())
    assert not list(out.glob(".*")) + list(out.glob("recipe*")) + list(tmp_path.glob("*.partial"))
    assert (out / "model-00001-of-00004.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_autoawq_makes_a_checkpoint_that_answers(pipe, data, tmp_path):
    plain = write_checkpoint(tmp_path / "plain", Family("llama2", "llama"), CONFIG | SMALL_FOR_AWQ, 3)
    given = "--group-size", "32", "--calibration", str(data), "--samples", "4"
    assert "4 rows, 360 tokens" in made(pipe, plain, tmp_path / "out", "awq", *given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "awq"
    assert config == json.loads((plain / "config.json").read_text())
    with Engine(EngineConfig(str(tmp_path / "out"), dtype="float32", max_num_seqs=2)) as engine:
        assert str(engine.resolved["weights"]).startswith("AWQ int4, groups of 32")
        assert len(engine.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def test_the_demonstration_model_is_as_right_as_before(pipe, tmp_path):
    out = tmp_path / "out"
    made(pipe, Path("demo:target"), out, "gptq", "--job", "jobs/summarize.yaml", "--samples", "16")
    reports = [make_report("heldout", index) for index in range(8)]
    with Engine(EngineConfig(str(out), dtype="float32", max_num_seqs=8)) as engine:
        answers = engine.generate([r.prompt for r in reports], SamplingParams(max_tokens=96))
    assert sum(not wrong_facts(r.text, c.text) for r, c in zip(reports, answers)) >= 7


def test_a_killed_run_goes_on_and_comes_to_the_same_bytes(pipe, data, tmp_path, monkeypatch):
    """The model has gates after query heads, which are in another order here."""
    types = {"attention_bias": True, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
    base = write_checkpoint(tmp_path / "base", QWEN3_5, small_config(64, 96, 3, 4, 2) | QWEN3_5.options | types, 3)
    given = ["--group-size", "32", "--calibration", str(data), "--samples", "8"]
    made(pipe, base, tmp_path / "whole", "gptq", *given)
    write = CheckpointWriter.write

    def write_or_die(self, name: str, tensors) -> None:
        if name.startswith("model-00003"):
            raise KeyboardInterrupt
        write(self, name, tensors)

    monkeypatch.setattr(CheckpointWriter, "write", write_or_die)
    out = tmp_path / "out"
    code, _, _ = pipe("quantize", str(base), "--output", str(out), "--method", "gptq", *given)
    assert code == 75
    assert not out.exists()
    monkeypatch.setattr(CheckpointWriter, "write", write)
    (tmp_path / "out.partial" / ".model-00003-of-00004.safetensors").write_bytes(b"half")
    code, _, err = pipe("quantize", str(base), "--output", str(out), "--method", "gptq", *given, "--seed", "1")
    assert (code, "with different texts; remove the folder" in err) == (2, True)
    assert "2 of 3 layers were written" in made(pipe, base, out, "gptq", *given)
    for folder in ("whole", "out"):
        assert (tmp_path / folder / "config.json").exists()
    assert digests(out) == digests(tmp_path / "whole")


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize(
    "name",
    ["llama-linear-bias-tied", "qwen2-window", "qwen3", "gemma3", "olmo2", "exaone4", "phi3", "phi3-long-partial",
     "ernie4-5", "granite", "starcoder2", "qwen3-5"],
)  # fmt: skip
def test_layers_see_what_transformers_layers_see(tmp_path, name):
    """The second moments of every linear's inputs, by hooks in another implementation."""
    base = make_family(tmp_path, next(family for family in FAMILIES if family.name == name), 2)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 256, n).tolist() for n in (40, 17, 3)]
    model, seen = load_reference(base), {}
    for name, module in model.named_modules():
        if name.endswith(("_proj", "c_fc", "in_proj_qkv")):
            module.register_forward_pre_hook(
                lambda _, given, name=name: seen.setdefault(name, []).append(given[0][0].double())
            )
    with torch.inference_mode():
        for ids in texts:
            model(torch.tensor([ids]))
    reader = WeightReader(base, read_config(base))
    calibration = Calibration(
        reader.config, reader.embedding().dequantize(torch.float32), None, texts, torch.device("cpu")
    )
    for index, weights in enumerate(reader.layers()):
        moments, parts_of = calibration.moments(index, weights), reader.config.linears(index)
        assert {*parts_of} - {*moments} <= {"ba"}
        for field, moments_KK in moments.items():
            x_TK = torch.cat(seen[f"model.{parts_of[field][0][0]}"])
            torch.testing.assert_close(moments_KK.double(), x_TK.T @ x_TK, rtol=1e-3, atol=2e-3)
        calibration.advance(index, weights)


EMBEDDING = "model.embed_tokens"
MADE = {"gptq": ["--group-size", "32", "--samples", "4"], "rtn": ["--group-size", "32"], "fp8": []}


@pytest.mark.parametrize("method", MADE)
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "starcoder2", "ernie4-5", "qwen3-5"])
def test_a_quantized_family_computes_what_its_weights_say(pipe, data, tmp_path, name, method):
    """Against transformers with the dequantized weights."""
    family = next(family for family in FAMILIES if family.name == name)
    config = small_config(64, 96, 2, 4, 2, initializer_range=0.2) | family.options
    base, out, dense = write_checkpoint(tmp_path / "base", family, config, 3), tmp_path / "out", tmp_path / "dense"
    made(pipe, base, out, method, *MADE[method], *(["--calibration", str(data)] if method == "gptq" else []))
    reader, tensors = WeightReader(out, read_config(out)), tensors_of(base)
    for index, layer in enumerate(reader.layers()):
        for field, parts in reader.config.linears(index).items():
            weight = getattr(layer, field).dequantize(torch.float32)
            order = output_rows(reader.config, index, field)
            weight = weight if order is None else weight[order.argsort()]
            for (stem, _, _), part in zip(parts, weight.split([rows for _, rows, _ in parts])):
                off = (part - tensors[f"model.{stem}.weight"]).abs()
                assert 0 < float(off.mean()) < 0.06 or field == "ba"
                tensors[f"model.{stem}.weight"] = part.clone()
    shutil.copytree(base, dense, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    ids = np.random.default_rng(2).integers(0, 256, 60).tolist()
    with float32_engine(out) as engine:
        difference = (our_logits(engine, ids) - reference_logits(load_reference(dense), ids)).abs().max()
    assert float(difference) < LOGIT_TOLERANCE


def test_linears_that_stay_in_16_bits_are_named_as_other_engines_expect(pipe, data, tmp_path, monkeypatch):
    """The model has Gated DeltaNet layers and a head that drafts tokens (MTP). GPTQ is closer to it than rounding, and
    rounding closer than rounding without zero points."""
    base = write_checkpoint(tmp_path / "base", QWEN3_5, small_config(64, 96, 2, 4, 2) | QWEN3_5.options, 3)
    save_file({"mtp.fc.weight": torch.ones(8, 8)}, base / "mtp.safetensors")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.fc.weight"] = "mtp.safetensors"
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    text = "".join(np.random.default_rng(6).choice(list("abcdefgh ,."), 110))  # as in `data`
    ids = AutoTokenizer.from_pretrained(base)(text)["input_ids"]
    distances = {}
    for method, options in MADE.items():
        out = tmp_path / method
        made(pipe, base, out, method, *options, *(["--calibration", str(data)] if method == "gptq" else []))
        described = json.loads((out / "config.json").read_text())["quantization_config"]
        stored = tensors_of(out)
        whole = {name[:-7] for name, t in stored.items() if name.endswith(".weight") and t.ndim == 2} - {EMBEDDING}
        quantized = {name.rpartition(".")[0] for name in stored if name.endswith(("qweight", "weight_scale"))}
        whole -= quantized
        assert {name.rpartition(".")[2] for name in whole} == {"in_proj_a", "in_proj_b", "fc"}
        fused = "model.layers.0.linear_attn.in_proj_ba"  # of vLLM
        if method == "fp8":
            patterns = [text[3:] for text in described["ignore"] if text.startswith("re:")]
            assert {name for name in whole | quantized if any(re.match(each, name) for each in patterns)} == whole
            assert any(re.match(each, fused) for each in patterns)
            continue
        kept = described["modules_to_not_convert"]
        assert {name for name in whole | quantized if any(each in name for each in kept)} == whole, "vLLM's rule"
        assert any(each in fused for each in kept)
        assert {name for name in whole | quantized if not should_convert_module(name, kept)} == whole
        assert AwqConfig(**described).to_dict().items() >= described.items()
        distances[method] = divergence(base, out, ids)
    monkeypatch.setattr(layers, "round_to_nearest", partial(round_to_nearest, symmetric=True))
    made(pipe, base, tmp_path / "symmetric", "rtn", *MADE["rtn"])
    assert distances["rtn"] < 0.9 * divergence(base, tmp_path / "symmetric", ids)
    assert distances["gptq"] < 0.7 * distances["rtn"]


def divergence(base: Path, other: Path, ids: list[int]) -> float:
    """Return the mean KL divergence of the other model's tokens."""
    logs = []
    for folder in (base, other):
        with float32_engine(folder) as engine:
            logs.append(our_logits(engine, ids).log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


@pytest.mark.parametrize("name", ["gpt2", "gemma4-one-head-size"])
def test_a_family_that_cannot_be_quantized_is_refused(pipe, tmp_path, name):
    base = make_family(tmp_path, next(family for family in FAMILIES if family.name == name), 2)
    code, _, err = pipe("quantize", str(base), "--output", str(tmp_path / "out"), "--method", "int8")
    assert code == 2
    assert "models of this family cannot be quantized here yet" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BASE", "--output", "OUT", "--method", "gptq"], "give either --calibration PATH"),
        (["BASE", "--output", "OUT", "--method", "rtn", "--job", "j.yaml"], "needs no texts"),
        (["BASE", "--output", "OUT", "--method", "rtn"], "= 64 is not a multiple of --group-size 128; --group-size 64"),
        (["BASE", "--output", "OUT", "--group-size", "32", "--calibration", "DATA"], "of 64, as awq requires"),
        (["BASE", "--output", "FULL", "--method", "int8"], "already exists and is not empty"),
        (["demo:target-awq", "--output", "OUT", "--method", "int8"], "is already quantized (awq in config.json)"),
        (["BASE", "--output", "MINE", "--method", "int8"], "exists, but not from an earlier run"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_the_reason(pipe, base, data, tmp_path, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "full", tmp_path / "mine.partial")
    known = {"DATA": data, "BASE": base} | {name.upper(): tmp_path / name for name in ("out", "full", "mine")}
    code, _, err = pipe("quantize", *(str(known.get(argument, argument)) for argument in arguments))
    assert code == 2
    assert message in err
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "out").exists()


def test_without_autoawq_the_command_that_installs_it_is_named(pipe, base, tmp_path, monkeypatch):
    monkeypatch.setattr(awq, "find_spec", lambda _: None)
    code, _, err = pipe("quantize", str(base), "--output", str(tmp_path / "out"), "--job", "jobs/summarize.yaml")
    assert code == 2
    assert "pip install" in err
    assert "autoawq==0.2.9" in err


def test_an_output_embedding_of_its_own_is_written_and_named(pipe, tmp_path):
    base = write_checkpoint(tmp_path / "base", Family("llama", "llama"), CONFIG, 3)
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    made(pipe, base, tmp_path / "out", "int8")
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(tensors_of(tmp_path / "out")["lm_head.weight"], tensors_of(base)["lm_head.weight"])
