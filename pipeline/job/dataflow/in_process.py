"""Dataflow of a small job, without Ray: readers and workers are threads of the driver's process.

Ray takes seconds to start and brings nothing if one engine computes one window: the engine has its own process either
way, and its supervisor restarts it. `graph.py` is the same flow for larger jobs, with the same interface.
"""

import queue
import socket
import threading
import traceback
from collections.abc import Mapping

from pipeline.errors import PipelineError
from pipeline.job.actor.actor_registry import ActorRegistry, Order, Placement
from pipeline.job.actor.worker import Worker
from pipeline.job.dataflow.reading import read_units
from pipeline.job.dataflow.spec import EndOfUnits, FlowSpec
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.machine.host import now_us
from pipeline.stores import failpoints


class InProcessDataflow:
    """One execution, created and used by the driver's main thread. It has the interface of `graph.Dataflow`."""

    session_logs = None  # Ray's logs
    report_s = 0.0  # time between an order and a report that shows its effect

    def __init__(self, spec: FlowSpec, run_began_us: int) -> None:
        """Start the workers. `run_began_us`: on this process's clock. Raises the errors of opening the model or the
        store."""
        failpoints.install_requested(spec.failpoints)
        self._spec = spec
        self._registry = ActorRegistry(spec.actors)
        self._registry.begin(now_us() - run_began_us)
        self._finished: queue.SimpleQueue[UnitSummary | PipelineError | EndOfUnits] = queue.SimpleQueue()
        # Bounded to the number of units in flight, so that memory does not grow with the units of a window.
        self._ready: queue.Queue[bytes | None] = queue.Queue(spec.actors * spec.units_in_flight)
        self._stopping = threading.Event()
        self._has_left = False  # some units were not computed, because the run stops
        self._workers: list[Worker] = []
        for _ in range(spec.actors):
            entry = self._registry.register(b"", Placement(socket.gethostname()))
            assert entry is not None
            self._workers.append(Worker(spec.work, entry[0], now_us() - entry[1]))
        threading.Thread(target=self._run, daemon=True, name="dataflow").start()

    def next(self, timeout_s: float) -> UnitSummary | None:
        """Return the next finished unit, or None if none finishes in time. Raises EndOfUnits after the last one, and
        errors of reading."""
        try:
            item = self._finished.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, UnitSummary):
            return item
        raise item

    def actors(self, end: bool = False) -> list[ActorState]:
        """Return the current states of the workers."""
        for worker in self._workers:
            self._registry.report(worker.state())
        return self._registry.states(end)

    def order(self, order: Order) -> None:
        """Apply an order to all workers."""
        if order >= Order.ADMIT_NO_MORE:
            self._stopping.set()
        if order >= Order.DRAIN:
            for worker in self._workers:
                worker.drain()
        if order >= Order.GIVE_UP:
            for worker in self._workers:
                worker.interrupt()

    def grant(self, usd: Mapping[int, float]) -> None:
        """Allow workers, by number, to send requests to a server up to these costs in US dollars."""
        for number, worker in enumerate(self._workers):
            if number in usd:
                worker.grant(usd[number])

    def close(self) -> None:
        """Stop everything that runs, finished or not."""
        self._stopping.set()
        for worker in self._workers:
            worker.close()

    def _run(self) -> None:
        """Read units in this thread and hand them to the workers' threads."""
        threads = [
            threading.Thread(target=self._work, args=(worker,), daemon=True, name="unit")
            for worker in self._workers
            for _ in range(self._spec.units_in_flight)
        ]
        for thread in threads:
            thread.start()
        ended: PipelineError | EndOfUnits = EndOfUnits()
        try:
            self._read()
        except PipelineError as error:
            ended = error
        except Exception:
            ended = PipelineError(traceback.format_exc())
        for _ in threads:
            self._ready.put(None)
        for thread in threads:
            thread.join()
        if not self._has_left or not isinstance(ended, EndOfUnits):
            self._finished.put(ended)

    def _read(self) -> None:
        for task in self._spec.tasks:
            for unit in read_units(task, self._spec.reading):
                if self._stopping.is_set():
                    self._has_left = True
                    return
                self._ready.put(unit.to_bytes())

    def _work(self, worker: Worker) -> None:
        while (data := self._ready.get()) is not None:
            summary = None if self._stopping.is_set() else worker.process(data)
            if summary is None:
                self._has_left = True
            else:
                self._finished.put(summary)
