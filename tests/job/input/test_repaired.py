"""Damaged row groups that are repaired, and files that are damaged, between two runs: each row stays exactly once."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data import units
from pipeline.data.output.parts import PartName, PartStore
from pipeline.errors import FingerprintError, InputError, Interrupted, OutputError
from pipeline.job.dataflow import in_process, reading
from pipeline.job.output.audit import audit
from tests.data.test_corrupt import flip
from tests.job.conftest import run, success
from tests.job.drive import drive_and_kill

without_ray = pytest.mark.usefixtures("without_ray")
SKIP = {"on_corrupt": "skip"}
LIMITS = {"window_rows": 40, "max_error_rate": 0.9}


def text(i: int) -> str:
    return f"text {i} " + "x" * (i * 7 % 31)


class Damaged:
    """A job over one file of 80 rows in 8 row groups and two windows, some of the row groups damaged."""

    def __init__(self, job, *groups: int, rows: int = 80) -> None:
        self.job, self.path, self.num_rows = (
            job.fake(step_s=0.01, max_num_seqs=4),
            job.folder / "in" / "f0.parquet",
            rows,
        )
        table = pa.table({"id": range(rows), "text": [text(i) for i in range(rows)]})
        options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        pq.write_table(table, self.path, row_group_size=10, **options)
        self.backup = self.path.read_bytes()
        job.settings["input"] |= SKIP
        job.settings["run"] |= LIMITS
        self.damage(*groups)

    def damage(self, *groups: int) -> None:
        for group in groups:
            flip(self.path, self.path.read_bytes().index(f"text {10 * group + 5} ".encode()))

    def repair(self) -> None:
        self.path.write_bytes(self.backup)

    def corrupt(self) -> set[int]:
        """Check that the output holds each row once; return the numbers of the rows that could not be read."""
        rows = self.job.table().to_pylist()
        assert sorted(row["source_row"] for row in rows) == list(range(self.num_rows))
        for row in rows:
            is_read = row["error"] is None
            assert (row["id"] == row["source_row"]) == is_read == (row["generated_text"] is not None)
            assert row["error"] in (None, "corrupt_input")
        assert audit(PartStore(str(self.job.output)), True, print).sound
        return {row["source_row"] for row in rows if row["error"]}

    def record(self, window: int) -> list[dict]:
        return json.loads((self.job.output / f"_pipeline/damaged/w{window:05d}.json").read_text())["damaged"]


def leave_one_part(job) -> None:
    """Run the job, and leave what a run leaves that ends after its first part."""
    run(job)
    for path in [*job.parts()[1:], job.output / "_SUCCESS", job.output / "_pipeline/damaged/w00001.json"]:
        path.unlink(missing_ok=True)


def rows_of_group(group: int) -> set[int]:
    return set(range(10 * group, 10 * group + 10))


def test_a_file_repaired_after_a_kill_leaves_each_row_once(job):
    damaged = Damaged(job.fake(step_s=0.05, max_num_seqs=2), 1, 6)
    job.config(run={"window_rows": 1000})
    drive_and_kill(job.folder / "job.yaml", job.parts)
    assert len(job.parts()) < 10
    damaged.repair()
    done = subprocess.run([sys.executable, "-m", "tests.job.drive", str(job.folder / "job.yaml")], check=False)
    assert done.returncode == 0
    assert damaged.corrupt() == rows_of_group(1) | rows_of_group(6)
    assert [group["row_group"] for group in damaged.record(0)] == [1, 6]


def test_read_tasks_of_ray_cut_by_the_record_too(job, local_ray):
    damaged = Damaged(job, 1, 6)
    leave_one_part(job)
    damaged.repair()
    run(job)
    assert damaged.corrupt() == rows_of_group(1)
    run(job, retry_failed=True)
    assert damaged.corrupt() == set()


@without_ray
class TestBetweenRuns:
    def test_a_window_is_cut_by_its_record_and_its_recorded_groups_are_not_read(self, job):
        damaged = Damaged(job, 1, 6)
        leave_one_part(job)
        (group,) = damaged.record(0)
        assert (group["file"], group["row_group"], group["first_row"], group["rows"]) == ("f0.parquet", 1, 10, 10)
        assert "damaged" in group["reason"]
        damaged.repair()
        run(job)
        assert damaged.corrupt() == rows_of_group(1), "window 1 has no parts yet, so it is read as it is now"
        assert len(list((job.output / "_pipeline/damaged").iterdir())) == 1

    def test_damage_that_is_new_in_a_window_with_parts_is_refused_and_names_what_to_do(self, job):
        damaged = Damaged(job)
        leave_one_part(job)
        before = job.parts()
        damaged.damage(2)
        with pytest.raises(InputError) as raised:
            run(job)
        for expected in ("f0.parquet: row group 2: damaged", "window 0", before[0].name, "Restore the file",
                         f"remove {PartName.parse(before[0].name).of_window} and run again"):  # fmt: skip
            assert expected in str(raised.value)
        assert raised.value.exit_code == 2
        assert job.parts() == before
        damaged.repair()
        run(job)
        assert damaged.corrupt() == set()

    def test_the_advice_works_if_the_file_cannot_be_restored(self, job):
        damaged = Damaged(job, 1)
        leave_one_part(job)
        damaged.damage(2)
        with pytest.raises(InputError, match=r"and .*_pipeline/damaged/w00000\.json and run again"):
            run(job)
        for part in [*job.parts(), job.output / "_pipeline/damaged/w00000.json"]:
            part.unlink()
        run(job)
        assert damaged.corrupt() == rows_of_group(1) | rows_of_group(2)
        assert [group["row_group"] for group in damaged.record(0)] == [1, 2]

    def test_damage_that_is_new_in_a_window_without_parts_makes_error_rows(self, job):
        damaged = Damaged(job)
        leave_one_part(job)
        damaged.damage(6)
        run(job)
        assert damaged.corrupt() == rows_of_group(6)
        assert [group["row_group"] for group in damaged.record(1)] == [6]

    def test_retrying_computes_the_rows_of_a_repaired_group_and_no_others(self, job):
        damaged = Damaged(job, 1, 2, 6)
        run(job)
        assert damaged.corrupt() == rows_of_group(1) | rows_of_group(2) | rows_of_group(6)
        before = {part.name: pq.read_table(part).to_pylist() for part in job.parts()}
        damaged.repair()
        damaged.damage(2)
        run(job, retry_failed=True)
        assert damaged.corrupt() == rows_of_group(2)
        after = {part.name: pq.read_table(part).to_pylist() for part in job.parts()}
        assert after.keys() == before.keys()
        for name, rows in before.items():
            for old, new in zip(rows, after[name], strict=True):
                assert old["error"] or old == new
        damaged.repair()
        (job.output / "_SUCCESS").unlink()
        job.parts()[0].unlink()
        job.parts()[-1].unlink()
        run(job, retry_failed=True)  # also of the units that are left
        assert damaged.corrupt() == set()

    def test_rows_kept_by_a_stopped_run_are_dropped_if_they_cannot_be_read_any_more(self, job):
        damaged = Damaged(job.fake(step_s=0.05, max_num_seqs=3), rows=40)
        stop = [(lambda status: status.rows_done > 0, signal.SIGTERM)]
        options = {"output": {"rows_per_file": 40}}
        with pytest.raises(Interrupted):
            run(job, stop, run={"drain_timeout": "0.0 s"}, **options)
        assert not job.parts()
        damaged.damage(0, 1, 2, 3)
        run(job, run={"max_error_rate": 1.0}, **options)
        assert damaged.corrupt() == set(range(40))

    def test_on_corrupt_may_change_between_runs(self, job):
        damaged = Damaged(job, 1)
        fail = {"on_corrupt": "fail"}
        with pytest.raises(InputError, match=r"row group 1: damaged.*input\.on_corrupt: skip"):
            run(job, input=fail)
        leave_one_part(job)
        for _ in ("damaged", "repaired"):
            with pytest.raises(InputError, match=r"row group 1 was damaged when window 0 .*on_corrupt: skip again"):
                run(job, input=fail)
            damaged.repair()
        run(job)
        assert damaged.corrupt() == rows_of_group(1)
        run(job, input=fail, retry_failed=True)
        assert damaged.corrupt() == set()

    def test_a_sample_records_no_damage(self, job):
        damaged = Damaged(job, 1)
        run(job, sample=8)
        assert not (job.output / "_pipeline/damaged").exists()
        damaged.repair()
        run(job)
        assert damaged.corrupt() == set()

    def test_of_two_runs_that_record_a_window_the_first_one_decides(self, job, monkeypatch):
        damaged, read = Damaged(job, 1, 2), reading.load_damage
        group = {"file": "f0.parquet", "row_group": 2, "first_row": 20, "rows": 10, "reason": "by another run"}
        record = json.dumps({"format": 1, "window": 0, "damaged": [group]}).encode()

        def read_before_it_exists(store, window):
            found = read(store, window)
            if window == 0 and found is None:
                assert store.folder.create("_pipeline/damaged/w00000.json", record)
            return found

        monkeypatch.setattr(reading, "load_damage", read_before_it_exists)
        with pytest.raises(InputError, match=r"row group 1: damaged.*by .*w00000\.json"):
            run(job)
        damaged.repair()
        damaged.damage(2)
        run(job)
        assert damaged.corrupt() == rows_of_group(2)
        messages = {row["error_message"] for row in job.table().to_pylist() if row["error"]}
        assert messages == {"row group 2: by another run"}

    def test_a_record_that_was_edited_is_refused(self, job):
        Damaged(job, 1)
        leave_one_part(job)
        path = job.output / "_pipeline/damaged/w00000.json"
        for content, message in (("{", "was it edited"), ('{"format": 9}', "format 9"), ('{"format": 1}', "edited")):
            path.write_text(content)
            with pytest.raises(OutputError, match=rf"w00000\.json: .*{message}"):
                run(job)


def other_cut(monkeypatch) -> None:
    """Cut windows into as many units of the same sizes, with other rows."""
    cut = units.cut_units

    def moved(prompts_bytes, *args):
        found = cut(prompts_bytes, *args)
        order = [row for unit in found for row in unit]
        order, sizes = order[1:] + order[:1], [len(unit) for unit in found]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [np.array(order[start : start + size]) for start, size in zip(starts, sizes, strict=True)]

    monkeypatch.setattr(units, "cut_units", moved)


@without_ray
class TestOtherCuts:
    def test_a_cut_that_changed_is_refused_at_resume(self, job, monkeypatch):
        undamaged = Damaged(job)
        leave_one_part(job)
        before = job.parts()
        other_cut(monkeypatch)
        with pytest.raises(OutputError, match=r"w00000-u0000.* of window 0, unit 0 holds other rows .*run again"):
            run(job)
        assert job.parts() == before
        monkeypatch.undo()
        run(job)
        assert undamaged.corrupt() == set()

    def test_a_part_of_another_size_is_refused_at_resume(self, job):
        Damaged(job)
        run(job)
        (job.output / "_SUCCESS").unlink()
        first, last = job.parts()[0], job.parts()[4]
        name = PartName.parse(first.name)
        table = pq.read_table(first)
        PartStore(str(job.output)).write(PartName(name.fingerprint8, 0, 0, name.num_units, 5), table.slice(0, 5))
        first.unlink()
        last.unlink()
        with pytest.raises(OutputError, match="unit 0 holds 5 rows, and the unit now has 8"):
            run(job)

    def test_parts_of_two_cuts_are_refused_by_the_count_at_the_end(self, job, monkeypatch, tmp_path):
        Damaged(job)
        run(job)
        one = {part.name: part.read_bytes() for part in job.parts()}
        shutil.rmtree(job.output)
        other_cut(monkeypatch)
        run(job)
        assert {part.name for part in job.parts()} == one.keys()
        name = job.parts()[1].name
        (job.output / name).write_bytes(one[name])
        with pytest.raises(OutputError, match=r"window 0, .*w00000-\*.*hold each of its rows once.*and run again"):
            run(job)
        assert not (job.output / "_SUCCESS").exists()

    def test_a_part_that_is_a_copy_of_another_is_refused(self, job):
        Damaged(job)
        run(job)
        first, second = job.parts()[:2]
        shutil.copy(first, second)
        counts = success(job)
        found = audit(PartStore(str(job.output)), False, print)
        assert not found.sound
        (job.output / "_SUCCESS").unlink()
        with pytest.raises(OutputError, match="window 0"):
            run(job)
        assert len(counts["rows_checksum"]) == 16

    def test_two_runs_with_different_cuts_do_not_both_write_a_unit(self, job, monkeypatch):
        Damaged(job)
        run(job)
        whole = {part.name: part.read_bytes() for part in job.parts()}
        for path in [*job.parts(), job.output / "_SUCCESS"]:
            path.unlink()
        other_cut(monkeypatch)
        read = in_process.read_units

        def written_meanwhile(task, *args):
            left = list(read(task, *args))
            for name, data in whole.items():
                (job.output / name).write_bytes(data)
            return iter(left)

        monkeypatch.setattr(in_process, "read_units", written_meanwhile)
        with pytest.raises(OutputError, match="holds other rows than the unit now has"):
            run(job)


@without_ray
def test_a_line_repaired_between_two_runs_makes_another_input(job):
    path = job.folder / "in" / "a.jsonl"
    lines = [json.dumps({"id": i, "text": text(i)}) for i in range(20)]
    path.write_text("\n".join([*lines[:5], "?" * len(lines[5]), *lines[6:]]) + "\n")
    run(job, input=SKIP)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FingerprintError, match=r"files\.a\.jsonl"):
        run(job, input=SKIP)
