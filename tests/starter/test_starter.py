"""`pipeline init`: its findings in datasets and models, and the job file that it writes."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from jsonschema import Draft202012Validator

from pipeline.config import load_job
from pipeline.config.schema import FILE_NAME, job_schema
from pipeline.demo import demo_model
from pipeline.demo.reports import PROMPT_TEMPLATE
from pipeline.errors import InputError, ModelError
from pipeline.job.preview.describe import describe
from pipeline.job.preview.validation import validate_job
from pipeline.starter import look

CHAT = [{"role": "user", "content": "Why?"}]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def data(**columns) -> None:
    pq.write_table(pa.table(columns), "data.parquet")


def model_without_chat(folder: Path) -> str:
    """Write the embedded model's small files, without a chat template and with few positions."""
    folder.mkdir()
    for file in demo_model("target").glob("*.json"):
        raw = json.loads(file.read_text())
        if file.name == "tokenizer_config.json":
            raw.pop("chat_template", None)
        if file.name == "config.json":
            raw["max_position_embeddings"] = 64
        (folder / file.name).write_text(json.dumps(raw))
    return str(folder)


DATASETS = {
    "a text and an id": ({"id": [1, 2], "text": ["one", "two"]}, "text", "template", ("id",)),
    "ids that repeat": ({"id": [1, 1], "text": ["one", "two"]}, "text", "template", ()),
    "the longest text": ({"a": ["x", "y"], "b": ["longer", "longest"]}, "b", "template", ()),
    "the usual name": ({"prompt": ["x"], "b": ["longer"]}, "prompt", "column", ()),
    "an odd name": ({"my: {text} \x1b[2J\U0001f600": ["x"]}, "my: {text} \x1b[2J\U0001f600", "column", ()),
    "a name that is not text": ({"null": ["x"]}, "null", "template", ()),
    "chats": ({"id": ["a"], "turns": [CHAT]}, "turns", "messages", ("id",)),
    "chats as JSON": ({"conversation": [json.dumps(CHAT)], "text": ["x"]}, "conversation", "messages", ()),
    "JSON that is no chat": ({"conversation": ["[1]"]}, "conversation", "template", ()),
    "a null": ({"text": [None, "x"]}, "text", "template", ()),
}


@pytest.mark.parametrize("named", DATASETS)
def test_the_written_file_is_a_job_that_fits_the_dataset(here, pipe, named):
    columns, prompt, kind, keep = DATASETS[named]
    data(**columns)
    shutil.copytree(demo_model("target"), "model")  # a copy of it may be trained on any prompt
    code, out, err = pipe("init", "jobs/my.yaml", "--input", "data.parquet", "--output", "out/x", "--model", "model")
    assert code == 0, err
    assert f"Wrote jobs/my.yaml, with {FILE_NAME} next to it" in out
    assert "pipeline validate jobs/my.yaml" in out
    seen = look("data.parquet", "model", print)
    assert (seen.prompt, seen.kind, seen.keep, seen.has_chat) == (prompt, kind, keep, True)
    assert len(seen.lengths) == sum(value is not None for value in columns[prompt])
    text = Path("jobs/my.yaml").read_text()
    assert text.startswith(f"# yaml-language-server: $schema={FILE_NAME}\n")
    assert json.loads(Path("jobs", FILE_NAME).read_text()) == job_schema()
    assert all(line.isprintable() and len(line) <= 120 for line in text.splitlines())
    Draft202012Validator(job_schema()).validate(yaml.safe_load(text))
    config = load_job("jobs/my.yaml")
    assert validate_job(config).mistakes == []
    assert config.prompt.spec().columns == (prompt,)
    assert (config.output.path, config.name) == ("out/x", "my")
    assert config.prompt.chat is not None


def test_the_embedded_model_receives_its_training_prompt(here, pipe):
    data(report=["The pump was repaired."])
    assert pipe("init", "my.yaml", "--input", "data.parquet")[0] == 0
    config, checked = load_job("my.yaml"), validate_job(load_job("my.yaml"))
    assert config.prompt.template == PROMPT_TEMPLATE
    assert config.prompt.chat is None
    assert checked.facts["first_prompt"]["text"] == PROMPT_TEMPLATE.format(report="The pump was repaired.")
    assert look("data.parquet", "demo", print).lengths == (checked.facts["first_prompt"]["tokens"],)
    data(text=["A hoist was oiled."])
    assert look("data.parquet", "demo", print).template == "{text}"
    assert pipe("init", "other.yaml", "--input", "data.parquet")[0] == 0
    assert load_job("other.yaml").prompt.template == "{text}"
    assert "field-service" not in Path("other.yaml").read_text()


def test_existing_files_are_not_replaced(here, pipe):
    data(text=["x"])
    Path("my.yaml").write_text("mine")
    Path(FILE_NAME).write_text("mine too")
    code, _, err = pipe("init", "my.yaml", "--input", "data.parquet")
    assert code == 2
    assert "my.yaml: exists already" in err
    code, out, _ = pipe("init", "other.yaml", "--input", "data.parquet")
    assert code == 0
    assert out.startswith("Wrote other.yaml. Check its")
    assert (Path("my.yaml").read_text(), Path(FILE_NAME).read_text()) == ("mine", "mine too")
    assert "ends in .yaml" in pipe("init", "job.txt", "--input", "data.parquet")[2]


def test_limits_follow_the_prompts_and_the_model(here, pipe):
    data(text=["a b c d e f g h " * 4, "short"])
    model = model_without_chat(here / "model")
    assert pipe("init", "small.yaml", "--input", "data.parquet", "--model", model)[0] == 0
    config, text = load_job("small.yaml"), Path("small.yaml").read_text()
    assert config.prompt.chat is None
    assert config.sampling.max_tokens == 16, "a quarter of what the model takes"
    assert "prompt_too_long" in text
    assert pipe("init", "large.yaml", "--input", "data.parquet")[0] == 0
    text = Path("large.yaml").read_text()
    assert load_job("large.yaml").sampling.max_tokens == 256
    assert "#   max_model_len: 512 " in text
    Path("with-limit.yaml").write_text(text.replace("# engine:\n#   max", "engine:\n  max"))
    assert load_job("with-limit.yaml").engine.max_model_len == 512


def test_an_unavailable_model_is_not_an_error(here, pipe, monkeypatch):
    data(text=["x"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in ("no-such-user/none", "s3://bucket/model"):
        name = f"{model[:2]}.yaml"
        assert pipe("init", name, "--input", "data.parquet", "--model", model)[0] == 0
        assert "The model was not inspected" in Path(name).read_text()
        assert load_job(name).model.path == model


def test_unusable_datasets_are_refused(here):
    data(number=[1])
    with pytest.raises(InputError, match="no text or chat column among number"):
        look("data.parquet", "demo", print)
    data(text=pa.array([], pa.string()))
    with pytest.raises(InputError, match="has no rows"):
        look("data.parquet", "demo", print)
    data(text=["x"])
    (here / "empty").mkdir()
    with pytest.raises(ModelError, match="an empty folder"):
        look("data.parquet", str(here / "empty"), print)
    data(messages=[CHAT])
    with pytest.raises(ModelError, match="has no chat template"):
        look("data.parquet", model_without_chat(here / "model"), print)


@pytest.mark.parametrize(("url", "body", "max_tokens"), [
    ("/v1/chat/completions", {"messages": CHAT}, 256),
    ("/v1/completions", {"prompt": "Why?"}, 16),
    ("/v1/embeddings", {"input": "Why?"}, None),
])  # fmt: skip
def test_a_file_of_requests_is_a_job_without_a_prompt(here, pipe, url, body, max_tokens):
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": {"model": "gpt-x", **body}} for i in range(3)]
    Path("requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = pipe("init", "my.yaml", "--input", "requests.jsonl")
    assert (code, "3 rows in 1 file; requests of OpenAI's Batch API" in err) == (0, True), err
    written = yaml.safe_load(Path("my.yaml").read_text())
    assert written["input"] == {"path": "requests.jsonl", "format": "openai"}
    assert "prompt" not in written
    assert written.get("sampling") == (max_tokens and {"max_tokens": max_tokens, "temperature": 1})
    assert written.get("task") == (None if max_tokens else "embed")
    Draft202012Validator(job_schema()).validate(written)
    found = validate_job(load_job("my.yaml"))
    assert (found.mistakes, found.failures) == ([], [])
    assert "requests of OpenAI's Batch API: " in describe(found)
    assert found.facts["columns"]["kept"] == (["custom_id"] if max_tokens else ["custom_id", "encoding_format"])
