"""One list of checks for all commands: `validate` lists what a run raises, and nothing else."""

import json
import pickle
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.source import open_source
from pipeline.demo import demo_model
from pipeline.errors import ConfigError, UserError
from pipeline.generate import complete, read_prompts
from pipeline.job.planning.fingerprint import FORMAT, file_digests
from pipeline.job.planning.plan import make_plan
from pipeline.job.planning.resolution import resolve_job, resolve_prompts
from pipeline.job.preview.validation import validate_job
from pipeline.job.running.run import run_job
from tests.job.conftest import TEXTS, Started, run
from tests.job.requests.lines import CHAT, TEXT, put, request
from tests.job.requests.lines import FORMAT as LINES

pytestmark = pytest.mark.usefixtures("without_ray")

ROW = {
    "id": [1, 2],
    "text": ["one", "two"],
    "error": ["a", "b"],
    "turns": [[{"role": "user", "content": "hi"}]] * 2,
    "options": [["a", "b"]] * 2,
}

ADAPTERS = {"adapters": {"short": "demo:short"}}

# Wrong sections of a job, and the keys of the mistakes.
BROKEN = [
    ({"output": {"path": "in/out"}}, ["output.path"]),
    ({"output": {"path": "foreign"}}, ["output.path"]),
    ({"output": {"path": "other"}}, ["output.path"]),
    ({"input": {"path": "nowhere"}}, ["input.path"]),
    ({"input": {"limit": 5}, "output": {"path": "appended"}}, ["input.limit", "output.path"]),
    ({"input": {**LINES, "path": "lines"}, "prompt": None, "sampling": None, "task": "embed"}, ["task.type"]),
    ({"input": {**LINES, "path": "texts"}, "prompt": {"chat": {"system": "x"}}}, ["prompt.chat"]),
    ({"prompt": {"template": "{txt}"}}, ["prompt.template"]),
    ({"prompt": {"template": None, "messages": "id"}}, ["prompt.messages"]),
    ({"prompt": {"template": None, "column": "nowhere"}}, ["prompt.column"]),
    ({"input": {"columns": ["id", "nmae"]}}, ["input.columns"]),
    ({"sampling": {"max_tokens": {"column": "text"}}}, ["sampling.max_tokens"]),
    ({"sampling": {"n": {"column": "text"}, "temperature": 1.0}}, ["sampling.n"]),
    ({"sampling": {"top_p": {"column": "nowhere"}}}, ["sampling.top_p"]),
    ({"sampling": {"structured_outputs": {"json": {"column": "id"}}}}, ["sampling.structured_outputs.json"]),
    ({"sampling": {"structured_outputs": {"choice": {"column": "text"}}}}, ["sampling.structured_outputs.choice"]),
    ({"task": {"type": "choice", "labels": {"column": "text"}}, "sampling": None}, ["task.labels"]),
    ({"task": {"type": "score", "completion": "{nowhere}"}, "sampling": None}, ["task.completion"]),
    ({"quality": {"sample": 0.5, "model": "demo", "column": "nowhere"}}, ["quality.column"]),
    ({"model": {"revision": "v1", "path": "bare"}}, ["model.revision"]),
    ({"model": {"path": "nowhere"}}, ["model.path"]),
    ({"model": {"path": "without-tokenizer"}}, ["model.path"]),
    ({"engine": {"max_model_len": 4096}}, ["engine.max_model_len"]),
    ({"model": {"path": "demo:target-awq", "quantization": "int8"}}, ["model.quantization"]),
    ({"speculation": {"method": "draft_model", "model": "nowhere"}}, ["speculation.model"]),
    ({"model": {**ADAPTERS, "adapter": {"column": "nowhere"}}}, ["model.adapter"]),
    ({"model": {**ADAPTERS, "adapter": {"column": "id"}}}, ["model.adapter"]),
    (
        {"model": {"adapters": {"x": "nowhere", "y": "in"}, "adapter": {"column": "text"}}},
        ["model.adapters.x", "model.adapters.y"],
    ),
    ({"model": {**ADAPTERS, "path": "other-shape", "adapter": "short"}}, ["model.adapters.short"]),
    (
        {"model": {**ADAPTERS, "adapter": "short"}, "quality": {"sample": 0.5, "model": "other-shape"}},
        ["quality.model"],
    ),
    ({"model": {"path": "odd-sampling"}, "sampling": {"generation_config": "model"}}, ["sampling.generation_config"]),
    ({"sampling": {"reasoning": "auto"}}, ["sampling.reasoning"]),
    ({"task": {"type": "embed", "dimensions": 5000}, "sampling": None}, ["task.dimensions"]),
    ({"task": "classify", "sampling": None}, ["task"]),
    ({"model": {"path": "bare"}, "prompt": {"chat": {}}}, ["prompt.chat"]),
    ({"prompt": {"chat": {"chat_template": "nowhere.jinja"}}}, ["prompt.chat.chat_template"]),
    ({"quality": {"sample": 0.5, "model": "nowhere"}}, ["quality.model"]),
    ({"quality": {"sample": 0.5}}, ["quality.model"]),
    ({"input": {"columns": ["id", "error"]}}, ["output.rename"]),
    (
        {"model": {"path": "nowhere"}, "prompt": {"template": "{txt}"}, "sampling": {"top_p": {"column": "x"}}},
        ["prompt.template", "sampling.top_p", "model.path"],
    ),
]


@pytest.fixture
def demo_job(job, monkeypatch):
    """A job of the embedded model, with the folders that the broken jobs name."""
    monkeypatch.chdir(job.folder)
    pq.write_table(pa.table(ROW), job.folder / "in" / "a.parquet")
    for name in ("bare", "without-tokenizer", "odd-sampling"):
        shutil.copytree(demo_model("target"), job.folder / name)
    (job.folder / "bare" / "chat_template.jinja").unlink()
    (job.folder / "without-tokenizer" / "tokenizer.json").unlink()
    values = json.loads((demo_model("target") / "config.json").read_text())
    shutil.copytree(demo_model("target"), job.folder / "other-shape")
    (job.folder / "other-shape" / "config.json").write_text(json.dumps(values | {"intermediate_size": 640}))
    (job.folder / "odd-sampling" / "generation_config.json").write_text('{"temperature": -1}')
    for name, url in (("lines", CHAT), ("texts", TEXT)):
        (job.folder / name).mkdir()
        put(job, f"../{name}/a.jsonl", [request(0, url)])
    (job.folder / "foreign").mkdir()
    (job.folder / "foreign" / "thesis.doc").write_text("")
    files = {"files": {"a.parquet": "1 bytes, 0"}, "prompt": {"chat": None}}
    for name, identity in (("other", files), ("appended", files)):
        (job.folder / name / "_pipeline").mkdir(parents=True)
        head = {"format": FORMAT, "job": "x", "fingerprint": "0", "identity": identity, "numerics": {}, "free": {}}
        (job.folder / name / "_pipeline" / "job.json").write_text(json.dumps(head))
    batch = {"format": 1, "files": file_digests(open_source(str(job.folder / "in"))), "rows": 2, "at": ""}
    (job.folder / "appended" / "_pipeline" / "appended").mkdir()
    (job.folder / "appended" / "_pipeline" / "appended" / "0001.json").write_text(json.dumps(batch))
    job.settings |= {"model": {"path": "demo"}, "sampling": {"max_tokens": 3}}
    return job


def broken(job, sections):
    settings = {name: dict(section) for name, section in job.settings.items()}
    for name, section in sections.items():
        if section is None:
            settings.pop(name, None)
        elif isinstance(section, dict):
            merged = {**settings.get(name, {}), **section}
            settings[name] = {key: value for key, value in merged.items() if value is not None}
        else:
            settings[name] = section
    if "format" in settings["input"] and "template" in settings.get("prompt", {}):
        del settings["prompt"]["template"]
    before, job.settings = job.settings, settings
    try:
        return job.config()
    finally:
        job.settings = before


def test_a_run_raises_what_validate_lists(demo_job):
    for sections, keys in BROKEN:
        config = broken(demo_job, sections)
        found = validate_job(config)
        assert [mistake.key for mistake in found.mistakes] == keys, (sections, found.mistakes)
        assert not found.failures
        first = found.mistakes[0]
        assert first.location.startswith(str(demo_job.folder / "job.yaml")), first
        before = sorted(demo_job.folder.rglob("*"))
        with pytest.raises(UserError) as raised:
            run_job(config)
        assert raised.value.problem(first.key) == first.problem, sections
        if keys != ["output.path"]:  # a run finds that one when it claims the output
            assert raised.value.key == first.key
            with pytest.raises(type(raised.value)):
                make_plan(config, "cpu")
        assert sorted(demo_job.folder.rglob("*")) == before, "nothing is written"
    assert Started.count == 0
    assert not validate_job(broken(demo_job, {})).mistakes, "what they share is no mistake"


def test_an_output_that_a_run_would_refuse_is_a_mistake_unless_an_option_allows_it(job):
    run(job.rows(TEXTS[:3]))
    assert not [m for m in validate_job(job.config()).mistakes if m.key == "output.path"]
    shutil.copytree(demo_model("target"), job.folder / "real")
    job.settings["model"] = {"path": str(job.folder / "real")}
    (mistake,) = validate_job(job.config()).mistakes
    assert mistake.key == "output.path"
    assert "was produced by a different job. Differences (recorded -> current):\n  model." in mistake.problem


def test_a_plan_of_an_output_with_appended_files_is_that_of_its_run(job):
    run(job.rows(TEXTS[:20]))
    table = pa.table({"id": [100, 101], "text": ["late", "later"]})
    pq.write_table(table, job.folder / "in" / "a.parquet")
    run(job, append=True)
    plan = make_plan(job.config(), "cpu")
    stored = json.loads((job.output / "_pipeline" / "job.json").read_text())
    assert plan.fingerprint.digest == stored["fingerprint"]
    assert [file.relative for file in plan.source.files] == ["f0.parquet", "a.parquet"]
    assert len(plan.windows) == 2


def test_a_resolved_job_keeps_the_job_file_as_written_and_can_be_pickled(demo_job):
    config = broken(demo_job, {"sampling": {"reasoning": {"start": ":", "end": ","}, "generation_config": "model"}})
    job = resolve_job(config).resolved()
    assert job.config is config
    assert job.sampling.temperature == job.params.temperature == 0
    assert "temperature" not in config.sampling.model_fields_set
    assert pickle.loads(pickle.dumps(job)).keys == job.keys


def test_generate_completes_prompts_and_does_nothing_else(demo_job):
    config = broken(demo_job, {"task": "score", "sampling": None})
    with pytest.raises(ConfigError, match=r"task: score is supported only in jobs"):
        complete(config, read_prompts(None, "hi"), None, lambda answer: None, lambda text: None)
    config = broken(demo_job, {"input": {"columns": None}, "sampling": {"max_tokens": {"column": "id"}}})
    (demo_job.folder / "rows.jsonl").write_text('{"text": "hi"}')
    with pytest.raises(ConfigError, match=r"^sampling\.max_tokens: the input has no column 'id'"):
        complete(config, read_prompts("rows.jsonl", None), None, lambda answer: None, lambda text: None)


def test_lines_of_plain_texts_need_no_chat_template_to_be_measured(demo_job):
    config = broken(demo_job, {"input": {**LINES, "path": "texts"}, "prompt": None})
    assert resolve_prompts(config, demo_job.folder / "bare").chat_template is None
    config = broken(demo_job, {"input": {**LINES, "path": "lines"}, "prompt": None})
    with pytest.raises(ConfigError, match="has no chat template"):
        resolve_prompts(config, demo_job.folder / "bare")
