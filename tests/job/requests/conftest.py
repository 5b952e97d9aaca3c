"""Jobs whose input is a file of requests."""

import pytest

from pipeline.data.files import text_blocks
from tests.job.requests.lines import EMBEDDINGS, FORMAT, put, request
from tests.job.row.test_tasks import TaskJob


@pytest.fixture
def batch(job, monkeypatch):
    """A job of requests: no prompt section, two files, some lines with values of their own, three that are refused."""
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 300)
    job.settings["input"].update(FORMAT)
    del job.settings["prompt"]
    (job.folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    lines = [request(i, **({"max_tokens": 3 + i % 5} if i % 2 else {}), user="u") for i in range(40)]
    lines[4]["body"] |= {"seed": 11, "max_tokens": 9}
    lines[5]["body"] |= {"logprobs": True, "top_logprobs": 2}
    lines[6]["body"]["tools"] = [{"type": "function"}]
    lines[7]["body"] = None
    lines[8]["body"]["temperature"] = -1
    put(job, "a.jsonl", lines[:25])
    put(job, "b.jsonl", lines[25:])
    return job


@pytest.fixture
def embedding(tmp_path) -> TaskJob:
    """A job of requests for embeddings of four numbers, in the two encodings, and one that is refused."""
    job = TaskJob(tmp_path, "embed")
    job.settings["input"].update(format="openai")
    del job.settings["prompt"], job.settings["input"]["columns"]
    encodings = (None, "float", "base64")
    lines = [request(i, EMBEDDINGS, dimensions=4, encoding_format=encodings[i % 3]) for i in range(6)]
    put(job, "a.jsonl", [*lines, request(6, EMBEDDINGS, dimensions=4, input=["a", "b"])])
    return job
