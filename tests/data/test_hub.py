"""Datasets on the Hugging Face Hub: read by ranges at one commit, one split at a time, with advice in every error."""

import gzip
import io
import pickle
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.source import cut_windows, open_source
from pipeline.errors import EnvironmentFailed, InputError
from pipeline.stores import filesystem, hub_files
from pipeline.stores.hub_files import HubFiles
from pipeline.stores.retries import RetryCounts, RetryPolicy
from tests.data.fake_hub import Dataset, running_hub
from tests.data.test_source import BIG, rows_of

URL = "hf://datasets/org/name"


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), sink, row_group_size=2)
    return sink.getvalue()


@pytest.fixture
def hub(monkeypatch):
    with running_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        hub.datasets["org/name"] = Dataset()
        yield hub
    HubFiles.clear_instance_cache()


def texts_of(source) -> list[str]:
    return [text for *_, text in rows_of(source, cut_windows(source, 3, BIG))]


def test_a_dataset_is_read_by_ranges_at_the_commit_of_its_planning(hub):
    dataset = hub.datasets["org/name"]
    first = dataset.commit({
        "README.md": b"#", ".gitattributes": b"",
        **{f"data/train-0000{i}-of-00004.parquet": parquet(f"a{i}", f"b{i}", f"c{i}") for i in range(4)},
    })  # fmt: skip
    expected = [f"{letter}{i}" for i in range(4) for letter in "abc"]
    source = open_source(URL)
    assert source.url == f"{URL}@{first}"
    assert source.passed_over == ("README.md",)
    changed = {"data/train-00000-of-00004.parquet": parquet("other", "rows", "here")}
    second = dataset.commit({**dataset.commits[first], **changed})
    HubFiles.clear_instance_cache()  # as on another machine
    source = pickle.loads(pickle.dumps(source))
    hub.requests.clear()
    assert texts_of(source) == expected
    assert {path.split("/")[5] for _, path, _ in hub.requests if "/resolve/" in path} == {first}
    assert all(wanted is not None for _, path, wanted in hub.requests if "/resolve/" in path)
    for path, revision in ((URL, second), (f"{URL}@main", second), (f"{URL}@{first}", first), (f"{URL}/data/", second)):
        again = open_source(path)
        assert again.url.split("@")[1].split("/")[0] == revision
        same = [a.digest == b.digest for a, b in zip(again.files, source.files, strict=True)]
        assert same == [revision == first, True, True, True]


@pytest.mark.parametrize("revision", ["v1", "refs/convert/parquet", "refs%2Fconvert%2Fparquet"])
def test_folders_globs_and_files_of_a_revision(hub, revision):
    hub.datasets["org/name"].commit({"x.md": b"#"})
    files = {"a/b c/1.jsonl": b'{"text": "1"}\n', "a/2.jsonl.gz": gzip.compress(b'{"text": "2"}\n' * 3), "a/3.txt": b""}
    hub.datasets["org/name"].commit({**files, **{f"more/{i}.md": b"" for i in range(7)}}, unquote(revision))
    for path, found in {
        "a/b c/1.jsonl": ["1.jsonl"], "a/*.gz": ["2.jsonl.gz"], "**": ["a/2.jsonl.gz", "a/b c/1.jsonl"],
        "a/**/*.jsonl*": ["2.jsonl.gz", "b c/1.jsonl"], "a/b*": ["b c/1.jsonl"],
    }.items():  # fmt: skip
        source = open_source(f"{URL}@{revision}/{path}")
        assert [file.relative for file in source.files] == found
        assert texts_of(source) == ["2"] * 3 * ("2" in str(found)) + ["1"] * ("1" in str(found))


ROWS = parquet("x")
CONFIGS = [
    {"config_name": "default", "data_files": [{"split": "train", "path": ["data/*/*.parquet"]}]},
    {"config_name": "small", "data_dir": "sample", "data_files": [
        {"split": "train", "path": "train-*"}, {"split": "test", "path": ["test/*", "more/**"]}]},
    {"config_name": "other", "data_files": "other/*.parquet"},
]  # fmt: skip


@pytest.mark.parametrize(("files", "configs", "path", "choices"), [
    (["data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "data/test-0-of-1.parquet"], None, "",
     ["data/test-0-of-1.parquet", "data/train-*"]),
    (["data/train-0-of-1.parquet", "data/test-0-of-1.parquet"], None, "/data",
     ["data/test-0-of-1.parquet", "data/train-0-of-1.parquet"]),
    (["cola/train.parquet", "sst2/train.parquet"], None, "", ["cola/train.parquet", "sst2/train.parquet"]),
    (["day=1/a.parquet", "day=2/a.parquet"], None, "", []),
    (["data/attestation.parquet", "data/retrained.parquet"], None, "", []),
    (["data/a/1.parquet", "data/b/2.parquet", "other/1.parquet"], CONFIGS, "", ["data/*/*.parquet", "other/*.parquet"]),
    (["data/a/1.parquet", "data/b/2.parquet", "other/1.parquet"], CONFIGS, "/data", []),
    (["data/a/1.parquet", "sample/train-0.parquet", "sample/test/0.parquet"], CONFIGS, "@main/sample",
     ["sample/train-*", "sample/test/*", "sample/more/**"]),
    (["data/a/1.parquet", "stray.parquet"], CONFIGS, "", ["data/*/*.parquet"]),
    (["data/a/1.parquet"], [{"config_name": "broken", "data_files": [{"split": "train"}]}, 7], "", []),
])  # fmt: skip
def test_a_path_that_holds_several_splits_is_refused_with_the_choice(hub, files, configs, path, choices):
    hub.datasets["org/name"].commit(dict.fromkeys(files, ROWS))
    hub.datasets["org/name"].card = {} if configs is None else {"configs": configs}
    if not choices:
        assert open_source(URL + path).num_rows > 0
        return
    with pytest.raises(InputError, match="has several splits or configurations; choose one:") as refused:
        open_source(URL + path)
    *shown, every = str(refused.value).split("\n")[1:]
    revision = "@main" if "@" in path else ""
    assert shown == [f"  {URL}{revision}/{choice}" for choice in choices]
    assert refused.value.exit_code == 2
    assert open_source(every.removeprefix("or read all: ")).num_rows > 0
    for choice in shown:
        if "more" not in choice:  # declared, without a file
            assert open_source(choice.strip()).num_rows > 0


def test_every_refusal_of_the_hub_names_the_fix(hub, monkeypatch):
    dataset = hub.datasets["org/name"]
    dataset.commit({"a.parquet": parquet("x")})
    for path, message in {
        "hf://datasets/org/other": "no such dataset; check its name, or if it is private, set HF_TOKEN",
        f"{URL}@v2": "has no such branch, tag or commit",
        f"{URL}/b.parquet": "does not exist",
        f"{URL}/*.jsonl": "contains no files",
        "hf://datasets/squad": r"expected hf://datasets/ORG/NAME, then @REVISION",
        "hf://datasets/org/na--me": "not the name of a dataset",
    }.items():
        with pytest.raises(InputError, match=message):
            open_source(path)
    with pytest.raises(InputError, match=r"cannot be opened \(TypeError\).* its storage options \(block_size\)"):
        open_source(URL, {"block_size": 1})
    dataset.token = "secret-token"
    for options in ({}, {"token": "a-wrong-token"}):
        with pytest.raises(InputError, match="set HF_TOKEN to a token that may read it") as refused:
            open_source(URL, options)
        assert "a-wrong-token" not in str(refused.value)
    assert texts_of(open_source(URL, {"token": "secret-token"})) == ["x"]
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert texts_of(open_source(URL)) == ["x"]
    dataset.gated = "token-of-an-account-that-agreed"
    with pytest.raises(InputError, match="is gated; accept its conditions on its page, and set HF_TOKEN"):
        open_source(URL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set; unset it"):
        open_source(URL)


def test_a_hub_that_sends_small_files_as_a_whole(hub, monkeypatch):
    hub.datasets["org/name"].commit({"a.parquet": parquet("x", "y", "z")})
    hub.sends_ranges = False
    assert texts_of(open_source(URL)) == ["x", "y", "z"]
    monkeypatch.setattr(hub_files, "_MAX_WHOLE_BYTES", 10)
    with pytest.raises(EnvironmentFailed, match="the server ignores Range requests"):
        texts_of(open_source(URL))


def test_throttling_and_server_errors_are_retried_and_counted(hub, monkeypatch):
    hub.datasets["org/name"].commit({"a.parquet": parquet("x", "y", "z")})
    counts = RetryCounts()
    hub.faults += [("/api/datasets", 429), ("/paths-info", 503), ("/cdn/", 500), ("/resolve/", 429)]
    source = open_source(f"{URL}/a.parquet", retries=counts)
    assert texts_of(source) == ["x", "y", "z"]
    assert counts.counted() == {"throttled": 3, "server_error": 1}
    assert hub.faults == []


def test_a_hub_that_cannot_be_reached_is_no_mistake_of_the_user(hub, monkeypatch):
    monkeypatch.setattr(filesystem, "RetryPolicy", lambda: RetryPolicy(max_tries=2, first_wait_s=0.01))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        EnvironmentFailed, match=r"hf://datasets/org/name: gave up after .* \(connection\).*ConnectError"
    ):
        open_source(URL)
