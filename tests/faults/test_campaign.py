"""Short jobs of the campaign, with turns chosen by hand: see `campaign`. The long one is run by hand."""

import signal

import pyarrow as pa
import pytest

from tests.faults.campaign import JobDraw, PlayedJob, Strike, Turn, play_job
from tests.faults.fakes import answer

pytestmark = pytest.mark.timeout(900)

AT_PART_3 = "part.linked=kill@3"
AFTER_A_PART = Strike(when="part", delay_s=0.1, victim="driver")
ENGINE_AFTER_A_PART = Strike(when="part", delay_s=0.0, victim="engine")
STOP = Strike(when="part", delay_s=0.1, victim="driver", number=signal.SIGTERM)


def job(turns: tuple[Turn, ...], **settings) -> JobDraw:
    """Return a job of one window with about five seconds of work in 30 units, so that turns find it half done."""
    small = {"num_rows": 3000, "num_files": 2, "group_rows": 300, "window_rows": 3000, "rows_per_file": 100}
    defaults = {**small, "seed": "1", "setup": "threads", "seconds_per_step": 0.1}
    return JobDraw(**{**defaults, **settings}, turns=turns)


def test_rows_survive_kills_of_driver_and_engine_a_stop_and_two_runs_at_once():
    turns = (
        Turn(strikes=(ENGINE_AFTER_A_PART, AFTER_A_PART)),
        Turn(failpoint=AT_PART_3),
        Turn(strikes=(STOP,), change="append"),
        Turn(change="two runs"),
    )
    figures = play_job(job(turns, seconds_per_step=0.2))
    assert figures.kills == {"engine": 1, "driver": 1, "driver at part.linked": 1, "SIGTERM": 1}
    assert figures.rows == 3375


def test_a_damaged_file_that_is_repaired_in_the_middle_of_the_job_loses_no_row():
    turns = (Turn(change="damage", failpoint=AT_PART_3), Turn(change="repair", failpoint=AT_PART_3))
    # this seed damages the first row group, which changes the first units
    figures = play_job(job(turns, seed="9"))
    assert figures.kills == {"driver at part.linked": 2}
    assert figures.rows == 3000


@pytest.mark.parametrize("cut", ["another order", "shorter prefixes"])
def test_a_version_that_cuts_other_units_is_refused_and_the_old_one_finishes(cut):
    figures = play_job(job((Turn(failpoint=AT_PART_3), Turn(change="other cut", cut=cut))))
    assert figures.refused == {"other cut": 1}
    assert figures.rows == 3000


def test_rows_survive_kills_and_a_full_disk_on_a_store_that_fails():
    turns = (Turn(failpoint="part.serialized=kill@2"), Turn(failpoint="part.linked=kill@1"), Turn(change="full disk"))
    figures = play_job(job(turns, setup="s3", num_rows=1000, window_rows=1000))
    assert figures.kills == {"driver at part.serialized": 1, "driver at part.linked": 1}
    assert figures.ended[3] == 3
    assert figures.store_faults


ROWS = [("f.parquet", row, answer(text), None) for row, text in enumerate("abc")]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:2], "1 rows lost, the first .*2"),
        ([*ROWS, ROWS[0]], "1 rows doubled, the first .*0"),
        ([*ROWS, ("f.parquet", 3, answer("d"), None)], "unknown rows: .*3"),
        ([*ROWS[:2], ("f.parquet", 2, answer("d"), None)], "1 rows are wrong, the first .*2"),
        ([*ROWS[:2], ("f.parquet", 2, None, "corrupt_input")], "1 rows are wrong, the first .*2"),
    ],
)
def test_the_check_finds_each_kind_of_wrong_output(tmp_path, rows, message):
    played = PlayedJob(job(()), tmp_path)
    played.texts = {"f.parquet": list("abc")}
    names = ["source_file", "source_row", "generated_text", "error"]
    tables = [pa.table(dict(zip(names, map(list, zip(*found, strict=True)), strict=True))) for found in (ROWS, rows)]
    played.check_rows(tables[0])
    with pytest.raises(AssertionError, match=message):
        played.check_rows(tables[1])
