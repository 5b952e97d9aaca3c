"""The dataflow of a small job, without Ray: readers and workers are threads of the driver's own process.

Ray starts in some seconds and brings nothing where one engine computes one window: the engine has a process of its own
either way, and its supervisor starts it again. `graph.py` is the same flow for everything larger, with the same calls.
"""

import queue
import socket
import threading
import traceback

from pipeline.errors import PipelineError
from pipeline.job.actor.ledger import Ledger, Order, Whereabouts
from pipeline.job.actor.worker import Worker
from pipeline.job.dataflow.reading import read_units
from pipeline.job.dataflow.spec import EndOfUnits, FlowSpec
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.machine.host import now_us
from pipeline.stores import failpoints


class InProcessDataflow:
    """One execution; made and used by the driver's main thread. Its calls are those of `graph.Dataflow`."""

    session_logs = None  # Ray's

    def __init__(self, spec: FlowSpec, run_began_us: int) -> None:
        """`run_began_us`: of this process's clock. Raises what the model's folder or the store is refused for."""
        failpoints.install_requested(spec.failpoints)
        self._spec = spec
        self._ledger = Ledger(spec.actors)
        self._ledger.begin(now_us() - run_began_us)
        self._finished: queue.SimpleQueue[UnitSummary | PipelineError | EndOfUnits] = queue.SimpleQueue()
        # Units that are read and wait: as many as are worked on, so that memory does not grow with the window's units.
        self._ready: queue.Queue[bytes | None] = queue.Queue(spec.actors * spec.units_in_flight)
        self._stopping = threading.Event()
        self._has_left = False  # units that are not computed, since the run stops
        self._workers: list[Worker] = []
        for _ in range(spec.actors):
            entry = self._ledger.register(b"", Whereabouts(socket.gethostname()))
            assert entry is not None
            self._workers.append(Worker(spec.work, entry[0], now_us() - entry[1]))
        threading.Thread(target=self._run, daemon=True, name="dataflow").start()

    def next(self, timeout_s: float) -> UnitSummary | None:
        """The next finished unit, or None when none came in time. Raises EndOfUnits after the last one, and what ended
        the reading."""
        try:
            item = self._finished.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(item, UnitSummary):
            return item
        raise item

    def actors(self, end: bool = False) -> list[ActorState]:
        """What the workers say now."""
        for worker in self._workers:
            self._ledger.report(worker.state())
        return self._ledger.states(end)

    def order(self, order: Order) -> None:
        """Say to all workers."""
        if order >= Order.ADMIT_NO_MORE:
            self._stopping.set()
        if order >= Order.GIVE_UP:
            for worker in self._workers:
                worker.interrupt()

    def close(self) -> None:
        """End everything that runs, finished or not."""
        self._stopping.set()
        for worker in self._workers:
            worker.close()

    def _run(self) -> None:
        """Read the units in this thread, and hand them to the workers' threads."""
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
            for unit in read_units(task, self._spec.source, self._spec.units, self._spec.work.output):
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
