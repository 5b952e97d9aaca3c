"""The output of a job of requests in the form of its API, as the API's own clients read it."""

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from pipeline.data.output.parts import PartStore
from pipeline.engine.samples import sample_seed
from pipeline.engine.tasks import Embed, VectorResult
from pipeline.errors import InputError, OutputError
from pipeline.job.actor.tokenize import row_seed
from pipeline.job.output.convert import convert, default_errors_path
from tests.faults.store import FaultyStore
from tests.job.conftest import Job, run
from tests.job.fake_engine import answer, result_of, text_of
from tests.job.requests.lines import CHAT, TEXT, converted, put, request, tokens_of

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.mark.parametrize(
    ("url", "kind", "form"),
    [(CHAT, ChatCompletion, "lists"), (TEXT, Completion, "lists"), (CHAT, ChatCompletion, "rows")],
)
def test_several_choices_of_a_line_are_answered_and_converted(batch, url, kind, form):
    """Lines for several choices make the output's texts lists, with one item for lines of one choice; or each choice is
    a row."""
    batch.settings["output"]["samples_as"] = form
    wanted = {"logprobs": 0} if url == TEXT else {"logprobs": True}
    lines = [request(i, url, max_tokens=6, **({"n": 3, **wanted} if i == 1 else {})) for i in range(3)]
    put(batch, "a.jsonl", [*lines, request(3, url, n=2, temperature=0)])
    (batch.folder / "in" / "b.jsonl").unlink()
    report, _ = run(batch)
    assert (report.rows.written, report.rows.errors) == (4, 1)
    rows = {row["custom_id"]: row for row in batch.table().to_pylist()}
    assert batch.table().num_rows == (6 if form == "rows" else 4)
    assert rows["id-3"]["error_message"].startswith("sampling.n = 2: expected 1 with temperature 0")
    good, bad = converted(batch)
    assert [line["custom_id"] for line in bad] == ["id-3"]
    bodies = {line["custom_id"]: kind.model_validate(line["response"]["body"], strict=True) for line in good}
    assert {name: [choice.index for choice in body.choices] for name, body in bodies.items()} == {
        "id-0": [0], "id-1": [0, 1, 2], "id-2": [0]
    }  # fmt: skip
    prompt = list(("<system>Be brief.<user>é 1" if url == CHAT else "é 1").encode())
    seed = row_seed(0, "a.jsonl", 1)
    expected = [answer(prompt, sample_seed(seed, index), 6) for index in range(3)]
    texts = [choice.message.content if url == CHAT else choice.text for choice in bodies["id-1"].choices]
    assert texts == [text_of(ids) for ids in expected]
    found = [choice.logprobs for choice in bodies["id-1"].choices]
    assert [len(one.content if url == CHAT else one.tokens) for one in found] == [len(ids) for ids in expected]
    usage = bodies["id-1"].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), sum(map(len, expected)))


@pytest.mark.parametrize(("url", "form"), [(CHAT, "rows"), (TEXT, "lists")])
def test_a_line_gets_the_log_probabilities_of_its_own_prompt(batch, url, form):
    """All choices share them; lines that request none have none, and a wrong number is an error of its line."""
    batch.settings["output"]["samples_as"] = form
    own = [{}, {"prompt_logprobs": 0, "n": 2}, {"prompt_logprobs": 2}, {"prompt_logprobs": 101}]
    put(batch, "a.jsonl", [request(i, url, max_tokens=6, **given) for i, given in enumerate(own)])
    (batch.folder / "in" / "b.jsonl").unlink()
    run(batch)
    good, bad = converted(batch)
    assert [line["custom_id"] for line in bad] == ["id-3"]
    assert "sampling.prompt_logprobs = 101: expected" in bad[0]["response"]["body"]["error"]["message"]
    bodies = {line["custom_id"]: line["response"]["body"] for line in good}
    assert "prompt_logprobs" not in str(bodies["id-0"])
    for i, num_choices in ((1, 2), (2, 1)):
        body = bodies[f"id-{i}"]
        found = [body] if url == CHAT else body["choices"]
        assert len(found) == (1 if url == CHAT else num_choices)
        ids = list((f"<system>Be brief.<user>é {i}" if url == CHAT else f"é {i}").encode())
        for each in found:
            first, *others = each["prompt_logprobs"]
            assert (first, [next(iter(t)) for t in others]) == (None, list(map(str, ids[1:])))
            assert all((t[str(token)]["rank"] is None) == (i == 1)
                       for t, token in zip(each["prompt_logprobs"][1:], ids[1:]))  # fmt: skip


def test_the_clients_of_the_api_can_read_the_converted_output(batch):
    run(batch)
    good, bad = converted(batch)
    assert {line["custom_id"] for line in good} | {line["custom_id"] for line in bad} == {f"id-{i}" for i in range(40)}
    assert len(good) + len(bad) == 40
    ids = set()
    for line in good:
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["response"].keys() == {"status_code", "request_id", "body"}
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert body.to_dict() == line["response"]["body"], "a field that the client does not know"
        i = int(line["custom_id"].removeprefix("id-"))
        max_tokens = 9 if i == 4 else 3 + i % 5 if i % 2 else 6
        tokens = tokens_of(i, max_tokens, 11 if i == 4 else None)
        (choice,) = body.choices
        assert choice.message.content == text_of(tokens)
        assert choice.finish_reason == ("length" if len(tokens) == max_tokens else "stop")
        assert body.usage is not None
        assert body.usage.completion_tokens == len(tokens)
        assert body.usage.prompt_tokens == len(f"<system>Be brief.<user>é {i}".encode())
        assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
        assert body.usage.prompt_tokens_details is not None
        assert body.usage.prompt_tokens_details.cached_tokens == 0
        if i == 5:
            assert choice.logprobs is not None
            (first, *_) = choice.logprobs.content or ()
            assert (first.token, first.logprob, len(first.top_logprobs)) == (f"token_id:{tokens[0]}", -0.5, 2)
        else:
            assert choice.logprobs is None
        ids |= {line["id"], line["response"]["request_id"], body.id}
    assert len(ids) == 3 * len(good)
    found = {line["custom_id"]: line["response"] for line in bad}
    codes = {name: response["status_code"] for name, response in found.items()}
    assert codes == {"id-6": 400, "id-7": 400, "id-8": 400}
    error = found["id-6"]["body"]["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert error["message"].startswith("body.tools")
    before = [(batch.folder / name).read_bytes() for name in ("answers.jsonl", "answers.errors.jsonl")]
    assert converted(batch) == (good, bad), "the same call reuses its files"
    assert converted(batch, "again.jsonl") == (good, bad), "ids are the same each time"
    assert [(batch.folder / name).read_bytes() for name in ("again.jsonl", "again.errors.jsonl")] == before
    assert not [p for p in batch.folder.iterdir() if p.name.endswith(".partial")]


def test_texts_are_text_completions(batch):
    (batch.folder / "in" / "b.jsonl").unlink()
    lines = [request(i, TEXT) for i in range(4)]
    lines[1]["body"] |= {"logprobs": 1}
    put(batch, "a.jsonl", lines)
    run(batch, sampling={"max_tokens": 6}, output={"rename": {"generated_text": "answer", "source_row": "line"}})
    good, bad = converted(batch)
    assert bad == []
    assert not (batch.folder / "answers.errors.jsonl").exists()
    for i, line in enumerate(good):
        body = Completion.model_validate(line["response"]["body"], strict=True)
        assert body.to_dict() == line["response"]["body"]
        tokens = answer(list(f"é {i}".encode()), row_seed(0, "a.jsonl", i), 6)
        assert body.choices[0].text == text_of(tokens)
        logprobs = body.choices[0].logprobs
        assert (logprobs and logprobs.tokens) == ([f"token_id:{t}" for t in tokens] if i == 1 else None)


def test_texts_are_embedded_and_converted(embedding):
    run(embedding)
    assert embedding.table().column_names[:3] == ["custom_id", "encoding_format", "embedding"]
    good, bad = converted(embedding)
    assert [line["custom_id"] for line in bad] == ["id-6"]
    assert bad[0]["response"]["body"]["error"]["message"].startswith("body.input: expected one text, got a list of 2")
    assert {line["custom_id"] for line in good} == {f"id-{i}" for i in range(6)}
    for line in good:
        i, body = int(line["custom_id"].removeprefix("id-")), line["response"]["body"]
        prompt, (found,) = list(f"é {i}".encode()), body["data"]
        if i % 3 == 2:  # as the client decodes it: its types know lists alone
            found["embedding"] = np.frombuffer(base64.b64decode(found["embedding"]), "<f4").tolist()
        read = CreateEmbeddingResponse.model_validate(body, strict=True)
        assert read.to_dict() == body, "a field that the client does not know"
        expected = result_of(prompt, Embed("last", True, 4))
        assert isinstance(expected, VectorResult)
        assert read.data[0].embedding == expected.values.tolist()
        assert (read.usage.prompt_tokens, read.usage.total_tokens) == (len(prompt), len(prompt))


def test_a_row_that_ends_the_engine_is_the_engines_fault(batch):
    batch.fake(kill="é 30")
    run(batch)
    _, bad = converted(batch)
    found = {line["custom_id"]: line["response"] for line in bad}["id-30"]
    assert (found["status_code"], found["body"]["error"]["type"]) == (500, "server_error")
    assert found["body"]["error"]["code"] == "engine_failure"


def test_a_line_that_is_no_json_has_no_custom_id(batch):
    put(batch, "c.jsonl", ['{"custom_id": '])
    with pytest.raises(InputError, match=r"c\.jsonl:1: not JSON"):
        run(batch)
    run(batch, input={"on_corrupt": "skip"})
    (lost,) = [line for line in converted(batch)[1] if line["custom_id"] is None]
    assert lost["response"]["body"]["error"]["message"].startswith("line 1: not JSON")


def test_what_cannot_be_converted(batch, job, tmp_path):
    with pytest.raises(OutputError, match="no _SUCCESS"):
        converted(batch)
    run(batch)
    store = PartStore(str(batch.output))
    (tmp_path / "taken.jsonl").write_text("mine")
    with pytest.raises(OutputError, match=r"--output \S+taken\.jsonl: already exists and is never replaced"):
        convert(store, str(tmp_path / "taken.jsonl"), str(tmp_path / "e.jsonl"), {})
    assert (tmp_path / "taken.jsonl").read_text() == "mine"
    with pytest.raises(OutputError, match="same file as --output"):
        convert(store, str(tmp_path / "x.jsonl"), str(tmp_path / "x.jsonl"), {})
    with pytest.raises(OutputError, match="is a folder"):
        convert(store, str(tmp_path), str(tmp_path / "e2.jsonl"), {})
    batch.parts()[0].unlink()
    with pytest.raises(OutputError, match=r"it has .* parts, but _SUCCESS counts"):
        converted(batch, "more.jsonl")
    assert not list(tmp_path.glob("more*"))


@pytest.mark.parametrize(("ending", "codec"), [("gz", "gzip"), ("zst", "zstd")])
def test_files_are_compressed_by_their_names(batch, ending, codec):
    run(batch)
    converted(batch)
    plain = [(batch.folder / name).read_bytes() for name in ("answers.jsonl", "answers.errors.jsonl")]
    for _ in range(2):  # the same call reuses its files
        done = convert(PartStore(str(batch.output)), str(batch.folder / f"answers.jsonl.{ending}"), None, {})
        assert done.errors == str(batch.folder / f"answers.errors.jsonl.{ending}")
        for name, text in zip((done.output, done.errors), plain, strict=True):
            with pa.input_stream(name, compression=codec) as file:
                assert file.read() == text
            assert Path(name).stat().st_size < len(text)
    assert not list(batch.folder.glob(".*"))


def test_an_output_without_custom_id_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    other = Job(tmp_path / "other").rows(["a"])
    run(other)
    with pytest.raises(OutputError, match="has no column custom_id"):
        converted(other)


def test_the_command_writes_both_files(batch, pipe):
    run(batch)
    path = str(batch.folder / "x.jsonl")
    code, out, err = pipe("convert", str(batch.output), "--output", path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "output": path, "errors": str(batch.folder / "x.errors.jsonl"), "completed_rows": 37, "error_rows": 3,
    }  # fmt: skip


def test_files_in_a_store_are_created_and_never_replaced(batch):
    run(batch)
    converted(batch)
    parts = PartStore(str(batch.output))
    with FaultyStore() as store:
        bucket, url = store.bucket, store.bucket.url("deep/answers.jsonl")
        for _ in range(2):
            done = convert(parts, url, default_errors_path(url), dict(bucket.storage))
            assert (done.completed_rows, done.error_rows) == (37, 3)
        for name in bucket.tags("deep/"):
            assert bucket.get(f"deep/{name}") == (batch.folder / name).read_bytes()
        assert len(bucket.tags()) == 2
        bucket.put("deep/answers.jsonl", b"mine")
        with pytest.raises(OutputError, match="already exists"):
            convert(parts, url, default_errors_path(url), dict(bucket.storage))
        assert bucket.get("deep/answers.jsonl") == b"mine"


def test_default_names_of_error_files():
    assert default_errors_path("s3://b.c/answers.jsonl") == "s3://b.c/answers.errors.jsonl"
    assert default_errors_path("a.b/answers") == "a.b/answers.errors"
    assert default_errors_path("a.b/answers.jsonl.zst") == "a.b/answers.errors.jsonl.zst"
