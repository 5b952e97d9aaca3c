"""Counts of a run: every part before `_SUCCESS`, and error rows against the limit."""

import shutil
import signal
import threading
import time

import pytest

from pipeline.config.sections.limits import CostSection
from pipeline.data.output.part_totals import PartTotals
from pipeline.data.output.parts import DoneUnits, PartName, PartStore
from pipeline.errors import Interrupted, OutputError, PipelineError, TooManyRowErrors
from pipeline.job.output.success import count_rows
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.totals import OutputTotals
from pipeline.job.telemetry.run_log import RunLog
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.job.telemetry.writer import Telemetry
from pipeline.stores.local_folder import LocalFolder
from pipeline.stores.retries import RetryCounts
from tests.data.output.finished_units import result
from tests.job.conftest import TEXTS, run

pytestmark = pytest.mark.usefixtures("without_ray")


def test_the_count_before_success_finds_what_is_missing_or_too_much(job):
    run(job.rows(TEXTS))
    plan = make_plan(job.config(), "cpu")
    store = PartStore(str(job.output))
    assert count_rows(plan, store).rows == 50
    name = PartName(plan.fingerprint.short, 9, 0, 1, 0)
    store.write(name, plan.schema.empty_table())
    assert count_rows(plan, store).rows == 50
    extra = job.parts()[0]
    wrong = job.output / str(PartName(plan.fingerprint.short, 10, 0, 1, 8))
    shutil.copy(extra, wrong)
    with pytest.raises(OutputError, match="the parts hold 58 rows"):
        count_rows(plan, store)
    wrong.unlink()
    extra.unlink()
    with pytest.raises(PipelineError, match="incomplete windows: 1 \\(the first is 0\\)"):
        count_rows(plan, store)


def test_a_signal_ends_the_count_though_reads_hang(job, monkeypatch):
    run(job.rows(TEXTS))
    plan = make_plan(job.config(), "cpu")
    hang, hanging = threading.Event(), []

    def tail(self, name, length):
        hanging.append(name)
        hang.wait()

    def interrupt(number, frame):
        raise Interrupted("a signal")

    monkeypatch.setattr(LocalFolder, "tail", tail)
    old = signal.signal(signal.SIGALRM, interrupt)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            count_rows(plan, PartStore(str(job.output)))
    finally:
        signal.signal(signal.SIGALRM, old)
        hang.set()
    assert time.monotonic() - started < 20
    assert len(hanging) <= LocalFolder.reads_at_once


def test_the_parts_are_read_once_for_the_error_rate(job, monkeypatch):
    """A part may be written before the read and its summary arrive later: it is counted once, without another read."""
    store, reads = PartStore(str(job.output)), []
    existing = DoneUnits()
    for unit, errors in ((0, 6), (1, 3)):
        name = PartName("0123abcd", 1, unit, 40, 50)
        store.write(name, result(50, errors=errors))
        if unit == 0:
            existing.add(name)
    read = PartStore.totals
    monkeypatch.setattr(PartStore, "totals", lambda self, progress=None: reads.append(progress) or read(self, progress))
    log = RunLog(store, {}, CostSection(), {}, Telemetry(store.folder), RetryCounts())
    recorded = PartTotals(50, 1, {"null_prompt": 20})  # records of killed runs may be wrong
    totals = OutputTotals(store, log, recorded, existing, num_rows=100, limit=0.1)
    totals.check_error_rate()
    log.add(UnitSummary(1, 1, PartTotals(50, 1, {"null_prompt": 3}), written=True))
    totals.check_error_rate()
    log.add(UnitSummary(1, 2, PartTotals(50, 1, {"null_prompt": 2}), written=True))
    with pytest.raises(TooManyRowErrors, match="11 error rows of 100 rows"):
        totals.check_error_rate()
    assert reads == [existing]
