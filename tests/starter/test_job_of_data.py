"""`pipeline run DATA --prompt TEXT --model NAME`: the same job as a job file with these keys."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.data_flags import NAMES, job_of
from pipeline.config import JobConfig, load_job
from pipeline.config.identity import identity_of
from pipeline.data.output.part_totals import PartTotals
from pipeline.demo import demo_model
from pipeline.errors import ConfigError
from pipeline.report.build import build_report

CHAT = [{"role": "user", "content": "Why?"}]
DEMO = {"model": "demo:target-awq", "prompt": "S: {text}"}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["one", "two"]}), "my data.v1.parquet")
    return Path("my data.v1.parquet")


def job(target: str = "my data.v1.parquet", sets: tuple[str, ...] = (), **given: object) -> JobConfig:
    return job_of(target, dict.fromkeys(NAMES) | given, sets=sets)


def test_flags_are_keys_of_a_job_file(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"type": "object"}))
    found = job(
        **DEMO, schema="s.json", max_tokens=7, temperature=0.5, budget=5.0, hourly_price=2.0, sets=("sampling.top_k=3",)
    )
    assert (found.prompt.template, found.prompt.chat, found.model.path) == ("S: {text}", None, "demo:target-awq")
    assert (found.sampling.max_tokens, found.sampling.temperature, found.sampling.top_k) == (7, 0.5, 3)
    assert found.data["sampling"]["structured_outputs"]["json"] == {"type": "object"}
    assert (found.cost.budget_usd, found.cost.hourly_usd) == (5.0, 2.0)
    assert found.name == "my-data"
    labelled = job(**DEMO, labels="good, not good")
    assert (labelled.task.type, labelled.task.labels) == ("choice", ("good", "not good"))
    served = job(model="m", url="http://localhost:1/v1", prompt="{text}", labels="good, not good")
    choice = served.data["sampling"]["structured_outputs"]["choice"]
    assert (served.server.model, choice) == ("m", ["good", "not good"])
    assert (served.task.type, served.output.rename) == ("generate", {"generated_text": "label"})
    assert job(**DEMO, system="Be brief.").prompt.chat.system == "Be brief."


def test_the_default_output_is_the_same_for_the_same_work_only():
    first = job(**DEMO).output.path
    assert first.startswith("out/my-data-")
    assert first == job(**DEMO, budget=1.0, hourly_price=1.0, sets=("run.drain_timeout=5 s",)).output.path
    others = [job(**DEMO | {"prompt": "T: {text}"}), job(**DEMO | {"model": "demo:target"}), job(**DEMO, max_tokens=3)]
    others.append(job(target="./my data.v1.parquet", **DEMO))
    assert len({first, *(other.output.path for other in others)}) == 5
    assert job(**DEMO, output="x").output.path == "x"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("s3://bucket/tickets/*.parquet", "tickets"),
        ("data/a.b/rows.jsonl.gz", "rows"),
        ("folder/", "folder"),
        ("hf://datasets/org/name@v1", "name"),
        ("*.jsonl", "data"),
    ],
)
def test_the_job_is_named_after_the_data(path, name):
    assert job(target=path, **DEMO).name == name


def test_texts_are_turns_of_a_chat_if_the_model_has_a_template(tmp_path):
    shutil.copytree(demo_model("target"), tmp_path / "chat")
    assert job(model="./chat", prompt="{text}").prompt.chat is not None
    assert job(model="./chat", prompt="{text}", chat=False).prompt.chat is None
    (tmp_path / "chat" / "chat_template.jinja").unlink()
    assert job(model="./chat", prompt="{text}").prompt.chat is None
    assert job(model="./chat", prompt="{text}", chat=True).prompt.chat is not None
    assert job(url="http://localhost:1/v1", prompt="{text}").prompt.chat is not None


def test_without_a_prompt_the_columns_leave_no_doubt():
    pq.write_table(pa.table({"prompt": ["x"], "other": ["y"]}), "p.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "messages": [CHAT]}), "m.parquet")
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    Path("r.jsonl").write_text(json.dumps(request))
    assert job(target="p.parquet", model="demo").prompt.column == "prompt"
    assert job(target="m.parquet", model="demo").prompt.messages == "messages"
    assert job(target="r.jsonl", model="demo").input.format == "openai"
    with pytest.raises(ConfigError, match=r'columns of .*my data.v1.parquet \(text\), such as .*"Summarize: {text}"'):
        job(model="demo")
    Path("reviews.csv").write_text("review_id,Text\n1,good\n")
    with pytest.raises(ConfigError, match=r'\(review_id, Text\), such as .*"Summarize: {Text}"'):
        job(target="reviews.csv", model="demo")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--prompt", "{text}"], "--model: expected a folder"),
        (["--prompt", "{text", "--model", "demo"], "--prompt: prompt.template: "),
        (["--prompt", "{text}", "--model", "demo", "--max-tokens", "0"], "--max-tokens: sampling.max_tokens: expected"),
        (["--prompt", "{text}", "--model", "demo", "--labels", "a"], "--labels: task.labels: expected at least two"),
        (["--prompt", "{text}", "--model", "demo", "--budget", "5"], "budget_usd needs a price: hourly_usd (--hourly-"),
        (["--prompt", "{text}", "--model", "demo", "--schema", "no.json"], "--schema: sampling.structured_outputs"),
        (["--prompt", "{text}", "--model", "./nowhere"], "'./nowhere': no such folder"),
    ],
)
def test_mistakes_name_the_flag(pipe, arguments, expected):
    code, out, err = pipe("run", "my data.v1.parquet", *arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert not Path("out").exists()


def test_a_job_file_takes_no_flags(pipe):
    code, _, err = pipe("run", "my.yaml", "--prompt", "x")
    assert (code, "--prompt: describes a job without a job file; change my.yaml" in err) == (2, True)


def test_a_saved_job_file_is_the_same_job(pipe, monkeypatch):
    seen = []

    def run_job(config, **_):
        seen.append(config)
        return build_report("new", "1a2b3c4d", [], PartTotals(), 0)

    monkeypatch.setattr("pipeline.job.running.run.run_job", run_job)
    monkeypatch.setenv("PLACE", "here")
    flags = [
        "--prompt",
        "S: {text}",
        "--model",
        "demo",
        "--temperature",
        "0.5",
        "--limit",
        "1",
        "--set",
        "output.path=${PLACE}",
    ]
    for _ in range(2):  # the second finds its own file
        code, out, err = pipe("run", "my data.v1.parquet", *flags, "--save", "my.yaml", "--json")
        assert code == 0, err
    assert json.loads(out)["job"] == "new"
    saved = load_job("my.yaml")
    assert identity_of(saved) == identity_of(seen[0])
    assert saved.output.path == seen[0].output.path == "here"
    assert "${PLACE}" in Path("my.yaml").read_text()
    code, _, err = pipe("run", "my data.v1.parquet", *flags, "--max-tokens", "3", "--save", "my.yaml")
    assert (code, "my.yaml: already exists" in err) == (2, True)
