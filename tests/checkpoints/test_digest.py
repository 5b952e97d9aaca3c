"""Model folder: local, or downloaded once from a store and checked."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from pipeline.checkpoints import cache as model_cache
from pipeline.checkpoints.cache import MANIFEST, cache_folder, check_copy
from pipeline.checkpoints.digest import model_digest
from pipeline.checkpoints.locate import resolve_model
from pipeline.demo import demo_model
from pipeline.errors import EnvironmentFailed, ModelError
from tests.faults.store import KEY, SECRET, FaultyStore
from tests.threads import at_once


@pytest.fixture(scope="module")
def store():
    with FaultyStore() as store:
        for path in demo_model("draft").iterdir():
            store.bucket.upload(path, f"model/{path.name}")
        yield store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    """Return the cache folder. Ranges are small, so that a file of 2 MB has many."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_cache, "RANGE_BYTES", 400_000)
    yield cache_folder()
    if "store" in request.fixturenames:
        request.getfixturevalue("store").proxy.calm()


def resolve(store: FaultyStore, folder: str = "model", **options) -> Path:
    return resolve_model(store.bucket.url(folder), {"s3": store.bucket.storage}, **options)


def gets(store: FaultyStore) -> int:
    return sum(r.startswith("GET /bucket/model/") for r in store.proxy.requests)


def visible(cache: Path) -> list[str]:
    return [p.name for p in cache.iterdir() if p.is_dir()]


def test_local_folders_are_used_and_missing_ones_are_refused(tmp_path):
    assert resolve_model("demo:draft") == demo_model("draft").resolve()
    assert resolve_model(f"file://{demo_model('draft')}") == demo_model("draft").resolve()
    with pytest.raises(ModelError, match="is an empty folder"):
        resolve_model(str(tmp_path))
    assert cache_folder({}) == Path.home() / ".cache" / "parquet-batch-inference" / "models"


def test_a_model_is_downloaded_once(store, cache):
    logged: list[str] = []
    for fault in ("truncated", "slow_down", "server_error", "error_body", "reset", "slow"):
        store.proxy.add(fault, "model.safetensors", "GET")
    store.bucket.put("model/README.md", b"not of the model")
    store.bucket.put("model/onnx/model.safetensors", b"nor this")
    folder = resolve(store, log=logged.append)
    local = demo_model("draft")
    assert folder.parent == cache
    assert sorted(p.name for p in folder.iterdir()) == sorted([MANIFEST, *(p.name for p in local.iterdir())])
    assert all((folder / p.name).read_bytes() == p.read_bytes() for p in local.iterdir())
    assert model_digest(folder) == model_digest(local)
    assert any("model.safetensors" in text and "GB" in text for text in logged)
    before = gets(store)
    assert before > 5
    assert resolve(store, log=logged.append) == folder
    assert gets(store) == before
    text = (folder / MANIFEST).read_text()
    assert SECRET not in text
    assert KEY not in text


def test_another_model_of_the_same_url_is_another_entry(store, cache):
    first = resolve(store)
    old = store.bucket.get("model/config.json")
    store.bucket.put("model/config.json", old + b"\n")
    second = resolve(store)
    store.bucket.put("model/config.json", old)
    assert first != second
    assert resolve(store) == first


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_a_damaged_entry_is_downloaded_again(store, cache, damage):
    folder = resolve(store)
    path = folder / (MANIFEST if damage == "manifest" else "model.safetensors")
    good = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(good[:200] + bytes([good[200] ^ 1]) + good[201:] if damage == "flip" else good[:-1])
    assert resolve(store) == folder
    assert len(path.read_bytes()) == len(good)
    assert damage == "manifest" or path.read_bytes() == good
    assert check_copy(store.bucket.url("model"), store.bucket.storage, cache) == (folder, True)
    assert visible(cache) == [folder.name]


def test_a_start_compares_sizes_and_times_and_a_check_reads_everything(store, cache, monkeypatch):
    url, storage = store.bucket.url("model"), store.bucket.storage
    assert check_copy(url, storage, cache) is None
    folder = resolve(store)
    read: list[str] = []
    real = model_cache._sha256
    monkeypatch.setattr(model_cache, "_sha256", lambda path: read.append(path.name) or real(path))
    assert resolve(store) == folder
    assert read == []
    os.utime(folder / "model.safetensors")  # like a copy: its bytes are read once
    assert resolve(store) == resolve(store) == folder
    assert read == ["model.safetensors"]
    assert check_copy(url, storage, cache) == (folder, True)
    path, status = folder / "config.json", (folder / "config.json").stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # like a failing disk
    assert resolve(store) == folder
    assert check_copy(url, storage, cache) == (folder, False)


def test_a_file_replaced_during_the_download_is_an_error(store, monkeypatch):
    old, read = store.bucket.get("model/config.json"), model_cache._read_ranges

    def replacing(*args):
        store.bucket.put("model/config.json", old + b"\n")
        read(*args)

    monkeypatch.setattr(model_cache, "_read_ranges", replacing)
    with pytest.raises(EnvironmentFailed, match="was replaced during the download"):
        resolve(store)
    store.bucket.put("model/config.json", old)


def test_concurrent_processes_download_once(store, cache):
    """Each thread has its own lock, like a process."""
    before = gets(store)
    assert len(set(at_once(3, lambda _: resolve(store)))) == 1
    assert gets(store) - before == 10


def test_without_locks_one_rename_wins(store, cache, monkeypatch):
    entered = threading.Barrier(2)

    def no_locks(*_):
        entered.wait(20)
        raise OSError("no locks")

    monkeypatch.setattr(model_cache.fcntl, "flock", no_locks)
    found = at_once(2, lambda _: resolve(store))
    assert len(set(found)) == 1
    assert model_digest(found[0]) == model_digest(demo_model("draft"))


def test_a_killed_download_leaves_no_usable_entry(store, cache, monkeypatch):
    store.proxy.add("denied", "tokenizer.json", "GET", 10)
    with pytest.raises(ModelError, match=r"model\.path s3://bucket/model: access denied .*rights to list"):
        resolve(store)
    assert visible(cache) == []
    store.proxy.calm()
    folder = resolve(store)
    left = cache / f".{folder.name}.0123456789abcdef"  # left by a killed writer
    left.mkdir()
    (left / "config.json").write_text("{}")
    (folder / MANIFEST).unlink()
    assert resolve(store) == folder
    assert visible(cache) == [folder.name]


def test_a_disk_too_small_for_the_model(store, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(model_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        EnvironmentFailed, match=r"needs 0\.0 GB, but only 0\.0 GB are free; free some space, or set PIPELINE_CACHE"
    ):
        resolve(store)


def test_a_folder_of_pickles_is_refused(store):
    store.bucket.put("pickles/config.json", b"{}")
    store.bucket.put("pickles/pytorch_model.bin", b"")
    with pytest.raises(ModelError, match=r"only pickles \(pytorch_model\.bin\), which can run code"):
        resolve(store, "pickles")
    store.bucket.put("empty/config.json", b"{}")
    with pytest.raises(ModelError, match="no weights; expected"):
        resolve(store, "empty")
    with pytest.raises(ModelError, match=r"s3://bucket/nothing: no such folder in the store"):
        resolve(store, "nothing")
    store.bucket.put("other/x.safetensors", b"")
    with pytest.raises(ModelError, match=r"s3://bucket/other: has no config\.json"):
        resolve(store, "other")
