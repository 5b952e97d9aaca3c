"""JSON Schema of the job file: up to date, valid, complete, and consistent with the checks of the job file."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeline.config.jobfile import parse, read
from pipeline.config.schema import FILE_NAME, job_schema, schema_text
from tests.config.test_config import MINIMAL, REFUSED, ROOT

JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
SCHEMA = Draft202012Validator(job_schema())


def test_the_committed_schema_is_up_to_date():
    committed = (ROOT / "jobs" / FILE_NAME).read_text(encoding="utf-8")
    assert committed == schema_text() + "\n", "run `pipeline schema > jobs/job.schema.json`"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_our_job_files_are_valid_and_name_the_schema(path: Path):
    assert path.read_text().startswith(f"# yaml-language-server: $schema={FILE_NAME}\n")
    SCHEMA.validate(read(path).data)


def test_every_key_has_a_description_an_example_and_a_default_or_is_required():
    schema = job_schema()
    Draft202012Validator.check_schema(schema)
    schema["required"] += [*schema["else"]["required"], "model"]  # unless the job is of requests, or a server computes
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
     "task: embed", "run: {drain_timeout: 1 h 30 min}", "name:"],
)  # fmt: skip
def test_short_forms_are_accepted(more: str):
    SCHEMA.validate(parse(MINIMAL.replace("{path: demo}", "demo") + more, "job").data)


# Mistakes that no schema can see: keys that must agree with each other, and the meaning of a text.
BEYOND_A_SCHEMA = (
    "finite number of at least 0; got nan", "finite number; got nan",  # JSON has no such number
    "prompt.template: ",  # not a template
    "min_tokens 300 is more than max_tokens 256", "run.max_runtime: expected more than 0", "names no column",
    "indices, conversions and nested", "is not in the prompt", "not with messages", "special_tokens: template needs",
    "matches no path of this job", "column and messages hold", "with chat the chat template", "no embedded model",
    "only a Hugging Face id has revisions", "expected demo, demo:target", "cannot contain a user or",
    "without control characters", "the same new name", "at least two labels", "is listed twice",
    "compares completions", "speculation: has no effect", "only for method draft_model",
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_the_schema_refuses_what_the_job_file_refuses(text: str):
    beyond = any(reason in REFUSED[text] for reason in BEYOND_A_SCHEMA)
    assert SCHEMA.is_valid(parse(text, "job").data) == beyond


def test_each_exception_is_still_one():
    assert [reason for reason in BEYOND_A_SCHEMA if not any(reason in expected for expected in REFUSED.values())] == []


REQUESTS = "input: {path: data, format: openai}\nmodel: {path: demo}\noutput: {path: out}\n"


@pytest.mark.parametrize(
    ("more", "fits"),
    [("", True), ("prompt: {chat: {date: 2026-11-23}}", True),
     ("prompt: {column: a}", False), ("prompt: {messages: a}", False)],
)  # fmt: skip
def test_a_job_of_requests_has_no_source_of_prompts(more: str, fits: bool):
    assert SCHEMA.is_valid(parse(REQUESTS + more, "job").data) == fits
    assert not SCHEMA.is_valid(parse(REQUESTS.replace(", format: openai", ""), "job").data)
