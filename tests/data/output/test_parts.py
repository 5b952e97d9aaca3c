"""Output folder: a part appears completely or not at all, and once, whatever happens to its writers."""

import errno
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import PartName, PartStore
from pipeline.errors import EnvironmentFailed, OutputError, PipelineError
from pipeline.stores import failpoints
from pipeline.stores.local_folder import LocalFolder
from tests.data.output.finished_units import FP, name, result

STEPS = ["part.serialized", "part.synced", "part.linked", "part.dir_synced"]


@pytest.fixture
def store(tmp_path) -> PartStore:
    return PartStore(str(tmp_path / "out"))


def parts(store: PartStore) -> list[str]:
    return sorted(p.name for p in Path(store.path).glob("part-*"))


def leftovers(store: PartStore) -> list[str]:
    return list(store.folder.names("_pipeline/tmp"))


def read(store: PartStore, part: PartName) -> pa.Table:
    return pq.read_table(f"{store.path}/{part}", page_checksum_verification=True)


# --- names and progress


@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(0, 10**6)] * 4))
def test_names_round_trip(fingerprint, numbers):
    window, unit, more, rows = numbers
    part = PartName(f"{fingerprint:08x}", window, unit, unit + more + 1, rows)
    assert PartName.parse(str(part)) == part


def test_names_are_readable():
    part = PartName("89abcdef", 12, 7, 93, 256)
    assert str(part) == "part-89abcdef-w00012-u0007of0093-n256.parquet"
    with pytest.raises(PipelineError):
        PartName("89abcdef", 12, 93, 93, 256)
    # a unit out of range, other padding, other case, names of other programs, a temporary file
    assert PartName.parse(str(part).replace("u0007", "u0093")) is None
    assert PartName.parse(str(part).replace("w00012", "w000012")) is None
    assert PartName.parse(str(part).replace("89abcdef", "89ABCDEF")) is None
    # a unit or a count of rows that no job has: memory of a listing grows with these
    assert PartName.parse("part-89abcdef-w00012-u0007of99999999-n256.parquet") is None
    assert PartName.parse(f"part-89abcdef-w00012-u0007of0093-n{2**64}.parquet") is None
    for other in ("part-0.parquet", f"{part}.tmp", f"x{part}", ""):
        assert PartName.parse(other) is None


def test_a_listing_of_many_parts_keeps_numbers_instead_of_names(store):
    class Many(LocalFolder):
        def each_name(self):
            return (str(name(i % 100, window=i // 100, num_units=100)) for i in range(20_000))

    store.folder = Many(store.path)
    tracemalloc.start()
    progress = store.list(FP)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (progress.num_units, progress.complete(199), progress.complete(200)) == (20_000, True, False)
    assert peak < 700_000  # the names alone are 2 MB


@pytest.mark.parametrize(("file", "message"), [
    (str(name(fingerprint8="ffffffff")), "belongs to another job"),
    ("part-00000.parquet", "not a part"),
    ("thesis.docx", "not a part"),
    ("notes.txt", r"notes\.txt: not a part.* give it a name that begins with _ or a dot"),
    (str(name(rows=51)), "another part holds the same unit"),
    (str(name(1, num_units=41)), "contradicts the name of another part, by which the window has 40 units"),
])  # fmt: skip
def test_foreign_files_are_refused(store, file, message):
    store.write(name(), result(50))
    Path(store.path, file).write_bytes(b"")
    with pytest.raises(OutputError, match=message):
        store.list()


def test_foreign_parts_alone_are_refused(store):
    store.write(name(), result(50))
    assert store.list().fingerprint8 == FP
    with pytest.raises(OutputError, match="belongs to another job"):
        store.list("ffffffff")


# --- one part


def test_a_part_and_its_provenance(store):
    table = result(50, errors=2)
    assert store.write(name(), table, {"pipeline.fingerprint": "x" * 64, "pipeline.model": "demo"})
    assert read(store, name()).equals(table)
    footer = pq.read_metadata(f"{store.path}/{name()}")
    assert footer.metadata[b"pipeline.model"] == b"demo"
    assert json.loads(footer.metadata[b"pipeline.unit"])["num_generated_tokens"] == 144
    assert footer.row_group(0).column(1).compression == "ZSTD"
    assert leftovers(store) == []
    assert os.stat(f"{store.path}/{name()}").st_mode & 0o444 == 0o444
    assert pq.read_table(store.path).num_rows == 50  # readers ignore _pipeline


def test_a_second_writer_changes_nothing(store):
    assert store.write(name(), result(50, seed=1))
    assert not store.write(name(), result(50, seed=2))
    assert read(store, name()).equals(result(50, seed=1))
    Path(store.path, str(name(1))).write_bytes(Path(store.path, str(name())).read_bytes())
    with pytest.raises(PipelineError, match="the table has 50 rows"):
        store.write(name(1, rows=49), result(50))
    Path(store.path, str(name(2, rows=9))).write_bytes(Path(store.path, str(name())).read_bytes())
    with pytest.raises(OutputError, match="holds 50 rows, expected 9 by its name"):
        store.write(name(2, rows=9), result(9))
    Path(store.path, str(name(3, rows=9))).write_bytes(b"PAR1")
    with pytest.raises(OutputError, match="damaged"):
        store.write(name(3, rows=9), result(9))


def test_a_lost_answer_is_recognised(store, monkeypatch):
    """A network disk links the file and then reports that it exists: the part is ours."""
    link = os.link

    def twice(a, b):
        link(a, b)
        link(a, b)

    monkeypatch.setattr(os, "link", twice)
    assert store.write(name(), result(50))


def test_totals(store):
    assert store.totals() == PartTotals()
    store.write(name(0), result(50, errors=2))
    store.write(name(1, 9), result(9, errors=9))
    assert replace(store.totals(), rows_checksum=0) == PartTotals(59, 2, {"null_prompt": 11}, 480, 192, 144)
    schemas = [pq.read_schema(f"{store.path}/{part}") for part in (name(0), name(1, 9))]
    assert schemas[0].remove_metadata().equals(schemas[1].remove_metadata(), check_metadata=True)
    whole = Path(store.path, str(name(1, 9))).read_bytes()
    Path(store.path, str(name(2, 9))).write_bytes(whole[:-30])
    with pytest.raises(OutputError, match=r"u0002of0040-n9\.parquet: this part is damaged"):
        store.totals()
    Path(store.path, str(name(2, 9))).unlink()
    Path(store.path, str(name(2, 8))).write_bytes(whole)
    with pytest.raises(OutputError, match=r"u0002of0040-n8\.parquet: holds 9 rows"):
        store.totals()
    pq.write_table(result(8), f"{store.path}/{name(2, 8)}")
    with pytest.raises(OutputError, match=r"u0002of0040-n8\.parquet: has no valid pipeline\.unit"):
        store.totals()


# --- disks that fail


@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_is_full_at_any_step(store, step):
    failpoints.install({step: failpoints.on_hit(1, failpoints.ACTIONS["enospc"])})
    with pytest.raises(EnvironmentFailed, match=r"part-.*No space left"):
        store.write(name(), result(50))
    assert leftovers(store) == []
    made = store.write(name(), result(50))
    assert made == (step in STEPS[:2])
    assert read(store, name()).equals(result(50))


def test_a_short_write_is_not_published(store):
    def cut():
        (temporary,) = Path(store.path, "_pipeline/tmp").iterdir()
        os.truncate(temporary, 100)

    failpoints.install({"part.synced": failpoints.on_hit(1, cut)})
    with pytest.raises(EnvironmentFailed, match="read back 100"):
        store.write(name(), result(50))
    assert parts(store) == leftovers(store) == []


def test_probe(store, tmp_path, monkeypatch):
    store.folder.probe()
    store.folder.probe()
    assert leftovers(store) == []
    (tmp_path / "file").write_text("x")
    for path in ("file", "file/out"):
        with pytest.raises(OutputError, match="cannot be written"):
            PartStore(str(tmp_path / path)).folder.probe()
    with pytest.raises(OutputError, match="expected a folder"):
        PartStore(str(tmp_path / "file")).list()
    with pytest.raises(OutputError, match=r"nope://bucket/out: cannot be opened.*check that nope:// is"):
        PartStore("nope://bucket/out", {"key": "secret"})
    with pytest.raises(OutputError, match="storage_options: a local folder takes no options; found key"):
        PartStore(str(tmp_path), {"key": "secret"})
    assert PartStore(f"file://{store.path}").path == store.path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PartStore("~/there").path == str(tmp_path / "there")


def failing(code: int, text: str):
    """Return a replacement of os.link that fails."""

    def link(a, b):
        raise OSError(code, text, str(b))

    return link


@pytest.mark.parametrize(("fake", "error", "message"), [
    (lambda a, b: Path(b).write_bytes(Path(a).read_bytes()), OutputError, "replaced an existing file"),
    (failing(errno.EPERM, "no"), OutputError, "hard links"),
    (failing(errno.EROFS, "no"), OutputError, "cannot be written"),
    (failing(errno.ENOSPC, "full"), EnvironmentFailed, "full"),
])  # fmt: skip
def test_the_probe_refuses_disks_without_the_required_guarantees(store, monkeypatch, fake, error, message):
    monkeypatch.setattr(os, "link", fake)
    with pytest.raises(error, match=message):
        store.folder.probe()


def test_a_temporary_file_that_its_writer_removes_first_is_not_an_error(store, monkeypatch):
    left = store.folder.root / "_pipeline" / "tmp" / "left"
    store.folder.probe()
    left.write_bytes(b"")
    unlink = Path.unlink

    def removed_before(self, missing_ok=False):
        unlink(self)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", removed_before)
    assert store.folder.clean_tmp() == 0
    assert not left.exists()


# --- several writers, and writers that die

WRITERS = """
import json, os, sys
sys.path.insert(0, {root!r})
from tests.data.output.finished_units import name, result
from pipeline.stores import failpoints
from pipeline.data.output.parts import PartStore

go, waiting = os.pipe()
writers = []
for out, seed, failing in {writers!r}:  # forked: pyarrow is imported once
    answers, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        failpoints.install_requested(failing)
        os.close(waiting)
        os.read(go, 1)  # all start when the parent closes its end
        for unit in range({units}):
            os.write(answer, b"1" if PartStore(out).write(name(unit), result(50, seed=seed)) else b"0")
        os._exit(0)
    os.close(answer)
    writers.append((pid, answers))
os.close(waiting)
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in writers]
print(json.dumps([[os.read(answers, 1000).decode(), end] for (_, answers), end in zip(writers, ends)]))
"""


def run_writers(units: int, *writers: tuple[PartStore, int, str]) -> list[tuple[list[bool], int]]:
    """Run processes that each write `units` parts with a seed and failpoints. Return their results and exit codes."""
    settings = [(store.path, seed, failing) for store, seed, failing in writers]
    code = WRITERS.format(root=str(Path(__file__).parents[3]), writers=settings, units=units)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120, check=True)
    return [([c == "1" for c in made], code) for made, code in json.loads(done.stdout)]


def test_killed_at_every_step_of_a_commit(tmp_path):
    stores = {step: PartStore(str(tmp_path / step)) for step in STEPS}
    ends = run_writers(3, *((store, 1, f"{step}=kill@2") for step, store in stores.items()))
    for (made, end), (step, store) in zip(ends, stores.items(), strict=True):
        assert (made, end) == ([True], -signal.SIGKILL)
        late = step in ("part.linked", "part.dir_synced")
        assert parts(store) == [str(name(u)) for u in range(2 if late else 1)]
        assert all(read(store, PartName.parse(p)).equals(result(50, seed=1)) for p in parts(store))
        assert len(leftovers(store)) == 1
        assert store.folder.clean_tmp() == 1
        # the next run writes what is missing and nothing else
        made = [store.write(name(u), result(50, seed=2)) for u in range(3)]
        assert made == [False, not late, True]
        assert read(store, name(1)).equals(result(50, seed=1 if late else 2))
        assert store.list(FP).num_units == 3
        assert leftovers(store) == []


def test_two_processes_write_the_same_parts(store):
    ends = run_writers(40, (store, 1, ""), (store, 2, ""))
    won = [{unit for unit, wrote in enumerate(made) if wrote} for made, _ in ends]
    assert [(len(made), end) for made, end in ends] == [(40, 0)] * 2
    assert won[0] | won[1] == set(range(40))
    assert not won[0] & won[1]
    for seed, units in zip((1, 2), won, strict=True):
        assert all(read(store, name(u)).equals(result(50, seed=seed)) for u in units)
    assert store.list(FP).complete(1)
    assert leftovers(store) == []


def test_temporary_files_of_live_writers_are_kept(store):
    removed = []
    failpoints.install({"part.synced": lambda: removed.append(store.folder.clean_tmp())})
    assert store.write(name(), result(50))
    assert removed == [0]


def test_a_temporary_file_deleted_by_mistake_costs_a_retry(store):
    def delete():
        for p in Path(store.path, "_pipeline/tmp").iterdir():
            p.unlink()

    failpoints.install({"part.synced": failpoints.on_hit(1, delete), "file.synced": failpoints.on_hit(1, delete)})
    assert store.write(name(), result(50))
    store.folder.replace("_pipeline/status.json", b"{}")
    assert read(store, name()).equals(result(50))
    assert store.folder.read("_pipeline/status.json") == b"{}"
    failpoints.install({"part.synced": delete})
    with pytest.raises(EnvironmentFailed, match="disappear"):
        store.write(name(1), result(50))
    assert leftovers(store) == []


def test_failpoints_in_the_environment_need_the_second_switch():
    for switch in ({}, {"PIPELINE_ALLOW_FAILPOINTS": ""}, {"PIPELINE_ALLOW_FAILPOINTS": "0"}):
        with pytest.warns(UserWarning, match="PIPELINE_FAILPOINTS is ignored"):
            assert failpoints.requested({"PIPELINE_FAILPOINTS": "part.linked=kill"} | switch) == ""
