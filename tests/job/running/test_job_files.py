"""The job files in `jobs/` run, with the embedded model and on some rows of their samples."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from pipeline.config import load_job
from pipeline.data.output.parts import PartStore
from pipeline.job.running.run import run_job
from pipeline.job.running.sample import read_sample
from tests.model_folders import FAMILIES, make_family, small_config, write_checkpoint, write_tokenizer
from tests.tokenization.family_templates import GEMMA, GPT_OSS
from tests.weights.packers import mxfp4_experts

pytestmark = pytest.mark.usefixtures("engines_in_threads")
ROOT = Path(__file__).parents[3]
COLUMNS = {  # the results of each job file
    "classify-chat": {"label"},
    "label-probability": {"label", "label_probability", "label_probabilities"},
    "extract-json": {"fields"},
    "samples": {"generated_text"},
    "reasoning": {"generated_text", "reasoning", "num_reasoning_tokens"},
    "judge": {"logprobs"},
    "judge-score": {"logprob", "num_scored_tokens", "perplexity", "token_logprobs"},
    "filter-perplexity": {"perplexity"},
    "embed": {"embedding"},
    "openai-batch": {"custom_id", "generated_text"},
    "redact": {"generated_text"},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_job_file_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    written = load_job(f"jobs/{name}.yaml")
    sets = ["model.path=demo:target", f"output.path={tmp_path / 'out'}", "input.limit=4", "run.actors=1"]
    if written.input.has_requests or written.prompt.chat is not None:
        template = tmp_path / "turns.jinja"  # the embedded model knows no chats
        template.write_text("{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant:")
        sets.append(f"prompt.chat.chat_template={template}")
    run_job(load_job(f"jobs/{name}.yaml", sets=sets))
    table = written_table(tmp_path / "out")
    assert 1 <= table.num_rows <= 4
    assert table["error"].null_count == table.num_rows, table["error_message"].to_pylist()
    for column in COLUMNS[name]:
        assert table[written.output.rename.get(column, column)].null_count == 0


def write_family(folder: Path, name: str) -> Path:
    """Write a small random checkpoint for the job file `name`, with a chat template."""
    variants = {"gemma": "gemma3", "gemma4": "gemma4-moe"}
    family = next(each for each in FAMILIES if each.name == variants.get(name, name))
    if name != "gpt-oss":
        made = make_family(folder, family, seed=3)
        (made / "chat_template.jinja").write_text(GEMMA)
        return made
    plain = write_checkpoint(folder, family, small_config(64, 96, 2, 4, 2) | family.options, seed=3)
    made, _ = mxfp4_experts(plain, folder.with_name("mxfp4"), seed=3)
    write_tokenizer(made, *HARMONY)
    (made / "chat_template.jinja").write_text(GPT_OSS)
    return made


HARMONY = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"
SETS = {
    "mixtral": ["model.quantization=none"],  # the small model's sizes are no multiples of a group
    "gemma4": ["model.quantization=none"],
    "gpt-oss": ["sampling.thinking_token_budget=4", "sampling.max_tokens=64"],  # a random model never ends its analysis
}


@pytest.mark.parametrize("name", ["gemma", "gemma4", "gpt2", "mixtral", "gpt-oss"])
def test_the_job_file_of_a_family_runs_and_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = write_family(tmp_path / "model", name)
    sets = [f"model.path={folder}", f"output.path={tmp_path / 'out'}", "engine.max_model_len=null"]
    job = load_job(f"jobs/{name}.yaml", sets=[*sets, "sampling.max_tokens=24", *SETS.get(name, [])])
    sampled = run_job(job, sample=1)
    (first,) = read_sample(PartStore(job.output.path), sampled.runs[-1].run_id)
    assert run_job(job).work.resumed_rows == 1
    table = written_table(tmp_path / "out")
    assert table.num_rows == ds.dataset(job.input.path).count_rows()
    assert table["error"].null_count == table.num_rows, table["error_message"].to_pylist()
    replies = table[job.output.rename["generated_text"]].to_pylist()
    assert all(replies)
    assert replies[table["source_row"].to_pylist().index(first.source_row)] == first.text
    assert ("reasoning" in table.column_names) == (name == "gpt-oss")


def test_the_job_file_of_a_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))  # other tests start servers at the same time
    serve = json.dumps([sys.executable, "-m", "tests.endpoint.fake_server"])
    sets = [f"server.serve={serve}", f"output.path={tmp_path / 'out'}", "input.limit=4"]
    run_job(load_job("jobs/server.yaml", sets=sets))
    table = written_table(tmp_path / "out")
    assert table.num_rows == 4
    assert table["error"].null_count == 4, table["error_message"].to_pylist()
    assert table["generated_text"][0].as_py().split()[-1] == "Summarize"  # the words of the prompt in reverse


def written_table(folder: Path) -> pa.Table:
    return ds.dataset([str(path) for path in folder.glob("*.parquet")]).to_table()
