"""Lines of a batch API, the fake engine's answers to them, and the converted output of a job."""

import json
from pathlib import Path

from pipeline.data.output.parts import PartStore
from pipeline.job.actor.tokenize import row_seed
from pipeline.job.output.convert import convert, default_errors_path
from tests.job.fake_engine import answer

CHAT, TEXT, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
FORMAT = {"format": "openai", "columns": ["custom_id"]}


def request(i: int, url: str = CHAT, **body) -> dict:
    if url == CHAT:
        body = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"é {i}"}], **body}
    else:
        body = {"input" if url == EMBEDDINGS else "prompt": f"é {i}", **body}
    return {"custom_id": f"id-{i}", "method": "POST", "url": url, "body": {"model": "gpt-x", **body}}


def put(job, name: str, lines: list) -> None:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (job.folder / "in" / name).write_text(text)


def tokens_of(i: int, max_tokens: int = 6, seed: int | None = None) -> list[int]:
    location = ("a.jsonl", i) if i < 25 else ("b.jsonl", i - 25)
    prompt = list(f"<system>Be brief.<user>é {i}".encode())
    return answer(prompt, row_seed(0, *location) if seed is None else seed, max_tokens)


def converted(job, name: str = "answers.jsonl") -> tuple[list[dict], list[dict]]:
    path = str(job.folder / name)
    convert(PartStore(str(job.output)), path, default_errors_path(path), {})
    paths = [Path(p) for p in (path, default_errors_path(path))]
    good, bad = ([json.loads(line) for line in p.read_text().splitlines()] if p.exists() else [] for p in paths)
    return good, bad
