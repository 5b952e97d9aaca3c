"""Reading logs: in the order of time, new lines only, through rotation, from a disk and from a store."""

from pathlib import Path

import pytest

from pipeline.data.output.parts import PartStore
from pipeline.errors import OutputError
from pipeline.job.telemetry.log_reader import LogReader, logged_run
from pipeline.job.telemetry.logs import LogFolder
from tests.faults.store import FaultyStore


def line(second: int, text: str) -> str:
    return f"2026-11-23 12:00:{second:02}.000 info    {text}\n"


@pytest.fixture
def run_folder(tmp_path) -> Path:
    path = tmp_path / "_pipeline" / "logs" / "0001-x"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def folder(tmp_path):
    return PartStore(str(tmp_path)).folder


def new_lines(reader: LogReader) -> list[tuple[str, str]]:
    return [(each.log, each.text.rpartition(" ")[2]) for each in reader.new_lines()]


def test_lines_of_all_logs_come_in_the_order_of_time_a_logs_files_as_one(run_folder, folder):
    (run_folder / "driver.10.log").write_text(line(3, "c") + line(6, "f"))
    (run_folder / "driver.2.log").write_text(line(2, "b"))
    (run_folder / "driver.log").write_text(line(1, "a"))
    (run_folder / "engine-0.log").write_text(line(4, "d") + line(5, "e"))
    (run_folder / "ray.log").write_text("--- worker.err\n")
    assert new_lines(LogReader(folder, "0001-x")) == [
        ("driver", "a"), ("driver", "b"), ("driver", "c"), ("engine-0", "d"), ("engine-0", "e"), ("driver", "f"),
        ("ray", "worker.err"),
    ]  # fmt: skip
    assert new_lines(LogReader(folder, "0001-x", ["engine-0"])) == [("engine-0", "d"), ("engine-0", "e")]


def test_each_whole_line_is_returned_once(run_folder, folder):
    log, reader = run_folder / "driver.log", LogReader(folder, "0001-x")
    assert new_lines(reader) == []
    log.write_text(line(1, "a") + "2026-11-23 12:00:02.000 info    b")
    assert new_lines(reader) == [("driver", "a")]
    assert new_lines(reader) == []
    with log.open("a") as file:
        file.write("bb\n" + line(3, "c"))
    (run_folder / "engine-7.log").write_text(line(2, "new"))
    assert new_lines(reader) == [("driver", "bbb"), ("engine-7", "new"), ("driver", "c")]


def test_no_line_is_lost_when_a_log_continues_in_another_file(run_folder, folder):
    log, reader = run_folder / "driver.log", LogReader(folder, "0001-x")
    log.write_text(line(1, "a"))
    assert new_lines(reader) == [("driver", "a")]
    with log.open("a") as file:
        file.write(line(2, "b"))
    (run_folder / "driver.2.log").write_text(line(3, "c"))
    assert [text for _, text in new_lines(reader)] == ["b", "c"]
    (run_folder / "driver.2.log").unlink()
    (run_folder / "driver.3.log").write_text(line(4, "d"))
    assert [text for _, text in new_lines(reader)] == ["d"]
    assert new_lines(reader) == []


def test_from_a_store_too(tmp_path):
    with FaultyStore() as faulty:
        store = PartStore(faulty.bucket.url("out"), dict(faulty.bucket.storage))
        with pytest.raises(OutputError, match="no run has left logs"):
            logged_run(store.folder)
        log = LogFolder(store, "0001-x").log("driver.log", "info")
        log.line("text " * 20_000 + "one")
        log.line("two")
        log.close()
        reader = LogReader(store.folder, logged_run(store.folder))
        assert new_lines(reader) == [("driver", "one"), ("driver", "two")]
        assert new_lines(reader) == []
        faulty.bucket.put("out/_pipeline/logs/0001-x/driver.log", b"x")
        assert new_lines(reader) == []


def test_which_run_is_meant(tmp_path, folder):
    for name in ("0001-x", "0002-y", "10000-z"):
        (tmp_path / "_pipeline" / "logs" / name).mkdir(parents=True)
    assert [logged_run(folder, wanted) for wanted in (None, "2", "0001", "0002-y")] == [
        "10000-z", "0002-y", "0001-x", "0002-y"
    ]  # fmt: skip
    with pytest.raises(OutputError, match="no logs of run 7; available: 0001-x, 0002-y, 10000-z"):
        logged_run(folder, "7")
