"""What the job file of a job of requests says, and what only its lines say."""

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
    assert identity_of(batch.config())["input"] == {"columns": ["custom_id"], "limit": None, "format": "openai"}


def test_values_for_lines_that_do_not_say(batch):
    del batch.settings["sampling"]

    def resolved(**sampling):
        job = resolve_job(batch.config(sampling=sampling)).resolved()
        return job.params.max_tokens, job.params.temperature, job.prompt.column, job.prompt.chat is None

    assert resolved() == (4096, 1.0, None, False)
    assert resolved(temperature=0.0) == (4096, 0.0, None, False)
    (batch.folder / "in" / "b.jsonl").unlink()
    put(batch, "a.jsonl", [request(0, TEXT)])
    assert resolved() == (16, 1.0, "prompt", True)


def test_a_job_file_that_says_what_lines_say_is_refused(batch):
    prompt = {"column": "x"}
    for sections, says in [
        ({"prompt": prompt}, r"job\.yaml:\d+: prompt\.column: the lines of input\.format openai are"),
        ({"sampling": {"max_tokens": prompt}}, r"sampling\.max_tokens: the lines of .* set their own values"),
        # all that is wrong, at once
        ({"prompt": prompt, "input": {"columns": []}}, r"(?s)input\.columns: must include custom_id.*prompt\.column: "),
        ({"input": {"format": "openai-batch"}}, r"input\.format: expected one of rows, openai; got"),
    ]:
        with pytest.raises(ConfigError, match=says):
            batch.config(**sections)


def test_chats_are_not_asked_of_texts(batch):
    (batch.folder / "in" / "b.jsonl").unlink()
    put(batch, "a.jsonl", [request(0, TEXT)])
    with pytest.raises(ConfigError, match=r"prompt\.chat: the lines are for /v1/completions"):
        run(batch, prompt={"chat": {"system": "x"}})


def test_lines_and_task_have_to_fit(embedding):
    for url, section, says in [
        (EMBEDDINGS, {"task": {"type": "generate"}}, r"task\.type: generate, but \S+a\.jsonl:1 is for /v1/embeddings"),
        (EMBEDDINGS, {"task": {"dimensions": 3}}, r"task\.dimensions: 3, but \S+:1 has body\.dimensions 4"),
        (EMBEDDINGS, {"prompt": {"chat": True}}, r"prompt\.chat: the lines are for /v1/embeddings, which has no chats"),
        (CHAT, {}, r"task\.type: embed, but \S+a\.jsonl:1 is for /v1/chat/completions; use task: generate"),
    ]:
        put(embedding, "a.jsonl", [request(0, url, **({"dimensions": 4} if url == EMBEDDINGS else {}))])
        with pytest.raises(ConfigError, match=says):
            run(embedding, **section)
        told = [f"{mistake.key}: {mistake.problem}" for mistake in validate_job(embedding.config(**section)).mistakes]
        assert [text for text in told if re.search(says, text)], told
    with pytest.raises(ConfigError, match=r"input\.format: the lines of format openai are requests for completions or"):
        embedding.config(task={"type": "score"})


def test_what_the_lines_ignore_is_said(batch):
    _, statuses = run(batch)
    assert [s.phase for s in statuses if "have no effect: user" in s.phase]
    found = validate_job(batch.config())
    assert found.facts["requests"] == {"endpoint": "chat", "model": "gpt-x", "ignored": ["user"]}
