"""Cached scans of JSON Lines: each version of a file is scanned once, and a change is noticed as without the cache."""

import os
from pathlib import Path

import pytest

from pipeline.data import dataset_files
from pipeline.data.files import json_lines
from pipeline.data.source import cut_windows, open_source
from tests.data.conftest import in_memory
from tests.data.requests.test_input_checks import named
from tests.data.test_json_lines import lines, put
from tests.data.test_source import BIG, rows_of
from tests.faults.store import FaultyStore

PAST = 10**18  # in nanoseconds: a file that nothing is writing
BODY = "x" * (3 << 19)  # makes a file large enough to be cached


@pytest.fixture
def scans(monkeypatch, tmp_path):
    """Return a list that gets the name of each scanned file. The cache is empty."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    names, scan = [], json_lines.scan

    def counting(*args):
        names.append(args[3])
        return scan(*args)

    for module in (json_lines, dataset_files):
        monkeypatch.setattr(module, "scan", counting)
    return names


def old(folder: str, name: str) -> str:
    os.utime(Path(folder, name), ns=(PAST, PAST))
    return str(Path(folder, name))


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_file_is_scanned_once_and_gives_the_same_source(tmp_path, scans, ending):
    rows = [{"x": n, "text": os.urandom(1 << 19).hex()} for n in range(2)]
    path = old(put(tmp_path / "in", f"a{ending}", rows), f"a{ending}")
    first, second = open_source(path), open_source(path)
    assert second == first
    assert [x for *_, x in rows_of(second, cut_windows(second, 1, BIG), "x")] == [0, 1]
    assert [file.relative for file in open_source(str(tmp_path), on_corrupt="fail").files] == [f"in/a{ending}"]
    assert scans == [f"a{ending}"]
    assert open_source(path, on_corrupt="skip").files == first.files
    assert len(scans) == 2


def test_requests_are_scanned_once_apart_from_rows(tmp_path, scans):
    path = old(put(tmp_path, "a.jsonl", [named(n, user=BODY) for n in range(3)]), "a.jsonl")
    first = open_source(path, kind="openai")
    assert open_source(path, kind="openai") == first
    assert first.requests is not None
    assert open_source(path).requests is None
    assert len(scans) == 2


def test_a_changed_file_is_scanned_again(tmp_path, scans):
    path = old(put(tmp_path, "a.jsonl", [{"x": 1, "text": BODY}]), "a.jsonl")
    found = [open_source(path)]
    with open(path, "r+b") as file:  # in place, with the same size and time of change
        file.write(b'{"x": 2')
    old(str(tmp_path), "a.jsonl")
    found.append(open_source(path))
    Path(tmp_path, "b").write_bytes(lines([{"x": 3, "text": BODY}]))
    os.utime(tmp_path / "b", ns=(PAST, PAST))
    os.replace(tmp_path / "b", path)  # another file of the same size and time
    found += [open_source(path), open_source(path)]
    os.utime(path, ns=(PAST + 1, PAST + 1))
    found.append(open_source(path))
    assert [rows_of(source, cut_windows(source, 9, BIG), "x")[0][2] for source in found[2:]] == [3, 3, 3]
    assert len({source.files[0].digest for source in found}) == 3
    assert len(scans) == 4


def test_nothing_is_saved_for_a_file_that_may_still_be_written(tmp_path, scans, monkeypatch):
    path = str(Path(put(tmp_path, "a.jsonl", [{"x": 1, "text": BODY}]), "a.jsonl"))
    for _ in range(2):
        open_source(path)
    assert len(scans) == 2
    old(str(tmp_path), "a.jsonl")
    counting = json_lines.scan

    def scan(*args):
        os.utime(path, ns=(PAST + len(scans), PAST + len(scans)))  # it changes meanwhile
        return counting(*args)

    monkeypatch.setattr(json_lines, "scan", scan)
    for _ in range(2):
        open_source(path)
    assert len(scans) == 4


@pytest.mark.parametrize("harm", ["damaged", "cut off", "a folder", "not writable"])
def test_a_bad_cache_costs_another_scan(tmp_path, scans, harm):
    path = old(put(tmp_path / "in", "a.jsonl", [{"x": 1, "text": BODY}]), "a.jsonl")
    first = open_source(path)
    (entry,) = (tmp_path / "cache/scans").iterdir()
    saved = entry.read_bytes()
    if harm == "damaged":
        entry.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    elif harm == "cut off":
        entry.write_bytes(saved[:40])
    else:
        entry.unlink()
        if harm == "a folder":
            entry.mkdir()
        else:
            entry.parent.rmdir()
            entry.parent.write_bytes(b"")
    assert open_source(path) == first
    assert len(scans) == 2
    if harm in ("damaged", "cut off"):  # replaced
        assert open_source(path) == first
        assert len(scans) == 2


def test_the_cache_is_bounded(tmp_path, scans, monkeypatch):
    monkeypatch.setattr("pipeline.data.files.scan_cache.MAX_ENTRIES", 2)
    names = [f"{name}.jsonl" for name in "abcd"]
    for name in names:
        path = old(put(tmp_path / "in", name, [{"x": 1, "text": BODY}]), name)
        open_source(path)
    assert len(list((tmp_path / "cache/scans").iterdir())) == 2
    open_source(path)
    assert scans == names


def test_objects_are_known_by_their_tag(tmp_path, scans):
    path = Path(put(tmp_path, "a.jsonl", [{"x": 1, "text": BODY}]), "a.jsonl")
    url = in_memory(path, "no-tags")
    assert open_source(url) == open_source(url)
    assert len(scans) == 2  # fsspec's memory store has no tags
    scans.clear()
    with FaultyStore() as store:
        store.bucket.upload(path, "in/a.jsonl")
        url, storage = store.bucket.url("in"), store.bucket.storage
        assert open_source(url, storage) == open_source(url, storage)
        assert len(scans) == 1
        put(tmp_path, "a.jsonl", [{"x": 2, "text": BODY}])
        store.bucket.upload(path, "in/a.jsonl")
        source = open_source(url, storage)
        assert [x for *_, x in rows_of(source, cut_windows(source, 9, BIG), "x")] == [2]
        assert len(scans) == 2
