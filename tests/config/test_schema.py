"""The job file's JSON Schema: fresh, valid, complete, and of one opinion with the job file's own checks."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeline.config.jobfile import parse, read
from pipeline.config.schema import FILE_NAME, job_schema, schema_text
from tests.cli import conftest as cli_cases
from tests.config import test_config

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
SCHEMA = Draft202012Validator(job_schema())
MINIMAL = "input: {path: data}\nprompt: {column: text}\nmodel: {path: demo}\noutput: {path: out}\n"


def test_the_committed_schema_is_fresh():
    committed = (ROOT / "jobs" / FILE_NAME).read_text(encoding="utf-8")
    assert committed == schema_text() + "\n", "run `pipeline schema > jobs/job.schema.json`"


def test_the_schema_is_valid():
    Draft202012Validator.check_schema(job_schema())


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_our_job_files_are_valid_and_name_the_schema(path: Path):
    assert path.read_text().startswith(f"# yaml-language-server: $schema={FILE_NAME}\n")
    SCHEMA.validate(read(path).data)


def test_every_key_has_a_description_an_example_and_a_default_or_is_required():
    schema = job_schema()
    schema["required"] += schema["else"]["required"]  # but of requests
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for name, key in section["properties"].items():
            assert key.get("description"), name
            assert key.get("examples"), name
            assert "default" in key or name in section["required"], name
            for example in key["examples"]:
                SCHEMA.evolve(schema={**key, "$defs": schema["$defs"]}).validate(json.loads(json.dumps(example)))


@pytest.mark.parametrize(
    "more",
    ["speculation: false", "speculation: lookup", "speculation: {method: off}", "sampling: {stop: END}",
     "sampling: {max_tokens: {column: b}}", "engine: {deterministic: off}", "engine: {kv_cache_memory_bytes: 1 MiB}",
     "task: embed", "run: {drain_timeout: 1 h 30 min}",
     "run: {spot_notice: false}", "name:"],
)  # fmt: skip
def test_short_forms_are_taken(more: str):
    SCHEMA.validate(parse(MINIMAL + more, "job").data)


@pytest.mark.parametrize(
    "more",
    ["model2: {}", "engine: {max_num_seq: 3}", "sampling: {max_tokens: true}", "sampling: {max_tokens: 0}",
     "sampling: {max_tokens: {columns: b}}", "sampling: {seed: {column: b}}", "sampling: {stop: ['']}",
     "engine: {device: gpu}", "speculation: eagle", "speculation: {num_speculative_tokens: 99}",
     "engine: {gpu_memory_utilization: 90}", "run: {drain_timeout: 60}", "run: [actors]", "name: 5",
     "task: {type: embed, labels: [a, b]}"],
)  # fmt: skip
def test_wrong_job_files_are_refused(more: str):
    assert not SCHEMA.is_valid(parse(MINIMAL + more, "job").data)


def test_a_model_is_a_bare_word_or_a_section():
    assert SCHEMA.is_valid(parse(MINIMAL.replace("{path: demo}", "demo"), "job").data)
    assert not SCHEMA.is_valid(parse(MINIMAL.replace("{path: demo}", "[demo]"), "job").data)


def test_exactly_one_source_of_prompts():
    for prompt in ("{}", "{column: a, template: 'x {b}'}"):
        assert not SCHEMA.is_valid(parse(MINIMAL.replace("{column: text}", prompt), "job").data)


def cases(test) -> list:
    """The cases that a test of the job file's own checks is given."""
    return list(next(mark for mark in test.pytestmark if mark.name == "parametrize").args[1])


REFUSED = {
    **{MINIMAL + more: expected for more, expected in cases(test_config.test_refused)},
    **{
        MINIMAL.replace(before, after): expected
        for before, after, expected in cases(test_config.test_refused_in_the_required_sections)
    },
}
# What is refused for reasons that no schema sees: keys that must agree with each other, and what a text means.
BEYOND_A_SCHEMA = (
    "min_tokens 300 is more than max_tokens 256",
    "run.max_runtime: expected more than 0",
    "got nan",  # JSON has no such number
    "names no column",
    "indices, conversions and nested",
    "is not in the prompt",
    "not with messages",
    "special_tokens: template is for",
    "no path of this job takes",
    "column and messages hold data",
    "with chat the chat template",
    "only Hugging Face ids have revisions",
    "prompt.template: ",  # no template at all
    "expected demo, demo:target",
    "no embedded model",
    "holds no user or password",
    "without control characters",
    "the same new name",
    "at least two labels",
    "is listed twice",
    "compares completions",
    "speculation: has no effect",
    "only for method draft_model",
    "targets.min_generated_per_s: has no effect",
)


@pytest.mark.parametrize("text", REFUSED)
def test_the_schema_refuses_what_the_job_file_refuses(text: str):
    beyond = any(reason in REFUSED[text] for reason in BEYOND_A_SCHEMA)
    assert SCHEMA.is_valid(parse(text, "job").data) == beyond


def test_each_exception_is_still_one():
    assert [reason for reason in BEYOND_A_SCHEMA if not any(reason in expected for expected in REFUSED.values())] == []


@pytest.mark.parametrize("text", [cli_cases.JOB, cli_cases.JOB.replace("max_tokens: 9", "max_tokens: {column: b}")])
def test_the_job_of_the_command_lines_tests_is_valid(text: str):
    SCHEMA.validate(parse(text, "job").data)


@pytest.mark.parametrize("wrong", ["max_tokens: 0", "max_tokens: nine", "tokens: 9"])
def test_the_job_of_the_command_lines_tests_is_refused_once_it_is_wrong(wrong: str):
    assert not SCHEMA.is_valid(parse(cli_cases.JOB.replace("max_tokens: 9", wrong), "job").data)


REQUESTS = "input: {path: data, format: openai}\nmodel: {path: demo}\noutput: {path: out}\n"


@pytest.mark.parametrize(
    ("more", "fits"),
    [("", True), ("prompt: {chat: {date: 2026-11-23}}", True),
     ("prompt: {column: a}", False), ("prompt: {messages: a}", False)],
)  # fmt: skip
def test_a_job_of_requests_has_no_source_of_prompts(more: str, fits: bool):
    assert SCHEMA.is_valid(parse(REQUESTS + more, "job").data) == fits
    assert not SCHEMA.is_valid(parse(REQUESTS.replace(", format: openai", ""), "job").data)
