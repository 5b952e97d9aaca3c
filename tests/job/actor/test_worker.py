"""An actor's work without Ray: a unit that has its part is left alone, and every computed token is accounted for."""

import threading
import time

import pyarrow as pa
import pytest

from pipeline.data.output.parts import PartStore
from pipeline.data.prompts import PromptSpec
from pipeline.data.units import UnitSpec, make_units
from pipeline.engine.params import EngineConfig, SamplingParams
from pipeline.job.actor.worker import Worker, WorkSpec
from pipeline.machine.host import now_us
from pipeline.report.record.row_stats import Computed
from tests.job.conftest import FAKES


def units(rows: int, unit_rows: int) -> list[bytes]:
    table = pa.table({"p": [f"row {i}" for i in range(rows)]})
    table = table.append_column("source_file", pa.array(["a.parquet"] * rows))
    table = table.append_column("source_row", pa.array(range(rows), pa.int64()))
    spec = UnitSpec(PromptSpec(column="p"), unit_rows=unit_rows)
    return [unit.to_bytes() for unit in make_units(table, spec, window=0)]


@pytest.fixture
def start(job):
    """start(fake=...) -> a worker over a fake engine; all of a test share one output."""
    started = []
    PartStore(str(job.output)).folder.probe()

    def start(**fake) -> Worker:
        job.fake(**fake)
        model = str(job.folder / "model")
        engine = EngineConfig(model=model, num_threads=1)
        spec = WorkSpec(FAKES, model, engine, SamplingParams(max_tokens=6), str(job.output), "0123abcd", "0001-run")
        started.append(Worker(spec, 0, now_us()))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def test_a_unit_whose_part_is_there_is_found_and_not_computed(start, job):
    worker = start()
    (unit,) = units(5, 8)
    first = worker.process(unit)
    (part,) = job.parts()
    before, stats = part.stat(), worker.state().record.stats
    again = worker.process(unit)
    assert (first.written, first.found, again.written, again.found) == (True, False, False, True)
    assert again.totals == first.totals
    assert not again.row_stats.lengths
    assert worker.state().record.stats == stats
    assert (part.stat().st_ino, part.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_rows_kept_by_a_stopped_actor_are_taken_over_by_the_next(start):
    """No token is counted twice: what the first kept, the second delivers without having computed it."""
    stopped = start(step_s=0.1, max_num_seqs=2)
    (unit,) = units(12, 16)
    call = threading.Thread(target=stopped.process, args=(unit,))
    call.start()
    while stopped.state().open_rows_done < 3:
        time.sleep(0.02)
    assert stopped.state().record.units_in_progress == 1
    stopped.interrupt()
    call.join(timeout=60)
    first = stopped.state().record
    assert first.kept_tokens.generated > 0
    assert first.delivered_tokens == Computed()
    following = start()
    summary = following.process(unit)
    second = following.state().record
    assert second.resumed_rows >= 3
    assert second.resumed_generated_tokens == first.kept_tokens.generated
    assert summary.totals.num_generated_tokens == second.delivered_tokens.generated + first.kept_tokens.generated
    assert second.delivered_tokens == second.computed
