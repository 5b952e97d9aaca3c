"""The dataflow without Ray: the same units through the same `Worker`, in threads of the test's own
process."""

import queue
import threading

from pipeline.job.actor.ledger import Ledger, Order
from pipeline.job.actor.worker import Worker
from pipeline.job.dataflow.graph import EndOfUnits, read_units
from pipeline.job.dataflow.spec import FlowSpec
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.machine.host import now_us


class LocalFlow:
    """Stands in for `pipeline.job.dataflow.graph.Dataflow`."""

    session_logs = None
    started = 0  # how many were made: a finished job makes none

    def __init__(self, spec: FlowSpec, run_began_us: int) -> None:
        LocalFlow.started += 1
        self._ledger = Ledger(spec.actors)
        self._ledger.begin(now_us() - run_began_us)
        self._done: queue.SimpleQueue[UnitSummary | BaseException] = queue.SimpleQueue()
        self._todo: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._workers = []
        for _ in range(spec.actors):
            entry = self._ledger.register(b"")
            assert entry is not None
            self._workers.append(Worker(spec.work, entry[0], now_us() - entry[1]))
        threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True)
            for worker in self._workers
            for _ in range(spec.units_in_flight)
        ]
        threading.Thread(target=self._read, args=(spec, threads), daemon=True).start()

    def next(self, timeout_s: float) -> UnitSummary | None:
        try:
            item = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def actors(self, end: bool = False):
        for worker in self._workers:
            self._ledger.report(worker.state())
        return self._ledger.states(end)

    def order(self, order: Order) -> None:
        if order >= Order.ADMIT_NO_MORE:
            self._stopping.set()
        if order >= Order.GIVE_UP:
            for worker in self._workers:
                worker.interrupt()

    def close(self) -> None:
        self._stopping.set()
        for worker in self._workers:
            worker.close()

    def _read(self, spec: FlowSpec, threads: list[threading.Thread]) -> None:
        try:
            for task in spec.tasks:
                for block in read_units(task, spec.source, spec.units, spec.work.output):
                    assert block.num_rows == 1
                    self._todo.put(block["data"][0].as_py())
        except Exception as error:
            self._done.put(error)
            return
        for thread in threads:
            self._todo.put(None)
            thread.start()
        for thread in threads:
            thread.join()
        self._done.put(EndOfUnits())

    def _work(self, worker: Worker) -> None:
        while (data := self._todo.get()) is not None:
            if self._stopping.is_set():
                threading.Event().wait()
            summary = worker.process(data)
            if summary is None:
                threading.Event().wait()
            else:
                self._done.put(summary)
