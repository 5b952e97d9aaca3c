"""`pipeline verify`: an output as its job left it is sound; all changes to it are named at once."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.data.output.inventory import Inventory
from pipeline.data.output.parts import PartName, PartStore
from pipeline.errors import OutputError
from pipeline.job.output.audit import MAX_SHOWN, Audit, _RowChecker, audit
from tests.faults.store import FaultyStore
from tests.job.conftest import TEXTS, run, success

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture
def finished(job):
    run(job.rows([None, *TEXTS[1:]], per_file=15))
    return job


def verify(job, deep: bool = True) -> Audit:
    return audit(PartStore(str(job.output)), deep, print)


def problem(job, deep: bool = True) -> str:
    found = verify(job, deep)
    assert found.num_problems == 1, found.problems
    return found.problems[0]


def changed(part: Path, change=lambda table: table, **metadata) -> None:
    """Rewrite the part with other rows as the pipeline would: a good footer, and checksums that fit."""
    store, name = PartStore(str(part.parent)), PartName.parse(part.name)
    assert name is not None
    stored = store.read_part(name)
    store.rewrite(name, change(stored.table), stored.metadata | metadata, stored.tag)


def with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    index = table.schema.names.index(name)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(values, field.type))


def keep_success(job) -> None:
    """Update the sizes in _SUCCESS, so that only the contents are wrong."""
    inventory = Inventory.from_store(PartStore(str(job.output)))
    counts = {**success(job), "parts_bytes": inventory.parts_bytes, "parts_digest": inventory.parts_digest}
    (job.output / "_SUCCESS").write_text(json.dumps(counts))


def with_an_error(job) -> Path:
    return next(part for part in job.parts() if pq.read_table(part)["error"].is_valid().to_pylist().count(True))


@pytest.mark.parametrize("deep", [False, True])
def test_an_output_as_it_was_left_is_sound(finished, deep):
    found = verify(finished, deep)
    assert found.sound, found.problems
    assert (found.rows, found.error_rows, found.parts) == (50, 1, len(finished.parts()))
    assert "sound" in found.to_text()
    assert found.to_json()["sound"] is True


def test_one_flipped_bit_of_a_page_is_found_by_reading_it(finished):
    part = finished.parts()[1]
    whole, rows = part.read_bytes(), pq.read_table(part).to_pylist()
    data_end = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    found = 0
    for byte in range(4, data_end, 31):
        part.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
        assert verify(finished, deep=False).sound, "what is read without --deep is intact"
        if verify(finished).sound:  # a bit of a page's header that is not used
            assert pq.read_table(part).to_pylist() == rows
        else:
            assert f"{part.name}: this part is damaged" in problem(finished)
            found += 1
    assert found > 20


def test_all_problems_are_reported_at_once(finished):
    cut, missing, footless, *_ = finished.parts()
    cut.write_bytes(cut.read_bytes()[:300])
    footless.write_bytes(footless.read_bytes()[:-9] + b"x" * 9)
    missing.unlink()
    (finished.output / "notes.txt").write_text("mine")
    shutil.copy(finished.parts()[-1], finished.output / "part-ffffffff-w00000-u0000of0001-n8.parquet")
    text = verify(finished).to_text()
    damaged = [f"{part.name}: this part is damaged" for part in (cut, footless)]
    for expected in ("damaged: 6 problems", "notes.txt: not a part", "a part of another job", "window 0: 1 of its",
                 "_SUCCESS counts", *damaged):  # fmt: skip
        assert expected in text


def test_only_the_first_problems_are_shown_and_all_are_counted(finished):
    for i in range(MAX_SHOWN + 5):
        (finished.output / f"notes{i:02d}.txt").write_text("mine")
    found = verify(finished, deep=False)
    assert (found.num_problems, len(found.problems)) == (MAX_SHOWN + 5, MAX_SHOWN)
    assert "and 5 more" in found.to_text()


def test_a_job_that_is_not_finished_is_called_damaged_only_if_it_is(finished):
    (finished.output / "_SUCCESS").unlink()
    found = verify(finished)
    assert not found.sound
    assert "not finished: " in found.to_text()
    assert "damaged" not in found.to_text()
    for part in finished.output.glob("*-w00001-*"):
        part.unlink()
    found = verify(finished, deep=False)
    assert any("window 1: all of its parts are missing" in p for p in found.problems)
    assert any("the job is not finished" in p for p in found.problems)
    assert "damaged: 2 problems" in found.to_text()


def test_a_row_twice_and_one_left_out(finished):
    def doubled(table: pa.Table) -> pa.Table:
        rows = table["source_row"].to_pylist()
        return with_column(table, "source_row", [rows[1], *rows[1:]])

    changed(finished.parts()[1], doubled)
    keep_success(finished)
    assert problem(finished, deep=False).startswith("rows_checksum: the parts contain ")
    assert "duplicates" in " ".join(verify(finished).problems)


def test_columns_and_counts_that_differ(finished):
    part = finished.parts()[-1]
    changed(part, lambda table: table.set_column(0, "id", table["id"].cast(pa.int32())))
    keep_success(finished)
    assert "its columns differ from" in problem(finished, deep=False)


def test_rows_that_are_not_what_the_footer_counts(finished):
    part = with_an_error(finished)
    table = pq.read_table(part)
    pq.write_table(with_column(table, "error", [None] * table.num_rows), part)
    keep_success(finished)
    assert verify(finished, deep=False).sound
    assert "differ from the counts in its footer" in problem(finished)


def test_codes_that_are_not_known(finished):
    def odd(table: pa.Table) -> pa.Table:
        return with_column(table, "error", [code and "gremlins" for code in table["error"].to_pylist()])

    changed(with_an_error(finished), odd)
    keep_success(finished)
    assert "unknown error codes: gremlins" in " ".join(verify(finished, False).problems)


def locations(*rows: tuple[str, int]) -> pa.Table:
    return pa.table({"file": [file for file, _ in rows], "row": [row for _, row in rows]})


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([[("a", 0), ("a", 1)], [("a", 2), ("b", 0)], [("c", 0)]], []),
        ([[("a", 0), ("a", 2)], [("a", 3)]], ["window 0, a: 1 rows between 0 and 2 are missing"]),
        ([[("a", 1)]], ["window 0, a: its rows from 0 to 0 are missing"]),
        ([[("a", 0)], [("a", 3)]], ["window 1, a: its rows from 1 to 2 are missing"]),
        ([[("a", 0)], [("b", 1)]], ["window 1, b: its rows from 0 to 0 are missing"]),
        ([[("a", 0), ("b", 1)]], ["window 0, b: its rows before 1 are missing"]),
        ([[("a", 0), ("b", 0)], [("a", 1)]], ["window 1, a: row 1 and others are also in an earlier window"]),
        ([[("a", 0)], None, [("a", 9), ("a", 11)]], ["window 2, a: 1 rows between 9 and 11 are missing"]),
    ],
)
def test_rows_follow_each_other(windows, expected):
    found: list[str] = []
    rows = _RowChecker(found.append, {})
    for window, some in enumerate(windows):
        rows.add(window, None if some is None else locations(*some), True)
    rows.end()
    assert found == expected


def test_the_command_answers_with_its_exit_code(finished, tmp_path):
    ran = CliRunner().invoke(cli, ["verify", str(finished.output), "--deep"])
    assert ran.exit_code == 0, ran.output
    assert "sound: " in ran.output
    finished.parts()[0].unlink()
    ran = CliRunner().invoke(cli, ["verify", str(finished.folder / "job.yaml"), "--json"])
    assert ran.exit_code == OutputError.exit_code
    found = json.loads(ran.stdout.splitlines()[0])
    assert (found["sound"], found["deep"], found["num_problems"]) == (False, False, 2)
    ran = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert ran.exit_code == OutputError.exit_code
    assert "is not the output of a job" in ran.output


def test_an_output_in_a_store(finished):
    with FaultyStore() as store:
        for path in [*finished.parts(), finished.output / "_SUCCESS", finished.output / "_pipeline/job.json"]:
            store.bucket.upload(path, f"out/{path.relative_to(finished.output)}")
        output = PartStore(store.bucket.url("out"), store.bucket.storage)
        assert audit(output, True, print).sound
        store.bucket.put(f"out/{finished.parts()[0].name}", b"cut")
        found = audit(output, True, print)
        assert any("this part is damaged" in p for p in found.problems)
        assert any("bytes, but _SUCCESS counts" in p for p in found.problems)


def test_a_part_that_was_cut_otherwise_is_named(finished):
    name = PartName.parse(finished.parts()[0].name)
    assert name is not None
    odd = PartName(name.fingerprint8, name.window, name.unit, name.num_units + 1, name.rows)
    shutil.copy(finished.parts()[0], finished.output / str(odd))
    assert any(
        f"other parts name {num_units} units for this window" in found
        for found in verify(finished, deep=False).problems
        for num_units in (name.num_units, odd.num_units)
    )


def test_a_part_whose_footer_is_another_jobs_is_named(finished):
    changed(finished.parts()[0], **{"pipeline.fingerprint": "0" * 64})
    keep_success(finished)
    assert "its footer names another job (0000" in problem(finished, deep=False)


@pytest.mark.parametrize("command", ["verify", "report", "status", "compact", "convert", "logs"])
def test_an_output_of_an_earlier_format_is_refused_by_its_number(finished, command, tmp_path):
    path = finished.output / "_pipeline/job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    options = ["--output", str(tmp_path / "new")] if command in ("compact", "convert") else []
    ran = CliRunner().invoke(cli, [command, str(finished.output), *options])
    assert ran.exit_code == OutputError.exit_code
    assert "format 1, written by version" in ran.output
    with pytest.raises(OutputError, match="format 1"):
        verify(finished)


def test_sums_that_success_counts_otherwise_are_named(finished):
    counts = {**success(finished), "num_generated_tokens": 7}
    (finished.output / "_SUCCESS").write_text(json.dumps(counts))
    assert problem(finished, deep=False).endswith("_SUCCESS counts 7")
