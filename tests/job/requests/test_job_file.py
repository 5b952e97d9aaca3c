"""The job file of a job of requests: its own settings, and those that only its lines may set."""

import re

import pytest

from pipeline.config.identity import identity_of
from pipeline.errors import ConfigError
from pipeline.job.planning.resolution import resolve_job
from pipeline.job.preview.validation import validate_job
from tests.job.conftest import run
from tests.job.requests.lines import CHAT, EMBEDDINGS, TEXT, put, request

pytestmark = pytest.mark.usefixtures("without_ray")


def test_the_format_is_in_the_jobs_identity(batch):
    expected = {"columns": ["custom_id"], "limit": None, "format": "openai", "when": None}
    assert identity_of(batch.config())["input"] == expected


def test_defaults_for_lines_without_values(batch):
    del batch.settings["sampling"]

    def resolved(**sampling):
        job = resolve_job(batch.config(sampling=sampling)).resolved()
        return job.params.max_tokens, job.params.temperature, job.prompt.column, job.prompt.chat is None

    assert resolved() == (4096, 1.0, None, False)
    assert resolved(temperature=0.0) == (4096, 0.0, None, False)
    (batch.folder / "in" / "b.jsonl").unlink()
    put(batch, "a.jsonl", [request(0, TEXT)])
    assert resolved() == (16, 1.0, "prompt", True)


def test_a_job_file_that_sets_values_of_lines_is_refused(batch):
    prompt = {"column": "x"}
    for sections, message in [
        ({"prompt": prompt}, r"job\.yaml:\d+: prompt\.column: the lines of input\.format openai are"),
        ({"sampling": {"max_tokens": prompt}}, r"sampling\.max_tokens: the lines of .* set their own values"),
        # all mistakes at once
        ({"prompt": prompt, "input": {"columns": []}}, r"(?s)input\.columns: must include custom_id.*prompt\.column: "),
        ({"input": {"format": "openai-batch"}}, r"input\.format: expected one of rows, openai, pdf; got"),
    ]:
        with pytest.raises(ConfigError, match=message):
            batch.config(**sections)


def test_chat_settings_for_texts_are_refused(batch):
    (batch.folder / "in" / "b.jsonl").unlink()
    put(batch, "a.jsonl", [request(0, TEXT)])
    with pytest.raises(ConfigError, match=r"prompt\.chat: the lines are for /v1/completions"):
        run(batch, prompt={"chat": {"system": "x"}})


def test_lines_and_task_must_fit(embedding):
    for url, section, message in [
        (EMBEDDINGS, {"task": {"type": "generate"}}, r"task\.type: generate, but \S+a\.jsonl:1 is for /v1/embeddings"),
        (EMBEDDINGS, {"task": {"dimensions": 3}}, r"task\.dimensions: 3, but \S+:1 has body\.dimensions 4"),
        (EMBEDDINGS, {"prompt": {"chat": True}}, r"prompt\.chat: the lines are for /v1/embeddings, which has no chats"),
        (CHAT, {}, r"task\.type: embed, but \S+a\.jsonl:1 is for /v1/chat/completions; use task: generate"),
    ]:
        put(embedding, "a.jsonl", [request(0, url, **({"dimensions": 4} if url == EMBEDDINGS else {}))])
        with pytest.raises(ConfigError, match=message):
            run(embedding, **section)
        problems = [
            f"{mistake.key}: {mistake.problem}" for mistake in validate_job(embedding.config(**section)).mistakes
        ]
        assert [text for text in problems if re.search(message, text)], problems
    with pytest.raises(ConfigError, match=r"input\.format: the lines of format openai are requests for completions or"):
        embedding.config(task={"type": "score"})


def test_ignored_fields_of_lines_are_reported(batch):
    _, statuses = run(batch)
    assert [s.phase for s in statuses if "have no effect: user" in s.phase]
    found = validate_job(batch.config())
    assert found.facts["requests"] == {"endpoint": "chat", "model": "gpt-x", "ignored": ["user"]}
