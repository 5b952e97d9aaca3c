"""Output in an object store: one conditional PUT per part, even if its answer is lost."""

import re
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.spec import AbstractFileSystem

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import NONCE_KEY, SUCCESS, PartStore
from pipeline.errors import EnvironmentFailed, OutputError, PipelineError
from pipeline.stores import failpoints
from pipeline.stores.new_file import NewFile
from pipeline.stores.object_folder import ObjectFolder
from pipeline.stores.retries import RetryPolicy
from tests.data.output.finished_units import FP, name, result
from tests.faults.store import FaultyStore
from tests.stores.boxes import box_url
from tests.threads import at_once


@pytest.fixture(scope="module")
def faulty():
    with FaultyStore() as store:
        yield store


@pytest.fixture
def store(faulty, tmp_path):
    yield opened(faulty, tmp_path.name)
    faulty.proxy.calm()


@pytest.fixture
def local(tmp_path) -> PartStore:
    return PartStore(str(tmp_path / "out"))


@pytest.fixture
def memory(tmp_path):
    store = PartStore(box_url(tmp_path.name))
    yield store
    store.folder._fs.raw.store.clear()


@pytest.mark.parametrize(("url", "reason"), [
    ("memory://out", "memory:// exists in one process only"),
    ("dir:///out", r"cannot be opened \(ValueError\)"),
    ("zip:///tmp", r"cannot be opened \(IsADirectoryError\)"),
    ("ftp://127.0.0.1:9/out", r"cannot be opened \(ConnectionRefusedError\)"),
    ("simplecache::memory://out", "a chain of filesystems"),
])  # fmt: skip
def test_unsuitable_stores_are_refused_when_they_are_opened(tmp_path, url, reason):
    """A job, `compact` and `convert` refuse such a store, so none reports success for lost files."""
    with pytest.raises(OutputError, match=rf"^output\.path {url}: {reason}"):
        PartStore(url)
    with pytest.raises(OutputError, match=rf"^--output {url}: {reason}"):
        NewFile(f"{url}/answers.jsonl", {}, "--output")


@pytest.mark.parametrize("scheme", ["", "file:", "file://", "local://", "local:"])
def test_a_local_path_may_have_a_scheme(tmp_path, scheme):
    assert PartStore(f"{scheme}{tmp_path}/out").path == f"{tmp_path}/out"
    with NewFile(f"{scheme}{tmp_path}/x/answers.jsonl", {}, "--output") as file:
        file.publish()
    assert (tmp_path / "x/answers.jsonl").exists()


def test_a_path_that_its_library_refuses(memory, monkeypatch):
    def refuse(path: str, **_):
        raise ValueError(f"{path}: expected namespace/name")

    monkeypatch.setattr(memory.folder._fs.raw, "ls", refuse)
    with pytest.raises(OutputError, match=r"box://.*ValueError: .*expected namespace/name"):
        memory.list()


def opened(faulty: FaultyStore, folder: str) -> PartStore:
    """Open the store without waits between tries."""
    store = PartStore(faulty.bucket.url(folder), faulty.bucket.storage)
    assert isinstance(store.folder, ObjectFolder)
    store.folder._fs._policy = RetryPolicy(first_wait_s=0.001, max_wait_s=0.002)
    return store


def read(store: PartStore, unit: int = 0) -> pa.Table:
    return store.read_part(name(unit)).table


# --- many parts


def test_names_are_listed_page_by_page(faulty, store, monkeypatch):
    for unit in range(5):
        store.write(name(unit, 5), result(5))
    store.folder.create("_pipeline/job.json", b"{}")
    raw, pages = store.folder._fs.raw, []
    call = raw.call_s3

    def two_at_a_time(method, **request):
        if method == "list_objects_v2":
            request["MaxKeys"] = 2
        answer = call(method, **request)
        pages.append(answer)
        return answer

    monkeypatch.setattr(raw, "call_s3", two_at_a_time)
    assert sorted(store.folder.each_name()) == store.folder.names()
    assert len(pages) == 3
    assert store.list(FP).num_rows == 25
    assert list(opened(faulty, "nothing-here").folder.each_name()) == []
    with pytest.raises(OutputError, match="is a file; expected a folder"):
        opened(faulty, f"{store.folder._root.partition('/')[2]}/{name(0, 5)}").list()


def test_a_footer_costs_one_request(store, monkeypatch):
    long = result(2000)
    ids = pa.array([f"{i * 2654435761 % 2**32:x}" for i in range(2000)])
    long = long.set_column(1, long.schema.field(1), ids)  # does not compress to less than a tail
    for unit in range(3):
        store.write(name(unit, 2000), long)
    raw, requests = store.folder._fs.raw, []
    call = raw._call_s3

    async def counted(method, *args, **kwargs):
        requests.append(method)
        return await call(method, *args, **kwargs)

    progress = store.list(FP)
    monkeypatch.setattr(raw, "_call_s3", counted)
    assert store.totals(progress).rows == 6000
    assert requests == ["get_object"] * 3
    progress.add(name(7))
    with pytest.raises(OutputError, match="no longer exists"):
        store.totals(progress)


# --- behaviour shared with local folders


@pytest.mark.parametrize("kind", ["local", "store", "memory"])
def test_parts_and_small_files(request, kind):
    store = request.getfixturevalue(kind)
    assert store.list(FP).num_units == 0
    assert dict(store.sizes()) == {}
    assert store.totals() == PartTotals()
    store.folder.probe()
    store.folder.probe()
    assert store.folder.names("_pipeline/tmp") == store.folder.names("_pipeline/partial") == []
    assert not store.folder.has(str(name()))
    assert store.write(name(), result(50, errors=2), {"pipeline.model": "demo"})
    assert not store.write(name(), result(50, seed=2))
    assert store.write(name(1), result(50))
    assert store.folder.has(str(name()))
    assert dict(store.sizes()) == {unit: len(store.folder.read(str(unit)) or b"") for unit in (name(), name(1))}
    part = store.read_part(name())
    assert part.table.equals(result(50, errors=2))
    assert part.metadata == {"pipeline.model": "demo"}
    assert store.list(FP).num_units == 2
    totals = store.totals()
    assert totals == PartTotals(100, 2, {"null_prompt": 2}, 980, 392, 294, rows_checksum=totals.rows_checksum)
    assert store.folder.read("_pipeline/job.json") is None
    assert [store.folder.create("_pipeline/job.json", data) for data in (b"1", b"2")] == [True, False]
    assert store.folder.read("_pipeline/job.json") == b"1"
    for data in (b"1", b"22"):
        store.folder.replace("_pipeline/runs/a.json", data)
        assert store.folder.read("_pipeline/runs/a.json") == data
    assert store.folder.names("_pipeline/runs") == ["a.json"]
    assert "_pipeline" in store.folder.names("")
    for _ in range(2):
        store.folder.remove("_pipeline/runs/a.json")
        store.folder.replace(SUCCESS, b"{}")
    assert store.folder.names("_pipeline/runs") == store.folder.names("_pipeline/tmp") == []
    assert store.folder.read("_SUCCESS") == b"{}"
    assert store.folder.clean_tmp() == 0
    with pytest.raises(PipelineError, match="not a valid file name"):
        store.folder.read("../secret")


def test_foreign_and_damaged_files_are_refused(faulty, store):
    folder = store.path.rpartition("/")[2]
    store.write(name(), result(50))
    whole = faulty.bucket.get(f"{folder}/{name()}")
    faulty.bucket.put(f"{folder}/{name(1)}", whole[:-30])
    for bad in (store.totals, lambda: store.read_part(name(1)), lambda: store.write(name(1), result(50))):
        with pytest.raises(OutputError, match=rf"{store.path}/.*u0001of.*this part is damaged.*remove it and run"):
            bad()
    faulty.bucket.put(f"{folder}/{name(1)}", whole[:-30] + bytes(30))
    with pytest.raises(OutputError, match="no longer exists"):
        store.read_part(name(2))
    faulty.bucket.put(f"{folder}/thesis.docx", b"")
    with pytest.raises(OutputError, match=rf"{store.path}/thesis\.docx: not a part"):
        store.list()


def test_an_object_like_a_folder_or_in_its_place(faulty, tmp_path):
    faulty.bucket.put(f"{tmp_path.name}/", b"")  # like web consoles create folders
    assert opened(faulty, tmp_path.name).list().num_units == 0
    faulty.bucket.put(f"{tmp_path.name}-file", b"text")
    with pytest.raises(OutputError, match="expected a folder"):
        opened(faulty, f"{tmp_path.name}-file").list()


@pytest.mark.parametrize(("kind", "ready"), [("local", "part.synced"), ("store", "part.serialized")])
def test_threads_write_the_same_part(request, kind, ready):
    """All writers are ready when the first one names the part."""
    store, barrier = request.getfixturevalue(kind), threading.Barrier(5)
    failpoints.install({ready: barrier.wait})
    made = at_once(5, lambda i: (store.write(name(), result(50, seed=i)), i))
    (winner,) = [i for won, i in made if won]
    assert read(store).equals(result(50, seed=winner))
    assert store.folder.names("_pipeline/tmp") == []


# --- faults


@pytest.mark.parametrize("operation", ["list", "probe", "write"])
def test_a_store_that_denies(faulty, store, operation):
    """Reading and probing precede the loading of the model, so the job is refused. Later it stops and can resume."""
    faulty.proxy.add("denied", store.path.rpartition("/")[2], "GET" if operation == "list" else "PUT", 100)
    expected = EnvironmentFailed if operation == "write" else OutputError
    with pytest.raises(expected, match=rf"{store.path}.*access denied .*AccessDenied.*rights to list"):
        {"list": store.list, "probe": store.folder.probe, "write": lambda: store.write(name(), result(50))}[operation]()


def test_no_bucket(faulty):
    missing = PartStore("s3://bucket-that-is-not/out", faulty.bucket.storage)
    assert missing.list().num_units == 0
    with pytest.raises(OutputError, match=r"s3://bucket-that-is-not/out/.*no such bucket.*create it first"):
        missing.folder.probe()


def test_an_answer_lost_after_a_create_is_recognised_as_ours(faulty, store):
    faulty.proxy.add("lost_put", "part-.*u0000", times=1)
    assert store.write(name(), result(50))
    faulty.proxy.add("lost_put", "job.json", times=3)
    assert store.folder.create("_pipeline/job.json", b"{}")
    assert faulty.proxy.done["lost_put"] >= 2
    # the check of the existing part may fail too
    faulty.proxy.add("lost_put", "part-.*u0001", times=1)
    for fault in ("truncated", "slow_down", "reset"):
        faulty.proxy.add(fault, "part-.*u0001", "GET", times=1)
    assert store.write(name(1), result(50))
    assert faulty.proxy.done["truncated"] >= 1
    assert read(store).equals(result(50))
    # the same rows of another writer are not ours
    assert not store.write(name(), result(50))


def test_answers_lost_while_probing(faulty, store):
    before = faulty.proxy.done["lost_put"]
    for tries in (1, 2, 3):
        faulty.proxy.add("lost_put", "probe", times=tries)
        store.folder.probe()
        faulty.proxy.add("lost_put", "probe", times=tries)
        store.folder.probe_swap()
    assert faulty.proxy.done["lost_put"] - before == 2 * (1 + 2 + 3)


def test_a_part_of_another_writer_is_not_ours(store):
    """The PUT of another writer arrives between our check and our PUT."""
    failpoints.install({"part.serialized": failpoints.on_hit(1, lambda: store.write(name(), result(50)))})
    assert not store.write(name(), result(50))
    notes = pq.read_metadata(store.folder.open(str(name()))).metadata
    assert re.fullmatch(rb"[0-9a-f]{16}", notes[NONCE_KEY])


def test_no_upload_has_parts_and_one_begun_is_invisible(faulty, store):
    folder = store.path.rpartition("/")[2]
    upload = {"Bucket": "bucket", "Key": f"{folder}/{name()}"}
    begun = faulty.bucket.client.create_multipart_upload(**upload)["UploadId"]
    faulty.bucket.client.upload_part(**upload, UploadId=begun, PartNumber=1, Body=b"half a part")
    assert store.list(FP).num_units == 0
    assert store.write(name(), result(50))
    store.folder.replace("_pipeline/big", bytes(100 * 2**20))  # s3fs splits larger uploads into parts
    sent = [r for r in faulty.proxy.requests if folder in r and not r.startswith("GET")]
    assert [r for r in sent if "uploads" in r or "partNumber" in r] == []
    assert faulty.bucket.client.head_object(Bucket="bucket", Key=f"{folder}/_pipeline/big")["ContentLength"] > 10**8


def test_and_21_a_stored_part_is_compared_with_the_written_one(faulty, store):
    faulty.proxy.add("bad_digest", "part-", times=1)  # the store detects damage in transit
    assert store.write(name(), result(50))
    folder = store.path.rpartition("/")[2]
    pipe, times = store.folder._fs.pipe_file, [2, 99]

    def damaging(path, data, **options):
        pipe(path, data, **options)
        if times[0]:
            times[0] -= 1
            faulty.bucket.put(f"{folder}/{path.rpartition('/')[2]}", data[:100] + b"?" + data[101:])
        return "not-an-md5"  # like with encryption by a key service

    store.folder._fs.pipe_file = damaging
    assert store.write(name(1), result(50))
    assert times.pop(0) == 0
    assert read(store, 1).equals(result(50))
    with pytest.raises(EnvironmentFailed, match="reading it back returned different or no data"):
        store.write(name(2), result(50))
    assert not store.folder.has(str(name(2)))


def test_a_store_that_ignores_if_none_match_is_refused(faulty, store):
    faulty.proxy.add("ignore_conditions", "probe", times=100)
    with pytest.raises(OutputError, match=rf"{store.path}: this store cannot be an output: it ignores If-None-Match"):
        store.folder.probe()
    assert store.folder.names("_pipeline/tmp") == []


def test_filesystems_without_exclusive_create_are_refused(memory, monkeypatch):
    kind = type(memory.folder._fs.raw)
    with pytest.raises(OutputError, match="chain of filesystems"):
        PartStore("simplecache::s3://bucket/out")
    with monkeypatch.context() as patch:
        patch.setattr(kind, "pipe_file", AbstractFileSystem.pipe_file)  # checks, then writes
        with pytest.raises(OutputError, match=r"\(box\) has no exclusive create.*use S3"):
            memory.folder.probe()

    def no_modes(self, path, value):
        raise AssertionError("not called")

    monkeypatch.setattr(kind, "pipe_file", no_modes)
    with pytest.raises(OutputError, match=r"cannot create a file exclusively \(TypeError\)"):
        memory.folder.probe()


# --- rewriting parts


@pytest.mark.parametrize("kind", ["local", "store"])
def test_a_part_is_rewritten_only_if_it_is_unchanged_since_it_was_read(request, kind):
    store = request.getfixturevalue(kind)
    store.folder.probe()
    store.folder.probe_swap()
    assert store.folder.names("_pipeline/tmp") == []
    store.write(name(), result(50, seed=1, errors=3), {"pipeline.model": "demo"})
    part, again = store.read_part(name()), store.read_part(name())
    with pytest.raises(PipelineError, match="has 49 rows"):
        store.rewrite(name(), result(49), {}, part.tag)
    store.rewrite(name(), result(50, seed=2), part.metadata, part.tag)
    assert read(store).equals(result(50, seed=2))
    assert store.read_part(name()).metadata == {"pipeline.model": "demo"}
    assert store.totals().error_rows == {}
    with pytest.raises(OutputError, match=r"another run replaced or removed this part"):
        store.rewrite(name(), result(50, seed=3), {}, again.tag)
    store.folder.remove(str(name()))
    with pytest.raises(OutputError, match=r"another run replaced or removed this part"):
        store.rewrite(name(), result(50, seed=3), {}, again.tag)
    assert store.list().num_units == 0
    assert store.folder.names("_pipeline/tmp") == []


@pytest.mark.parametrize("kind", ["local", "store"])
def test_one_of_two_concurrent_rewrites_wins(request, kind):
    store = request.getfixturevalue(kind)
    store.write(name(), result(50))
    tag = store.read_part(name()).tag
    barrier = threading.Barrier(4)

    def rewrite(i: int) -> int | None:
        barrier.wait()
        try:
            store.rewrite(name(), result(50, seed=i + 1), {}, tag)
        except OutputError:
            return None
        return i + 1

    (won,) = [seed for seed in at_once(4, rewrite) if seed is not None]
    assert read(store).equals(result(50, seed=won))


def test_a_rewrite_that_waited_for_another_one_changes_nothing(local):
    store = local
    store.write(name(), result(50))
    tag = store.read_part(name()).tag
    ends: list[str] = []

    def late() -> None:
        try:
            store.rewrite(name(), result(50, seed=9), {}, tag)
        except OutputError as e:
            ends.append(str(e))

    other = threading.Thread(target=late)

    def start_another() -> None:
        other.start()
        other.join(0.3)  # it opened the old file and waits for its lock

    failpoints.install({"swap.serialized": failpoints.on_hit(1, start_another)})
    store.rewrite(name(), result(50, seed=1), {}, tag)
    other.join(30)
    assert len(ends) == 1
    assert read(store).equals(result(50, seed=1))


def test_an_answer_lost_after_a_rewrite(faulty, store):
    store.write(name(), result(50))
    faulty.proxy.add("lost_put", "part-", times=1)
    store.rewrite(name(), result(50, seed=2), {}, store.read_part(name()).tag)
    assert read(store).equals(result(50, seed=2))


def test_unsafe_rewriting_is_refused(faulty, store, memory):
    faulty.proxy.add("ignore_conditions", "probe", times=100)
    with pytest.raises(OutputError, match="ignores If-Match"):
        store.folder.probe_swap()
    with pytest.raises(OutputError, match=r"only S3 and local disks support .*, box does not"):
        memory.folder.probe_swap()


@pytest.mark.parametrize("step", ["swap.serialized", "swap.synced", "swap.replaced"])
def test_a_disk_that_fails_while_a_part_is_rewritten(local, step):
    store = local
    store.write(name(), result(50))

    failpoints.install({step: failpoints.ACTIONS["enospc"]})
    part = store.read_part(name())
    with pytest.raises(EnvironmentFailed, match="No space left"):
        store.rewrite(name(), result(50, seed=2), {}, part.tag)
    assert read(store).equals(result(50, seed=2 if step == "swap.replaced" else 0))
    assert Path(store.path, "_pipeline/tmp").is_dir()
    assert store.folder.names("_pipeline/tmp") == []
