"""Requests to object stores: which errors are retried, how often, and the message after the last try."""

import errno
import gzip
import random
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from s3fs.errors import translate_boto_error

from pipeline.checkpoints.locate import resolve_model
from pipeline.data.files import source_file, text_blocks
from pipeline.data.output.parts import PartStore
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.errors import EnvironmentFailed, InputError, ModelError, OutputError
from pipeline.stores.filesystem import RemoteFilesystem, filesystem
from pipeline.stores.retries import RetryCounts, RetryPolicy
from pipeline.stores.store_errors import Fault, PreconditionFailed, ShortRead, fault_of
from tests.faults.store import KEY, SECRET, FaultyStore

QUICK = RetryPolicy(first_wait_s=0.001, max_wait_s=0.002)


@pytest.fixture(scope="module")
def store():
    with FaultyStore() as store:
        yield store


@pytest.fixture
def remote(store, tmp_path):
    """Return the filesystem and a new folder with a file `a` of 1,000 bytes."""
    fs, path = filesystem(store.bucket.url(tmp_path.name), store.bucket.storage, QUICK)
    store.bucket.put(f"{tmp_path.name}/a", bytes(range(250)) * 4)
    yield fs, path
    store.proxy.calm()
    store.proxy.stall_s = 5.0


def answer(status: int, code: str, operation: str = "GetObject") -> ClientError:
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, operation)  # pyright: ignore


# --- retried errors


@pytest.mark.parametrize(("error", "fault"), [
    (answer(503, "SlowDown"), Fault.THROTTLED), (answer(503, "503"), Fault.THROTTLED),
    (answer(429, "TooManyThings"), Fault.THROTTLED), (answer(500, "InternalError"), Fault.SERVER_ERROR),
    (answer(200, "InternalError"), Fault.SERVER_ERROR), (answer(502, "Whatever"), Fault.SERVER_ERROR),
    (answer(400, "RequestTimeout"), Fault.TIMEOUT), (answer(409, "ConditionalRequestConflict"), Fault.CONFLICT),
    (answer(409, "BucketNotEmpty"), None), (answer(400, "BadDigest"), Fault.SHORT_READ),
    (answer(400, "ExpiredToken"), Fault.CREDENTIALS), (answer(400, "400", "HeadObject"), Fault.CREDENTIALS),
    (answer(400, "400"), None), (answer(403, "AccessDenied"), None), (answer(404, "NoSuchKey"), None),
    (answer(412, "PreconditionFailed"), None), (answer(416, "InvalidRange"), None),
    (answer(501, "NotImplemented"), None), (EndpointConnectionError(endpoint_url="http://x"), Fault.CONNECTION),
    (ConnectionResetError(errno.ECONNRESET, "reset"), Fault.CONNECTION),
    (OSError(errno.EHOSTUNREACH, "no route"), Fault.CONNECTION), (TimeoutError(), Fault.TIMEOUT),
    (ShortRead("3 of 4"), Fault.SHORT_READ), (NoCredentialsError(), None), (FileNotFoundError("x"), None),
    (PermissionError("x"), None), (FileExistsError("x"), None), (PreconditionFailed("x"), None),
    (OSError(errno.EINVAL, "SlowDown"), None),  # words are not codes
    (KeyError("x"), None),
])  # fmt: skip
def test_errors_are_classified(error, fault):
    assert fault_of(error) == fault
    if isinstance(error, ClientError):
        assert fault_of(translate_boto_error(error)) == fault  # as s3fs raises it


class Failing:
    """Filesystem whose reads raise the given errors, and then return b"fine"."""

    protocol = "failing"

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def invalidate_cache(self) -> None:
        pass

    def unstrip_protocol(self, path: str) -> str:
        return f"failing://user:word@host/{path}"

    def cat_file(self, path, start, end):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return b"fine"


def failing(*errors: Exception, **bounds) -> tuple[Failing, RemoteFilesystem, list[float]]:
    now, waits = [0.0], []

    def sleep(s: float) -> None:
        waits.append(s)
        now[0] += s

    fs = Failing(*errors)
    policy = RetryPolicy(sleep=sleep, clock=lambda: now[0], **{"random": lambda: 1.0, **bounds})
    return fs, RemoteFilesystem(fs, lambda: fs, policy, frozenset(["hidden-word"])), waits


def test_waits_grow_are_capped_and_random():
    slow = [answer(503, "SlowDown") for _ in range(7)]
    _, remote, waits = failing(*slow)
    assert remote.cat_file("a", 0, 4) == b"fine"
    assert waits == [0.5, 1, 2, 4, 8, 16, 20]
    assert remote.retries.counted() == {"throttled": 7}
    drawn = random.Random(7)
    _, remote, waits = failing(*slow, random=drawn.random)
    remote.cat_file("a", 0, 4)
    assert len(set(waits)) == 7
    assert all(0 <= w <= most for w, most in zip(waits, [0.5, 1, 2, 4, 8, 16, 20], strict=True))


def test_each_filesystem_counts_its_own_tries(store, tmp_path, monkeypatch, write):
    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: QUICK)
    ours, theirs = RetryCounts(), RetryCounts()
    url = store.bucket.url(tmp_path.name)
    store.bucket.upload(Path(write("a.parquet", {"text": ["x"]}), "a.parquet"), f"{tmp_path.name}/in/a.parquet")
    one, two = (PartStore(f"{url}/out", store.bucket.storage, retries) for retries in (ours, theirs))
    store.proxy.add("slow_down", "x.json", times=2)
    one.folder.replace("x.json", b"{}")
    assert two.folder.read("x.json") == b"{}"
    assert (ours.counted(), theirs.counted()) == ({"throttled": 2}, {})
    store.proxy.add("server_error", r"in/a\.parquet", times=1)
    assert open_source(f"{url}/in", store.bucket.storage, retries=theirs).num_rows == 1
    store.proxy.add("server_error", r"config\.json", times=1)
    with pytest.raises(ModelError):
        resolve_model(f"{url}/config.json", {"s3": store.bucket.storage}, retries=theirs)
    assert (ours.counted(), theirs.counted()) == ({"throttled": 2}, {"server_error": 2})


def test_tries_are_bounded_in_number_and_in_time():
    fs, remote, _ = failing(*[answer(500, "InternalError") for _ in range(20)])
    with pytest.raises(EnvironmentFailed, match=r"failing://host/a: gave up after 8 tries in 52 s .*Internal"):
        remote.cat_file("a", 0, 4)
    assert fs.calls == 8
    fs, remote, _ = failing(*[TimeoutError("hidden-word") for _ in range(20)], total_s=10)
    with pytest.raises(EnvironmentFailed, match=r"5 tries in 8 s \(timeout\).*\*\*\*") as raised:
        remote.cat_file("a", 0, 4)
    assert "word@" not in str(raised.value)
    assert "hidden-word" not in str(raised.value)


def test_permanent_errors_are_raised_at_once():
    fs, remote, waits = failing(PermissionError("no"))
    with pytest.raises(PermissionError):
        remote.cat_file("a", 0, 4)
    assert (fs.calls, waits) == (1, [])


# --- over HTTP


def test_bursts_of_500_and_503(store, remote):
    fs, path = remote
    for request in ("/a", "list-type=2"):
        store.proxy.add("server_error", request, "GET", 2)
        store.proxy.add("slow_down", request, "GET", 3)
    assert fs.cat_file(f"{path}/a", 10, 20) == bytes(range(10, 20))
    assert [e["name"] for e in fs.ls(path)] == [f"{path}/a"]
    assert fs.retries.counted() == {"server_error": 4, "throttled": 6}
    for operation in (fs.info, fs.exists, fs.find, fs.glob, fs.whole):
        store.proxy.add("slow_down")
        assert operation(f"{path}/a")
    assert fs.retries.counted()["throttled"] == 11


def test_tries_do_not_multiply_with_those_of_the_layers_below(store, remote):
    fs, path = remote
    store.proxy.add("slow_down", "/a", "GET", 1000)
    seen = len(store.proxy.requests)
    with pytest.raises(EnvironmentFailed, match=rf"s3://{path}/a: gave up after 8 tries.*SlowDown"):
        fs.cat_file(f"{path}/a", 0, 5)
    assert len(store.proxy.requests) - seen == 8


def test_a_request_that_never_arrives(store, tmp_path):
    options = {**store.bucket.storage, "config_kwargs": {"read_timeout": 0.3}}
    fs, path = filesystem(store.bucket.url(tmp_path.name), options, QUICK)
    store.proxy.stall_s = 1.0
    store.proxy.add("swallowed", "/new")
    fs.pipe_file(f"{path}/new", b"text", mode="create")
    assert store.bucket.get(f"{tmp_path.name}/new") == b"text"
    assert fs.retries.counted() == {"timeout": 1}


def test_a_conflict_is_not_exists(store, remote):
    fs, path = remote
    store.proxy.add("conflict", "/new", times=2)
    assert fs.pipe_file(f"{path}/new", b"text", mode="create")
    assert fs.retries.counted() == {"conflict": 2}
    with pytest.raises(FileExistsError):
        fs.pipe_file(f"{path}/new", b"text", mode="create")


def test_an_error_in_a_200_is_not_success(store, remote):
    fs, path = remote
    store.proxy.add("error_body", "/new", "PUT")
    fs.pipe_file(f"{path}/new", b"text", mode="create")
    assert store.bucket.get(f"{Path(path).name}/new") == b"text"
    store.proxy.add("error_body", "/a", "GET")
    assert len(fs.cat_file(f"{path}/a", 0, 1000)) == 1000
    store.proxy.add("error_body", "/a", "GET")
    assert len(fs.cat_file(f"{path}/a")) == 1000
    store.proxy.add("error_body", "list-type=2", "GET")
    assert len(fs.ls(path)) == 2
    assert sum(fs.retries.counted().values()) == 4


def test_short_and_slow_bodies(store, remote):
    fs, path = remote
    whole = bytes(range(250)) * 4
    store.proxy.add("truncated", "/a", times=2)
    assert fs.cat_file(f"{path}/a") == whole
    store.proxy.add("truncated", "/a")
    assert fs.cat_file(f"{path}/a", 100, 900) == whole[100:900]
    assert fs.retries.counted() == {"short_read": 3}
    store.proxy.add("slow", "/a")
    assert fs.cat_file(f"{path}/a", 990, 5000) == whole[990:]
    assert fs.cat_file(f"{path}/a", 500) == whole[500:]
    assert fs.cat_file(f"{path}/a", 7, 7) == b""
    store.proxy.add("reset", "/a", "GET", 2)
    assert fs.cat_file(f"{path}/a", 0, 9) == whole[:9]


def test_a_read_that_is_always_short_fails():
    fs, remote, _ = failing()
    fs.info = lambda path: {"size": 10, "type": "file"}  # pyright: ignore
    with pytest.raises(EnvironmentFailed, match=r"8 tries .*\(short_read\).*received 4 of 6 bytes"):
        remote.cat_file("a", 0, 6)


def test_a_file_that_became_shorter_is_an_error(store, remote):
    fs, path = remote
    with fs.open(f"{path}/a") as handle:
        store.bucket.put(f"{Path(path).name}/a", b"short")
        with pytest.raises(ShortRead, match="is shorter than when"):
            handle.read(1000)


def test_expired_credentials_are_reloaded_once(store, tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.proxy.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_PROFILE", "other")
    credentials.write_text("[other]\naws_access_key_id=OLD\naws_secret_access_key=old\n")
    fs, path = filesystem(store.bucket.url(tmp_path.name), {}, QUICK)
    fs.pipe_file(f"{path}/a", b"text")
    first = fs.raw
    credentials.write_text("[other]\naws_access_key_id=NEW\naws_secret_access_key=new\n")
    store.proxy.add("expired", "/a", "GET")
    assert fs.cat_file(f"{path}/a", 0, 4) == b"text"
    assert fs.raw is not first
    assert fs.raw.session._credentials.access_key == "NEW"
    store.proxy.add("expired", "/a", "HEAD", 2)  # no body, so no code; botocore requests the region and tries again
    assert fs.info(f"{path}/a")["size"] == 4
    assert fs.retries.counted() == {"credentials": 2}
    store.proxy.add("expired", times=1000)
    with pytest.raises(EnvironmentFailed, match=rf"s3://{path}/a: .*expired.*rerun the same command to resume"):
        fs.cat_file(f"{path}/a", 0, 4)
    store.proxy.calm()


def test_403_of_a_missing_key_is_distinguished_from_one_of_a_forbidden_file(store, remote):
    """S3 answers 403 for a missing key if the user may list only some prefixes of the bucket."""
    fs, path = remote
    store.bucket.put(f"{Path(path).name}/folder/b", b"1")
    store.bucket.put(f"{Path(path).name}/folder-c", b"1")
    store.proxy.add("denied", method="HEAD", times=1000)
    assert not fs.exists(f"{path}/none")
    assert not fs.exists(f"{path}/fold")
    for operation in (fs.info, fs.whole, fs.open):
        with pytest.raises(FileNotFoundError):
            operation(f"{path}/none")
        with pytest.raises(PermissionError):
            operation(f"{path}/a")
    assert fs.info(f"{path}/folder")["type"] == "directory"
    store.proxy.add("denied", "list-type=2", "GET", 1000)
    with pytest.raises(PermissionError):
        fs.info(f"{path}/none")


def test_a_listing_is_never_remembered(store, remote):
    fs, path = remote
    assert len(fs.ls(path)) == len(fs.find(path)) == 1
    assert not fs.exists(f"{path}/b")
    store.bucket.put(f"{Path(path).name}/b", b"1")
    assert len(fs.ls(path)) == len(fs.find(path)) == 2
    assert fs.exists(f"{path}/b")


def test_invalid_options_and_names_are_config_errors():
    for mistake in ({"nonsense": 1, "secret": SECRET}, {"client_kwargs": {"nonsense": SECRET}}):
        with pytest.raises(InputError, match="options"):
            open_source("s3://bucket/in", mistake)
        with pytest.raises(OutputError, match="its storage options") as refused:
            PartStore("s3://bucket/out", mistake)
        assert SECRET not in str(refused.value)
    with pytest.raises(InputError, match="not a valid path in a store"):
        open_source("s3://Not_A_Bucket!/in", {"key": KEY, "secret": SECRET})
    with pytest.raises(OutputError, match="Invalid bucket name"):
        PartStore("s3://Not_A_Bucket!/out", {"key": KEY, "secret": SECRET}).list()
    with pytest.raises(ModelError, match="not a valid path in a store"):
        resolve_model("s3://Not_A_Bucket!/model", {"s3": {"key": KEY, "secret": SECRET}})


def test_lines_in_a_store_are_read_despite_its_faults(store, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.stores.filesystem.RetryPolicy", lambda: QUICK)
    monkeypatch.setattr(source_file, "_REQUEST_BYTES", 2000)
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 3000)
    lines = b"".join(b'{"n": %d}\n' % i for i in range(2000))
    url = f"{store.bucket.url(tmp_path.name)}/in"
    for name, data in (("a.jsonl", lines), ("b.jsonl.gz", gzip.compress(lines))):
        (tmp_path / name).write_bytes(data)
        store.bucket.upload(tmp_path / name, f"{tmp_path.name}/in/{name}")
    retries = RetryCounts()
    store.proxy.add("server_error", r"in/a\.jsonl", times=1)
    store.proxy.add("truncated", r"in/b\.jsonl", times=1)
    source = open_source(url, store.bucket.storage, retries=retries)
    read = [n for w in cut_windows(source, 700, 1 << 40) for n in read_window(source, w, ["n"])["n"].to_pylist()]
    assert read == [*range(2000), *range(2000)]
    assert sum(retries.counted().values()) == 2
