"""Requirements that all lines of an input of requests share, checked when it is opened; and their rows."""

import gzip
import json

import pyarrow as pa
import pytest

from pipeline.data.files import text_blocks
from pipeline.data.prompts import PromptSpec
from pipeline.data.requests import input_checks
from pipeline.data.requests.request_row import PARAMETERS, request_schema
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.data.units import UnitSpec, make_units
from pipeline.errors import InputError
from tests.data.requests.test_openai_batch import chat, embedding, text


def put(folder, name: str, lines: list) -> str:
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(folder)


def opened(path: str, **options):
    return open_source(path, kind="openai", **options)


def named(i, make=chat, **body) -> dict:
    return {**make(**body), "custom_id": str(i)}


def test_lines_are_rows_of_one_schema_whatever_their_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 200)
    put(tmp_path, "a.jsonl", [named(0), named(1, max_tokens=3), named(2, n=4)])
    source = opened(put(tmp_path, "b.jsonl.gz", [named(3, user="u", logprobs=True)]))
    assert source.schema.equals(request_schema("chat"))
    assert source.requests == input_checks.Requests("chat", "m", ("user",), samples=True)
    spec = UnitSpec(PromptSpec(messages="messages", refused="refused"), ("custom_id",), {p: p for p in PARAMETERS})
    names = ("source_file", "source_row", "_error", "_error_message", "_params")
    found = {}
    for window in cut_windows(source, 2, 1 << 20):
        for unit in make_units(read_window(source, window, spec.columns), spec):
            found |= zip(unit.kept()["custom_id"].to_pylist(), zip(*(unit.own(n).to_pylist() for n in names)))
    assert found == {
        "0": ("a.jsonl", 0, None, None, None),
        "1": ("a.jsonl", 1, None, None, '{"max_tokens": 3}'),
        "2": ("a.jsonl", 2, None, None, '{"n": 4}'),
        "3": ("b.jsonl.gz", 0, None, None, '{"logprobs": 0}'),
    }


def test_texts_have_a_column_of_their_own(tmp_path):
    source = opened(put(tmp_path, "a.jsonl", [named(0, text)]))
    assert source.schema.equals(request_schema("text"))
    assert read_window(source, cut_windows(source, 9, 1 << 20)[0], ["prompt"])["prompt"].to_pylist() == ["Once"]


def test_texts_to_embed_keep_their_encoding(tmp_path):
    lines = [named(0, embedding, dimensions=4), named(1, embedding, dimensions=4, encoding_format="base64", user="u")]
    source = opened(put(tmp_path, "a.jsonl", [*lines, named(2, embedding, dimensions=4, input=["Twice"])]))
    found = source.requests
    assert source.schema.equals(request_schema("embedding"))
    assert found == input_checks.Requests("embedding", "m", ("user",), dimensions=4)
    assert (found.first_line, found.url) == (str(tmp_path / "a.jsonl:1"), "/v1/embeddings")
    rows = read_window(source, cut_windows(source, 9, 1 << 20)[0], ["input", "encoding_format"]).to_pydict()
    assert (rows["input"], rows["encoding_format"]) == (["Once", "Once", "Twice"], [None, "base64", None])


@pytest.mark.parametrize(("files", "message"), [
    ({"a.jsonl": [named(1), named(2), named(1)]}, r"a\.jsonl:3: custom_id '1' is also used by \S+a\.jsonl:1"),
    ({"a.jsonl": [named(1), b"", named("é")], "b.jsonl": [named(3), named("é")], "c.jsonl": [named(4)]},
     r"b\.jsonl:2: custom_id 'é' is also used by \S+a\.jsonl:3"),
    ({"a.jsonl": [named("x" * 100_000)], "b.jsonl.gz": [named("x" * 100_000)]},
     r"b\.jsonl\.gz:1: custom_id 'x{80}'\.\.\. is also used by \S+a\.jsonl:1"),
    ({"a.jsonl": [named(1), {"method": "POST"}]}, r"a\.jsonl:2: no custom_id.*input\.format: openai\)"),
    ({"a.jsonl": [named(1)], "b.jsonl": [named(2, model="other")]},
     r"b\.jsonl:1: body\.model is 'other', but 'm' in \S+a\.jsonl:1"),
    ({"a.jsonl": [named(1), named(2, text)]}, r"a\.jsonl:2: url is '/v1/completions', but '/v1/chat"),
    ({"a.jsonl": [named(1, text), named(2, embedding)]}, r"a\.jsonl:2: url is '/v1/embeddings', but .* in \S+a\.jsonl"),
    ({"a.jsonl": [named(1, embedding, dimensions=4)], "b.jsonl": [named(2, embedding)]},
     r"b\.jsonl:1: body\.dimensions is missing, but 4 in \S+a\.jsonl:1; all lines"),
    ({"a.jsonl": [named(1, embedding, dimensions=0)]}, r"a\.jsonl:1: body\.dimensions: expected .* at least 1, got 0"),
    ({"a.jsonl": [{"custom_id": "1", "url": "/v1/responses"}]}, r"a\.jsonl:1: url '/v1/responses' is not supported"),
    ({"a.jsonl": [{"custom_id": "1"}]},
     r"a\.jsonl: contains no request of OpenAI's Batch API; expected lines such as"),
    ({"a.jsonl": [{"custom_id": "1", "url": "https://x.example/v1/answers"}]},
     r"contains no request .*the url of \S+a\.jsonl:1 is 'https://x.example/v1/answers'; expected lines such as"),
    ({"a.jsonl": []}, r"contains no request"),
])  # fmt: skip
def test_an_input_is_refused_with_its_lines_named(tmp_path, files, message):
    for name, lines in files.items():
        path = put(tmp_path, name, lines)
    with pytest.raises(InputError, match=message):
        opened(path)
    with pytest.raises(InputError, match=message):
        opened(path, on_corrupt="skip")


def test_equal_hashes_of_different_ids_are_not_duplicates(tmp_path, monkeypatch):
    monkeypatch.setattr(input_checks, "_hash", lambda custom_id: len(custom_id))
    path = put(tmp_path, "a.jsonl", [named("aa"), named("bb"), named("c")])
    assert opened(path).num_rows == 3
    put(tmp_path, "b.jsonl", [named("bb")])
    with pytest.raises(InputError, match=r"b\.jsonl:1: custom_id 'bb' is also used by \S+a\.jsonl:2"):
        opened(path)


def test_another_format_is_refused_by_name(tmp_path):
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: input\.format: openai requires JSON Lines"):
        opened(str(tmp_path))
