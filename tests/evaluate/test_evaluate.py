"""`pipeline eval` compared with transformers: every figure is computed again from the logits of transformers."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.engine.quality.divergence import Divergence
from pipeline.evaluate import measurement
from tests.model_folders import FAMILIES, load_reference, make_family, small_config, write_checkpoint
from tests.parity.harness import reference_logits

NUM_OUTPUTS = 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save a small model, and a copy with noise on its weights."""
    base, noisy = (tmp_path_factory.mktemp(name) / "model" for name in ("base", "noisy"))
    config = small_config(64, 96, 2, 4, 2, initializer_range=0.08)
    write_checkpoint(base, FAMILIES[0], config, seed=3)
    write_checkpoint(noisy, FAMILIES[0], config, seed=3)
    torch.manual_seed(4)
    for shard in noisy.glob("*.safetensors"):
        tensors = load_file(shard)
        save_file({n: t + 0.004 * torch.randn_like(t) for n, t in tensors.items()}, shard, metadata={"format": "pt"})
    return base, noisy


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Write short and long texts, one null, one longer than the models' context."""
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice(list("abcdefgh ,."), int(n))) for n in rng.integers(3, 120, 12)]
    path = tmp_path_factory.mktemp("data") / "texts.parquet"
    pq.write_table(pa.table({"text": [*texts[:5], None, "x" * 400, *texts[5:]]}), path, row_group_size=4)
    return path, texts


def measured(pipe, *arguments: str) -> dict:
    code, out, err = pipe("eval", *arguments, "--dtype", "float32", "--json")
    assert code == 0, err
    return json.loads(out)


def test_every_figure_equals_that_of_transformers(pipe, checkpoints, texts, monkeypatch):
    base, noisy = checkpoints
    path, rows = texts
    monkeypatch.setattr(measurement, "LOGIT_BYTES", 4 * 320 * 37)  # rows in several pieces
    monkeypatch.setattr(measurement, "GROUP_TOKENS", 150)  # and in several groups
    report = measured(pipe, str(noisy), "--against", str(base), "--data", str(path), "--max-tokens", str(NUM_OUTPUTS))
    first, second = report["models"]
    assert (report["num_rows"], report["left_out"]) == (12, {"null_prompt": 1, "prompt_too_long": 1})
    assert report["num_tokens"] == sum(map(len, rows))

    models = {name: load_reference(folder) for name, folder in (("base", base), ("noisy", noisy))}
    nats, kl, same_top, outputs = {"base": 0.0, "noisy": 0.0}, [], [], {"base": [], "noisy": []}
    for text in rows:
        ids = [sorted(alphabet()).index(c) for c in text.replace(" ", "Ġ")]
        logs = {}
        for name, model in models.items():
            logs[name] = torch.log_softmax(reference_logits(model, ids).double(), -1)
            nats[name] -= float(logs[name][:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum())
            outputs[name].append(greedy_until_eos(model, ids))
        kl += (logs["base"].exp() * (logs["base"] - logs["noisy"])).sum(-1).tolist()
        same_top += (logs["base"].argmax(-1) == logs["noisy"].argmax(-1)).tolist()
    predicted = report["num_tokens"] - len(rows)
    assert first["perplexity"] == pytest.approx(np.exp(nats["base"] / predicted), rel=TOLERANCE)
    assert second["perplexity"] == pytest.approx(np.exp(nats["noisy"] / predicted), rel=TOLERANCE)
    assert second["kl_mean"] == pytest.approx(np.mean(kl), rel=TOLERANCE)
    assert second["kl_p99"] == pytest.approx(np.quantile(kl, 0.99), rel=TOLERANCE)
    assert second["top1"] == pytest.approx(np.mean(same_top), abs=1e-9)
    same = np.mean([a == b for a, b in zip(outputs["base"], outputs["noisy"])])
    assert 0 < same < 1, "the test must be able to tell rows apart"
    assert second["same_outputs"] == pytest.approx(same)
    assert first["kl_mean"] is first["same_outputs"] is None
    assert second["checkpoint_bytes"] == sum(p.stat().st_size for p in noisy.glob("*.safetensors"))
    assert second["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def greedy_until_eos(model, ids: list[int]) -> list[int]:
    out: list[int] = []
    while len(out) < NUM_OUTPUTS and out[-1:] != [257]:
        out.append(int(reference_logits(model, ids + out)[-1].argmax()))
    return out


def test_a_model_has_no_distance_from_itself_and_its_own_answers_are_expected(pipe, checkpoints, texts, tmp_path):
    base, _ = checkpoints
    rows = texts[1]
    with Engine(EngineConfig(str(base), dtype="float32", max_num_seqs=16)) as engine:
        answers = [f" {c.text}\n" for c in engine.generate(rows, SamplingParams(max_tokens=5))]
    pq.write_table(pa.table({"text": rows, "right": [*answers[:-1], None]}), tmp_path / "rows.parquet")
    report = measured(pipe, str(base), "--against", str(base), "--data", str(tmp_path / "rows.parquet"),
                    "--expected", "right", "--max-tokens", "5", "--template", "{text}")  # fmt: skip
    one, two = report["models"]
    assert two["kl_mean"] == pytest.approx(0, abs=1e-9)
    assert (two["top1"], two["same_outputs"]) == (1, 1)
    assert one["expected"] == two["expected"] == pytest.approx(11 / 12)
    assert one["perplexity"] == two["perplexity"]


@pytest.fixture
def against_itself(pipe, checkpoints, texts):
    """Return a function that measures three rows by the reference and by another form of it."""
    base = str(checkpoints[0])
    common = ["--against", base, "--data", str(texts[0]), "--limit", "3", "--max-tokens", "2"]
    return base, lambda *options: measured(pipe, *common, *options)["models"]


def test_the_reference_is_measured_quantized_on_load_too(pipe, against_itself, texts):
    base, models = against_itself
    plain, int8, int4 = models("--quantization", "int8", "--quantization", "int4-rtn")
    assert [model["name"] for model in (int8, int4)] == [f"{base}, int8 on load", f"{base}, int4-rtn on load"]
    assert 0 < int8["kl_mean"] < int4["kl_mean"], "8 bits lose less than 4"
    assert int4["weight_bytes"] < int8["weight_bytes"] < plain["weight_bytes"]
    code, _, err = pipe("eval", base, "--quantization", "nf4", "--data", str(texts[0]))
    assert (code, "name it with --against" in err) == (2, True)


def test_activations_in_fp8_are_used_by_the_model_and_not_by_the_reference(pipe, against_itself, texts):
    base, models = against_itself
    plain, rounded = (models("--quantization", "int4-rtn", *more) for more in ([], ["--activation-dtype", "fp8"]))
    assert rounded[0]["weights"] == "dense"
    assert rounded[0]["perplexity"] == plain[0]["perplexity"]
    assert rounded[1]["name"] == f"{base}, int4-rtn on load, activations in fp8"
    assert rounded[1]["weights"].endswith("inputs of 8 of 9 linears in fp8")
    assert abs(rounded[1]["perplexity"] / plain[1]["perplexity"] - 1) > 1e-5
    code, _, err = pipe("eval", base, "--activation-dtype", "fp8", "--data", str(texts[0]))
    assert (code, "not supported by 16- or 32-bit weights" in err) == (2, True)


def test_the_reference_is_measured_with_a_cache_in_8_bits_too(pipe, against_itself, texts):
    base, models = against_itself
    plain, narrow = models("--kv-cache-dtype", "fp8")
    assert narrow["name"] == f"{base}, fp8 KV cache"
    assert 0 < narrow["kl_mean"] < 1e-2
    assert (plain["kv_bytes_per_token"], narrow["kv_bytes_per_token"]) == (2 * 2 * 2 * 16 * 4, 2 * 2 * 2 * (16 + 4))
    code, _, err = pipe("eval", base, "--kv-cache-dtype", "fp8", "--data", str(texts[0]))
    assert (code, "name that with --against" in err) == (2, True)


def test_prompts_and_settings_come_from_a_job_and_a_table_shows_the_figures(pipe, checkpoints, texts, tmp_path):
    (tmp_path / "job.yaml").write_text(
        f"input: {{path: {texts[0]}}}\nprompt: {{template: 'Say {{text}}'}}\nmodel: {{path: {checkpoints[0]}}}\n"
        "sampling: {max_tokens: 3}\noutput: {path: nowhere}\n"
    )
    code, out, err = pipe("eval", "--job", str(tmp_path / "job.yaml"), "--limit", "4", "--dtype", "float32")
    assert code == 0, err
    for expected in ("4 rows", "greedy outputs of up to 3 tokens", "perplexity"):
        assert expected in out
    assert "KL" not in out, "without a reference there is none"


@pytest.mark.parametrize(("arguments", "message"), [
    (["MODEL"], "either --data PATH"),
    (["MODEL", "--data", "DATA", "--job", "x.yaml"], "either --data PATH"),
    (["--data", "DATA"], "no MODEL"),
    (["MODEL", "--data", "DATA", "--column", "txt"], "no column 'txt'"),
    (["MODEL", "--data", "DATA", "--max-tokens", "256"], "no room"),
    (["MODEL", "--data", "DATA", "--expected", "right"], "no column 'right'"),
    (["OTHER", "--against", "MODEL", "--data", "DATA"], "its tokens differ from those of"),
    (["WIDER", "--against", "MODEL", "--data", "DATA"], "a vocabulary of 328, not 320"),
])  # fmt: skip
def test_impossible_measurements_are_refused_with_the_reason(pipe, checkpoints, texts, tmp_path, arguments, message):
    if "OTHER" in arguments:
        make_family(tmp_path / "other", FAMILIES[0], 1)
        config = tmp_path / "other" / "tokenizer.json"
        config.write_text(config.read_text().replace("<|bos|>", "<|start|>"))
    if "WIDER" in arguments:
        config = {"vocab_size": 328, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1,
                  "num_hidden_layers": 1, "eos_token_id": 257}  # fmt: skip
        write_checkpoint(tmp_path / "wider", FAMILIES[0], config, 1)
    known = {"MODEL": str(checkpoints[0]), "DATA": str(texts[0]), "OTHER": str(tmp_path / "other"),
             "WIDER": str(tmp_path / "wider")}  # fmt: skip
    code, out, err = pipe("eval", *(known.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err


def test_a_token_that_the_reference_excludes_adds_nothing():
    reference = torch.tensor([[0.0, 0.0, -torch.inf]])
    apart = Divergence()
    apart.add(torch.tensor([[1.0, 1.0, 1.0]]), reference)
    assert apart.mean == pytest.approx(np.log(1.5))
