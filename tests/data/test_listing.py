"""Files that match a path, and partition columns from the names of their folders."""

import gzip
import os
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
import pyarrow.dataset
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.data.files.listing import would_find
from pipeline.data.source import cut_windows, open_source, read_window
from pipeline.errors import EnvironmentFailed, InputError
from tests.data.test_source import BIG, rows_of, texts
from tests.faults.store import FaultyStore


def table_of(source, columns=None) -> list[dict]:
    """Read all rows in small windows, with these columns (default: all)."""
    names = source.schema.names if columns is None else columns
    source.check_columns(names)
    return [row for w in cut_windows(source, 2, BIG) for row in read_window(source, w, names).to_pylist()]


def test_file_folder_and_glob(write, tmp_path):
    write("b.parquet", texts(1))
    write("a/2024/c.parquet", texts(2))
    write("a/_temporary/d.parquet", texts(3))
    write(".hidden.parquet", texts(3))
    folder = write("_SUCCESS.parquet", texts(3))

    def names(path):
        return [f.relative for f in open_source(str(path)).files]

    assert names(folder) == names(folder + "/") == ["a/2024/c.parquet", "b.parquet"]
    assert names(f"{folder}/_SUCCESS.parquet") == ["_SUCCESS.parquet"]  # named by the user
    assert names(f"{folder}/*.parquet") == ["b.parquet"]
    assert names(f"{folder}/**/*.parquet") == ["a/2024/c.parquet", "b.parquet"]
    assert names(f"file://{folder}") == names(folder)
    assert names(f"{folder}/*") == names(f"{folder}/**") == ["a/2024/c.parquet", "b.parquet"]
    assert names(f"{folder}/?/2*") == ["a/2024/c.parquet"]


def test_a_path_in_another_unicode_form_is_named(write):
    folder = write("cafe\u0301.parquet", texts(1))
    with pytest.raises(
        InputError, match=r'does not exist; .* differs only in its Unicode form; .*"cafe\\u0301\.parquet"'
    ):
        open_source(f"{folder}/caf\xe9.parquet")
    assert open_source(f"{folder}/cafe\u0301.parquet").num_rows == 1


def test_links_are_followed_and_broken_ones_refused(write, tmp_path):
    folder = write("a/2024/c.parquet", texts(2))
    os.symlink(f"{folder}/a", tmp_path / "link")
    os.symlink(f"{folder}/a/2024/c.parquet", f"{folder}/b.parquet")
    os.symlink(f"{folder}/a/2024", f"{folder}/z")
    assert [f.relative for f in open_source(str(tmp_path / "link")).files] == ["2024/c.parquet"]
    source = open_source(folder)
    assert [f.relative for f in source.files] == ["a/2024/c.parquet", "b.parquet", "z/c.parquet"]
    assert len(rows_of(source, cut_windows(source, 10, BIG))) == 6
    assert [f.relative for f in open_source(f"{folder}/b.*").files] == ["b.parquet"]
    os.symlink(folder, f"{folder}/a/round")
    with pytest.raises(InputError, match=r"a/round: .*is a link to one of its parent folders"):
        open_source(folder)
    os.unlink(f"{folder}/a/round")
    os.symlink(f"{folder}/nothing", f"{folder}/x.parquet")
    for path in (folder, f"{folder}/*.parquet", f"{folder}/x.parquet"):
        with pytest.raises(InputError, match=r"x\.parquet: is a link to .*/nothing, which does not exist"):
            open_source(path)


def test_inputs_that_can_be_read_only_once_are_refused(write, tmp_path):
    """Pipes, sockets, devices and file descriptors are refused: planning and each resumed run read the input again."""
    folder = write("a.parquet", texts(1))
    os.mkfifo(f"{folder}/b.parquet")
    os.symlink(f"{folder}/b.parquet", tmp_path / "link")
    with socket.socket(socket.AF_UNIX) as unix, open(f"{folder}/a.parquet", "rb") as file:
        unix.bind(str(tmp_path / "socket"))
        descriptor = f"/dev/fd/{file.fileno()}"  # it is a regular file, but another process cannot open it by this name
        pipes = [folder, f"{folder}/*.parquet", f"{folder}/b.parquet", f"file://{folder}/b.parquet"]
        paths = dict.fromkeys([*pipes, str(tmp_path / "link")], "a pipe")
        paths |= dict.fromkeys([descriptor, f"/proc/self/fd/{file.fileno()}", "/dev/stdin", "-"], "a file descriptor")
        paths |= {str(tmp_path / "socket"): "a socket", "/dev/null": "a device"}
        for path, kind in paths.items():
            with pytest.raises(InputError, match=rf"is {kind}.* read more than once.*save it to a file") as raised:
                open_source(path)
            assert str(raised.value).startswith(f"{folder}/b.parquet" if path in pipes[:2] else f"input.path {path}: ")


def test_the_error_of_a_missing_path_shows_the_resolved_path(write, monkeypatch):
    monkeypatch.chdir(write("a.parquet", texts(1)))
    monkeypatch.setenv("HOME", "/nowhere")
    for path, reason in {
        "b.parquet": f"looked for {os.getcwd()}/b.parquet, in the working directory",
        "~/b.parquet": "looked for /nowhere/b.parquet",
        "a.parquet ": "the path begins or ends with whitespace",
    }.items():
        with pytest.raises(InputError, match=rf"^input\.path {path}: does not exist; {reason}$"):
            open_source(path)


@pytest.mark.parametrize("name", [b"a\xff.parquet", b"day=\xfc/a.parquet"])
def test_a_name_that_is_not_utf8_is_refused(write, name):
    folder = write("b.parquet", texts(1))
    path = os.path.join(os.fsencode(folder), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.rename(f"{folder}/b.parquet", path)
    with pytest.raises(
        InputError, match=r"\\udcf[fc].*not UTF-8, so it cannot be stored in source_file; rename it"
    ) as raised:
        open_source(folder)
    str(raised.value).encode()


@pytest.mark.parametrize("path", ["nothing", "nothing.parquet", "*.parquet", "empty"])
def test_nothing_to_read(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"input\.path .*(does not exist|contains no files)"):
        open_source(str(tmp_path / path))
    with pytest.raises(InputError, match=r"input\.path nowhere://x"):
        open_source("nowhere://x")


def partitioned(write) -> str:
    write("date=2024-01-01/site=7/x.parquet", texts(3))
    write("date=2024-01-01/site=__HIVE_DEFAULT_PARTITION__/x.parquet", texts(1, 3))
    return write("date=a%20b%2Fc/site=-12/x.parquet", texts(1, 4))


def test_partition_columns(write):
    source = open_source(folder := partitioned(write))
    assert source.schema == pa.schema([("text", pa.string()), ("date", pa.string()), ("site", pa.int64())])
    rows = table_of(source)
    assert [(r["text"], r["date"], r["site"]) for r in rows] == [
        ("row 0", "2024-01-01", 7), ("row 1", "2024-01-01", 7), ("row 2", "2024-01-01", 7),
        ("row 3", "2024-01-01", None), ("row 4", "a b/c", -12),
    ]  # fmt: skip
    assert {r["source_file"] for r in rows} >= {"date=2024-01-01/site=7/x.parquet"}
    hive = pyarrow.dataset.partitioning(flavor="hive")
    theirs = pyarrow.dataset.dataset(folder, partitioning=hive).to_table().sort_by("text").to_pylist()
    assert [{name: r[name] for name in source.schema.names} for r in rows] == theirs
    assert [r["site"] for r in table_of(source, ["site"])] == [7, 7, 7, None, -12]  # no column of the files is read


def test_partition_columns_through_globs_and_stores(write):
    folder = partitioned(write)
    source = open_source(f"{folder}/date=2024*")
    assert [(r["date"], r["site"]) for r in table_of(source)] == [("2024-01-01", 7)] * 3 + [("2024-01-01", None)]
    # only below the part before the first pattern, like in other readers
    assert open_source(f"{folder}/date=2024-01-01/*/x.parquet").schema.names == ["text", "site"]
    assert open_source(f"{folder}/date=2024-01-01/site=7/x.parquet").schema.names == ["text"]
    memory = fsspec.filesystem("memory")
    memory.put(folder, "/hive", recursive=True)
    source = open_source("memory://hive")
    assert table_of(source) == table_of(open_source(folder))
    assert table_of(open_source("memory://hive/*/site=7")) == table_of(open_source(f"{folder}/*/site=7"))


@pytest.mark.parametrize(("values", "kind"), [
    (["1", "-3", "0"], pa.int64()),
    (["01", "2"], pa.string()),  # a zip code is not a number
    (["1", "x"], pa.string()),
    (["-0"], pa.string()),
    (["9223372036854775807"], pa.int64()),
    (["9223372036854775808"], pa.string()),
    (["1.5"], pa.string()),
    (["__HIVE_DEFAULT_PARTITION__", "3"], pa.int64()),
    (["__HIVE_DEFAULT_PARTITION__"], pa.string()),
    ([""], pa.string()),
])  # fmt: skip
def test_the_type_of_a_partition_column(write, values, kind):
    for value in values:
        folder = write(f"k={value}/x.parquet", texts(1))
    source = open_source(folder)
    assert source.schema.field("k").type == kind
    got = {r["k"] for r in table_of(source)}
    expected = {None if v.startswith("__") else v for v in values}
    assert got == ({None if v is None else int(v) for v in expected} if kind == pa.int64() else expected)


def test_a_column_in_the_files_and_in_the_folders(write):
    write("day=2/x.parquet", {**texts(1), "day": pa.array([2], pa.int8())})
    source = open_source(write("day=1/x.parquet", {**texts(1), "day": pa.array([1], pa.int8())}))
    assert source.schema.field("day").type == pa.int8()  # from the files
    assert [r["day"] for r in table_of(source)] == [1, 2]
    source = open_source(write("day=3/x.parquet", texts(1)))
    with pytest.raises(
        InputError, match=r"column 'day': ambiguous: some files store it, .*day=3/x\.parquet does not, and folders"
    ):
        source.check_columns([*source.schema.names, "day"])
    assert len(table_of(source, ["text"])) == 3


def test_ambiguous_folder_names(write):
    source = open_source(write("a=b=c/=x/x=/y.parquet", texts(1)))
    assert [(r["a"], r["x"]) for r in table_of(source)] == [("b=c", "")]
    with pytest.raises(InputError, match=r"a=1/a=2/x\.parquet: the column 'a' occurs twice in the path"):
        open_source(write("a=1/a=2/x.parquet", texts(1)))


def test_a_folder_name_that_is_not_utf8(write):
    with pytest.raises(InputError, match=r"k=%ff/x\.parquet: the folder name 'k=%ff' is not UTF-8"):
        open_source(write("k=%ff/x.parquet", texts(1)))


class Hosted(MemoryFileSystem):
    """Filesystem of a host named in the url, like FTP, SFTP and HDFS; without the host there are no files."""

    protocol = "hosted"

    def __init__(self, host: str = "", password: str = "", **options):
        super().__init__(**options)
        if (host, password) != ("there", "pw-in-url"):
            raise OSError(111, "no such host")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol("memory://" + urlsplit(path).path if "://" in path else path)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        parts = urlsplit(path)
        return {"host": parts.hostname or "", "password": parts.password or ""}


def test_a_host_and_a_password_in_the_url_are_used_and_not_shown(write):
    folder = write("a.parquet", texts(3))
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    fsspec.filesystem("memory").put(folder, "/hosted", recursive=True)
    source = open_source("hosted://me:pw-in-url@there/hosted")
    assert [text for _, _, text in rows_of(source, cut_windows(source, 2, BIG))] == ["row 0", "row 1", "row 2"]
    assert "pw-in-url" not in repr(source)
    with pytest.raises(InputError, match="does not exist") as raised:
        open_source("hosted://me:pw-in-url@there/nothing")
    assert "pw-in-url" not in str(raised.value)


def test_files_of_a_web_server_without_ranges(write, tmp_path):
    """Python's own web server lists folders, but ignores ranges, so reading is an error."""
    folder = write("a b.parquet", texts(2000), row_group_size=100)
    write("c.parquet", texts(3))

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for path in (f"{url}/", f"{url}/*.parquet"):
            source = open_source(path)
            assert [(f.relative, f.num_rows) for f in source.files] == [("a%20b.parquet", 2000), ("c.parquet", 3)]
        with pytest.raises(EnvironmentFailed, match=r"a%20b\.parquet: the server ignores Range requests"):
            table_of(source)
        server.shutdown()


def test_a_signed_web_address_is_refused_without_showing_the_signature():
    with pytest.raises(InputError, match=r"https://host/x\.parquet: a web address with a \?") as raised:
        open_source("https://host/x.parquet?X-Amz-Signature=5ec7e7")
    assert "5ec7e7" not in str(raised.value)


@pytest.fixture(scope="module")
def store():
    with FaultyStore() as store:
        yield store


def test_a_bucket_with_folder_markers(store, write):
    folder = write("day=1/a.parquet", texts(10), row_group_size=4)
    write("day=2/b.parquet", texts(3))
    bucket = store.bucket
    for key in ("day=1/a.parquet", "day=2/b.parquet"):
        bucket.upload(Path(folder, key), f"marked/{key}")
    for key in ("", "day=1/", "day=3_$folder$", "_SUCCESS", "_temporary/x", ".part.crc"):
        bucket.put(f"marked/{key}", b"")
    local = table_of(open_source(folder))
    for path in ("marked", "marked/", "marked/*", "marked/day=*", "marked/**/*.parquet"):
        source = open_source(bucket.url(path), bucket.storage)
        assert table_of(source) == local
    bucket.put("marked/day=2/zero.parquet", b"")
    with pytest.raises(InputError, match=r"s3://bucket/marked/day=2/zero\.parquet: the file is empty"):
        open_source(bucket.url("marked"), bucket.storage)


def test_keys_are_taken_literally(store, write):
    folder, bucket = write("a.parquet", texts(1, 1)), store.bucket
    keys = ("x.parquet", "in//x.parquet", "b c/%20+#?ü.parquet", "../x.parquet", "_t//y.parquet")
    for number, key in enumerate(keys):
        write("a.parquet", texts(1, number))
        bucket.upload(Path(folder, "a.parquet"), f"letter/{key}")

    def read(path: str) -> dict[str, str]:
        source = open_source(bucket.url(path), bucket.storage)
        return {file: text for file, _, text in rows_of(source, cut_windows(source, 10, BIG))}

    assert read("letter") == {"b c/%20+#?ü.parquet": "row 2", "in//x.parquet": "row 1", "x.parquet": "row 0"}
    assert read("letter/../x.parquet") == {"x.parquet": "row 3"}
    for path in ("letter/in", "letter/in//x.parquet"):  # in/x.parquet would be another file
        with pytest.raises(InputError, match=r"s3://bucket/letter/in//x\.parquet: its path has an empty component"):
            read(path)


def test_a_key_that_is_a_folder_too_is_the_folder_after_a_slash(store, write):
    folder, bucket = write("a.parquet", texts(3)), store.bucket
    bucket.upload(Path(folder, "a.parquet"), "both/a.parquet")
    bucket.put("both", b"")
    source = open_source(bucket.url("both/"), bucket.storage)
    assert ([f.relative for f in source.files], source.num_rows) == (["a.parquet"], 3)
    with pytest.raises(InputError, match=r"s3://bucket/both: the file is empty"):
        open_source(bucket.url("both"), bucket.storage)
    bucket.upload(Path(folder, "a.parquet"), "both")
    source = open_source(bucket.url("bot*"), bucket.storage)  # matches both
    assert ([f.relative for f in source.files], source.num_rows) == (["both", "both/a.parquet"], 6)


@pytest.mark.parametrize(("path", "folder", "found"), [
    ("in", "in", True),
    ("in/", "in/a/out", True),
    ("in", "in/_out", False),
    ("in", "in/_out/deep", False),
    ("in", "inner", False),
    ("in/a", "in", False),
    ("in/*", "in/out", True),
    ("in/**", "in/a/out", True),
    ("in/*.parquet", "in", True),
    ("in/*.parquet", "in/out", False),
    ("in/*.parquet", "in/out.parquet", True),  # a folder that matches the glob is read completely
    ("in/*.jsonl", "in", False),
    ("in/**/*.parquet", "in/a/out", True),
    ("in/day=*/a", "in/day=1/b", False),
    ("i?/x", "in/x/y", True),
])  # fmt: skip
def test_whether_an_output_would_be_found_as_input(write, path, folder, found):
    here = write("a/a.parquet", texts(1)).removesuffix("in")
    write("x.parquet", texts(1))
    assert would_find(here + path, {}, here + folder, {}) is found
    one, other = {"anon": True}, {"anon": True, "client_kwargs": {"endpoint_url": "http://there"}}
    assert would_find(f"s3://bucket/{path}", one, f"s3a://bucket/{folder}", one) is found
    assert not would_find(f"s3://bucket/{path}", one, f"s3://bucket/{folder}", other)
    assert not would_find(here + path, {}, f"s3://bucket/{folder}", one)
    # verify with a file written there
    write("a.parquet", texts(1))
    (Path(here, folder)).mkdir(parents=True, exist_ok=True)
    before = _found(here + path)
    os.rename(Path(here, "in/a.parquet"), Path(here, folder, "part.parquet"))
    assert (len(_found(here + path) - before) > 0) is found


def _found(path: str) -> set[str]:
    try:
        source = open_source(path)
    except InputError:
        return set()
    return {os.path.join(source.root, f.relative) for f in source.files}


def test_a_file_in_a_store_costs_one_request_to_plan(store, write):
    folder = write("a.parquet", texts(3))
    for i in range(20):
        store.bucket.upload(Path(folder, "a.parquet"), f"cheap/f{i}.parquet")
    before = len(store.proxy.requests)
    source = open_source(store.bucket.url("cheap"), store.bucket.storage)
    assert len(source.files) == 20
    assert len(store.proxy.requests) - before <= 20 + 3
    before = len(store.proxy.requests)
    assert len(rows_of(source, cut_windows(source, 1000, BIG))) == 60
    assert len(store.proxy.requests) - before <= 20 * 3  # a check for changes, the footer, the data
    assert store.bucket.storage["secret"] not in repr(source)


# files that hubs and Spark leave next to data: LEFT are passed over and named, HIDDEN are not named
LEFT = {
    "README.md": b"# Data",
    "LICENSE": b"MIT",
    "dataset_infos.json": b'{"default": {"features": {}}}',
    "data/dataset_info.json": b'{\n  "features": {}\n}',
    "data/state.json": b'{"_split": null}',
    "data/cache-1.arrow": b"ARROW1\0\0",
    "data/notes.csv": b"a,b\n",
    "data/done": b"",
    "data/part-0.parquet.md5": b"d41d8cd9",
    "data/part-9": b"text",
}
HIDDEN = {
    "_SUCCESS": b"", ".gitattributes": b"*.parquet lfs", "_metadata": b"PAR1", "_common_metadata": b"PAR1",
    "data/.part-0.parquet.crc": b"crc", "_temporary/0/a.parquet": b"",
    ".cache/huggingface/a.parquet.lock": b"",
}  # fmt: skip


def leave(folder: str | Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def parquet_without_endings(write) -> tuple[str, list[str]]:
    names = [
        "data/a.parquet", "data/b.snappy.parquet", "data/c.PQ", "data/part-00000", "data/part-1.zlib", "d.parquet.gz",
    ]  # fmt: skip
    for number, name in enumerate(names):
        folder = write(name, texts(1, number))
    return folder, sorted(names)


def test_files_of_other_formats_are_passed_over_and_named(store, write):
    folder, names = parquet_without_endings(write)
    leave(folder, {**LEFT, **HIDDEN})
    fsspec.filesystem("memory").put(folder, "/other-formats", recursive=True)
    for path in Path(folder).rglob("*"):
        if path.is_file():
            store.bucket.upload(path, f"other-formats/{path.relative_to(folder)}")
    for mode in ("fail", "skip"):
        for path, storage in (
            (folder, {}),
            (f"{folder}/**/*", {}),
            ("memory://other-formats", {}),
            (store.bucket.url("other-formats"), store.bucket.storage),
        ):
            source = open_source(path, storage, mode)
            assert [file.relative for file in source.files] == names
            assert (source.passed_over, source.skipped) == (tuple(sorted(LEFT)), ())


@pytest.mark.parametrize(("log", "kind"), [
    ("_delta_log/00000000000000000000.json", "a Delta Lake table"),
    ("metadata/00002-5f0a.metadata.json", "an Iceberg table"),
    (".hoodie/hoodie.properties", "a Hudi table"),
    ("_spark_metadata/0", "the output of a Spark stream"),
])  # fmt: skip
def test_a_table_whose_log_names_its_files_is_refused_however_it_is_named(store, write, log, kind):
    folder = write("table/data/day=1/ab/a.parquet", texts(1))
    write("table/data/day=2/b.parquet", texts(1))
    write("plain/day=1/a.parquet", texts(1))
    of_data = "metadata" in log  # Iceberg's files are in a folder of their own
    leave(folder, {f"table/{log}" if of_data else f"table/data/{log}": b"{}"})
    leave(folder, {f"plain/old/{log}": b"{}"})  # with no file to read
    bucket = store.bucket
    for path in Path(folder).rglob("*"):
        if path.is_file():
            bucket.upload(path, f"{kind}/{path.relative_to(folder)}")
    inside = (
        "",
        "table",
        "table/data",
        "table/data/day=2",
        "*/*/day=*/*",
        "table/data/day=2/*.parquet",
        "**/a.parquet",
    )
    for path in inside:
        for opened in ((f"{folder}/{path}", {}), (bucket.url(f"{kind}/{path}"), bucket.storage)):
            with pytest.raises(InputError, match=rf"/table(/data)? is {kind} .*current") as raised:
                open_source(*opened)
            assert raised.value.exit_code == 2
    for path in ("table/data/day=2/b.parquet", "plain", "plain/day=*"):  # a file that the user names is read
        assert open_source(f"{folder}/{path}").num_rows == 1
        assert open_source(bucket.url(f"{kind}/{path}"), bucket.storage).num_rows == 1


@pytest.mark.parametrize("name", ["x.parquet", "x.PARQUET", "data/part-00000", "x.parquet.gz", "x.pq"])
@pytest.mark.parametrize("bad", [b"PAR1 cut off", b""])
def test_a_broken_file_of_the_wanted_format_is_an_error_next_to_others(write, name, bad):
    folder = write("a.parquet", texts(1))
    leave(folder, {name: bad, "README.md": b"#"})
    if name == "data/part-00000" and not bad:
        assert open_source(folder).passed_over == (
            "README.md",
            name,
        )  # an empty file without an extension is not Parquet
        return
    with pytest.raises(InputError, match=rf"{name}: (not a Parquet file|the file is empty)"):
        open_source(folder)
    assert [file.relative for file in open_source(folder, on_corrupt="skip").skipped] == [name]


@pytest.mark.parametrize(("files", "found"), [
    ({"README.md": b"#"}, r"found 1 \.md \(README\.md\)"),
    ({"a.txt": b"text", "b.txt": b"", "dataset_info.json": b"{}", "state.json": b"{}"},
     r"2 \.txt \(a\.txt, \.\.\.\), 2 \.json \(dataset_info\.json, \.\.\.\); expected \.parquet"),
    ({"part-0": b"text", "part-1": b""}, r"2 without an extension \(part-0, \.\.\.\)"),
    ({"a.txt": b"x", "_b.parquet": b""}, r"1 \.txt \(a\.txt\)"),
])  # fmt: skip
def test_the_error_of_a_folder_without_data_lists_its_files(tmp_path, files, found):
    leave(tmp_path, files)
    for path in (str(tmp_path), f"{tmp_path}/*"):
        with pytest.raises(InputError, match=rf"input\.path .*: contains no Parquet, JSON Lines.*; .*{found}"):
            open_source(path)


def test_json_lines_next_to_files_of_other_formats(write, tmp_path):
    row = b'{"text": "x"}\n'
    here = tmp_path / "in"
    leave(here, {"a.jsonl": row, "b.json": row, "c.ndjson": row, "d.json.gz": gzip.compress(row), **LEFT, **HIDDEN})
    source = open_source(str(here))
    assert [file.relative for file in source.files] == ["a.jsonl", "b.json", "c.ndjson", "d.json.gz"]
    assert source.passed_over == tuple(sorted(LEFT))
    write("part-7", texts(1))  # Parquet by its content: rows of both formats are refused
    with pytest.raises(InputError, match="one format"):
        open_source(str(here))
    assert [f.relative for f in open_source(f"{here}/*.json").files] == ["b.json"]


def test_csv_is_an_input_only_without_parquet_and_json_lines(tmp_path):
    leave(
        tmp_path, {"a.csv": b"x\n1\n", "b.tsv.gz": gzip.compress(b"x\n2\n"), "dataset_info.json": b"{}", "c.md": b"#"}
    )
    source = open_source(str(tmp_path))
    assert [file.relative for file in source.files] == ["a.csv", "b.tsv.gz"]
    assert source.passed_over == ("c.md", "dataset_info.json")
    leave(tmp_path, {"d.json": b'{"x": "3"}\n'})
    with pytest.raises(InputError, match=r"d\.json is JSON Lines by its name, but .*a\.csv is not|a\.csv is CSV by its "
                       r"name, but .*d\.json is not; .*input\.path: data/\*\.csv"):  # fmt: skip
        open_source(str(tmp_path))
    leave(tmp_path, {"e.jsonl": b'{"x": "4"}\n'})
    assert [file.relative for file in open_source(str(tmp_path)).files] == ["d.json", "e.jsonl"]


def test_an_explicit_file_is_read_whatever_its_name(write):
    folder = write("README.md", texts(2))
    leave(folder, {"state.json": b'{"text": "x"}\n', "notes.txt": b"no rows"})
    assert open_source(f"{folder}/README.md").num_rows == 2
    assert open_source(f"{folder}/state.json").num_rows == 1
    with pytest.raises(InputError, match=r"found 1 \.txt \(notes\.txt\); expected \.parquet, .*\.csv"):
        open_source(f"{folder}/notes.txt")


def test_folders_of_a_column_whose_name_begins_with_an_underscore_are_read(write):
    write("_day=1/a.parquet", texts(1))
    write("_day=2/_x.parquet", texts(1))
    folder = write("_old/a.parquet", texts(1))
    fsspec.filesystem("memory").put(folder, "/underscores", recursive=True)
    for path in (folder, f"{folder}/*", "memory://underscores"):
        source = open_source(path)
        assert [file.relative for file in source.files] == ["_day=1/a.parquet"]
    assert [row["_day"] for row in table_of(open_source(folder))] == [1]


@pytest.mark.parametrize("fault", ["truncated", "slow_down", "reset"])
def test_reading_continues_after_faults_of_the_store(store, write, fault):
    folder = write("a.parquet", texts(50), row_group_size=10)
    store.bucket.upload(Path(folder, "a.parquet"), f"faults/{fault}/a.parquet")
    source = open_source(store.bucket.url(f"faults/{fault}"), store.bucket.storage)
    before = store.proxy.done[fault]
    for n in (1, 2):
        store.proxy.add(fault, f"faults/{fault}/a.parquet", "GET", n)
        assert rows_of(source, cut_windows(source, 10 * n, BIG)) == [("a.parquet", i, f"row {i}") for i in range(50)]
    assert store.proxy.done[fault] - before == 3
