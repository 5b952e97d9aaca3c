"""The Ray Data graph, in the Ray that `ray_session.py` starts or joins; `block_stats.py` bounds its memory.

    windows that are left -> read tasks: read, render, cut -> one Ray row per unit -> pool of engine actors -> summaries

A unit travels as one binary value in a block of its own, so that Ray can neither split nor merge it: blocks
are shaped to at most one byte, and a block of one row is never cut. Actors take units as they have room
(`units_in_flight` calls at once, in threads of their own), so the engine does not drain between units and a
slow actor holds no one up. What waits between reading and computing is bounded in bytes by the graph's object
store limit.

Beside the graph lives the ledger, a small actor that the engine actors tell about themselves each second; the
driver reads it for progress and for the run's record, which therefore also exists for runs that are killed.
"""

import contextlib
import json
import logging
import os
import pickle
import queue
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
import ray.exceptions
from ray.data import ActorPoolStrategy, DataContext, Datasource, ExecutionResources, ReadTask, TaskPoolStrategy
from ray.data.block import BlockMetadata
from ray.data.context import AutoscalingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.data.files.source_file import SourceFile
from pipeline.data.source import narrowed
from pipeline.data.units import Unit
from pipeline.errors import EnvironmentFailed, PipelineError
from pipeline.job.actor.ledger import REPORT_S, Ledger, Order, Whereabouts
from pipeline.job.actor.spot import SpotNotice
from pipeline.job.actor.worker import Worker, WorkSpec
from pipeline.job.dataflow.block_stats import forget_blocks
from pipeline.job.dataflow.ray_session import connect, dead_nodes, disconnect, draining_nodes, session_logs
from pipeline.job.dataflow.reading import read_units
from pipeline.job.dataflow.spec import ACTORS_PER_READER, NUM_READERS, EndOfUnits, FlowSpec, Spot, WindowTask
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.machine.host import available_cores, now_us, process_age_us
from pipeline.stores import failpoints

BUFFER_BYTES = 256 * 2**20  # units between reading and computing, at least
BUFFER_BYTES_PER_UNIT = 8 * 2**20
NODES_S = 2.0  # between two looks at which machines the cluster has lost or is about to
_UNIT_SCHEMA = pa.schema([("window", pa.int32()), ("unit", pa.int32()), ("data", pa.large_binary())])


class Windows(Datasource):
    """One read task per window that is not complete."""

    def __init__(self, spec: FlowSpec) -> None:
        super().__init__()
        self._spec = spec

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        source, tasks = self._spec.source, self._spec.tasks
        # What all tasks share goes through the object store once. The source lists every file of the input, and each
        # task gets its window's alone: for a large input the list would be most of what reading a window costs.
        shared = ray.put((replace(source, files=(), skipped=()), self._spec.units, self._spec.work.output))
        return [
            ReadTask(partial(_read_task, replace(task, window=window), files, shared), unknown)
            for task, (files, window) in zip(tasks, narrowed(source, (t.window for t in tasks)), strict=True)
        ]


def _read_task(task: WindowTask, files: tuple[SourceFile, ...], shared: Any) -> Iterator[pa.Table]:
    source, spec, output = ray.get(shared)
    return map(block_of, read_units(task, replace(source, files=files), spec, output))


def block_of(unit: Unit) -> pa.Table:
    """What travels: one row with the unit's bytes."""
    row = {"window": unit.window, "unit": unit.index, "data": unit.to_bytes()}
    return pa.Table.from_pylist([row], schema=_UNIT_SCHEMA)


class EngineActor:
    """What Ray calls: hands units to a `Worker` and tells the ledger how it goes. Called from several
    threads."""

    def __init__(self, spec: WorkSpec, ledger: Any, spot: Spot, requested: str) -> None:
        failpoints.install_requested(requested)
        # As bytes: unpacking the handle would load all of Ray Data into the ledger's process, which all wait for.
        me = pickle.dumps(ray.get_runtime_context().current_actor)
        where = Whereabouts(socket.gethostname(), ray.get_runtime_context().get_node_id(), process_age_us())
        while (entry := ray.get(ledger.register.remote(me, where))) is None:
            time.sleep(0.05)  # the ledger is not told yet how long the run goes on already
        number, age_us, too_many = entry
        self._failure: PipelineError | None = None
        self._ledger = ledger
        self._stopping = threading.Event()
        try:
            if too_many:
                raise EnvironmentFailed(
                    f"{number} processes of engine actors have ended on their own; how is not known here. Ray's logs "
                    "on their machines say it (session_latest/logs): too little memory and lost machines are usual."
                )
            self._worker: Worker | None = Worker(spec, number, now_us() - age_us)
        except PipelineError as error:  # told with the first unit: a constructor that raises is tried again and again
            self._worker, self._failure = None, error
        except Exception:
            self._worker, self._failure = None, PipelineError(traceback.format_exc())
        else:
            threading.Thread(target=self._report, daemon=True, name="report").start()
            if spot.notice != "off":
                SpotNotice(spot.notice, lambda: self._leave(spot.drain_s), self._worker.note)

    def __call__(self, batch: pa.Table) -> dict[str, list[str]]:
        return {"summary": [json.dumps(self._process(data.as_py()).to_json()) for data in batch["data"]]}

    def _process(self, data: bytes) -> UnitSummary:
        while self._stopping.is_set():  # admitted no more; the driver ends us
            time.sleep(1.0)
        if self._worker is None:
            assert self._failure is not None
            return UnitSummary(0, 0, failure_kind=type(self._failure).__name__, failure_message=str(self._failure))
        summary = self._worker.process(data)
        while summary is None:  # given up; the driver ends us
            time.sleep(1.0)
        # Before the summary, so that the driver's last look finds this unit's work in the ledger.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._ledger.report.remote(self._worker.state()))
        return summary

    def _leave(self, drain_s: float) -> None:
        """This machine is to be taken away: finish what can be, keep the rest's finished rows, and wait for the end.

        Ray then gives the units that are open here to other actors, which find those rows.
        """
        assert self._worker is not None
        self._stopping.set()
        time.sleep(drain_s)
        self._worker.interrupt()

    def _report(self) -> None:
        assert self._worker is not None
        while True:
            try:
                order: Any = ray.get(self._ledger.report.remote(self._worker.state()))
                if order >= Order.ADMIT_NO_MORE:
                    self._stopping.set()
                if order >= Order.GIVE_UP:
                    self._worker.interrupt()
                if order == Order.LEAVE and not self._worker.state().record.units_in_progress:
                    os._exit(0)  # Ray starts another one elsewhere, and gives it the units that were open here
            except ray.exceptions.RayError:
                return  # the ledger ends with the run
            time.sleep(REPORT_S)


class Dataflow:
    """One execution of the graph, driven by a thread of its own; made and used by the driver's main
    thread."""

    def __init__(self, spec: FlowSpec, run_began_us: int) -> None:
        """Starts or joins Ray. `run_began_us`: of this process's clock. Raises EnvironmentFailed."""
        self._spec = spec
        self._summaries: queue.SimpleQueue[UnitSummary | PipelineError | None] = queue.SimpleQueue()
        self._started_ray = _connect(spec)
        self.session_logs = session_logs()
        # Beside the driver: with any other machine of the cluster the run would lose what its actors said.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        ledger: Any = ray.remote(num_cpus=0)(Ledger)
        pool = spec.min_actors or spec.actors, spec.actors
        self._ledger: Any = ledger.options(scheduling_strategy=here).remote(*pool, spec.spot.drain_s)
        self._lost_nodes: set[str] = set()
        self._next_look_at_nodes = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="dataflow")
        self._thread.start()
        try:
            ray.get(self._ledger.is_up.remote())  # until it is there: a duration must not age on its way
            ray.get(self._ledger.begin.remote(now_us() - run_began_us))
        except ray.exceptions.RayError as error:
            raise _typed(error) from error

    def next(self, timeout_s: float) -> UnitSummary | None:
        """The next finished unit, or None when none came in time. Raises EndOfUnits after the last one, and
        what ended the graph."""
        try:
            item = self._summaries.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if item is None:
            raise EndOfUnits
        if isinstance(item, PipelineError):
            raise item
        return item

    def actors(self, end: bool = False) -> list[ActorState] | None:
        """What the actors last said; None when the ledger does not answer."""
        try:
            if self._spec.ray_address is not None and (end or time.monotonic() >= self._next_look_at_nodes):
                self._lost_nodes = dead_nodes()
                self._ledger.drain.remote(draining_nodes() - self._lost_nodes)
                self._next_look_at_nodes = time.monotonic() + NODES_S
            return ray.get(self._ledger.states.remote(end, self._lost_nodes), timeout=5.0)
        except (ray.exceptions.RayError, TimeoutError):
            return None

    def order(self, order: Order) -> None:
        """Say to all actors; each hears it with its next report."""
        self._ledger.give.remote(order)

    def close(self) -> None:
        """End everything that runs, finished or not."""
        if self._started_ray:
            disconnect()
            return
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            for actor in ray.get(self._ledger.actors.remote(), timeout=5.0):
                ray.kill(pickle.loads(actor))
        ray.kill(self._ledger)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            batch: Any
            for batch in _graph(self._spec, self._ledger).iter_batches(
                batch_size=None, prefetch_batches=0, batch_format="pyarrow"
            ):
                for text in batch["summary"].to_pylist() if batch.num_rows else ():
                    self._summaries.put(UnitSummary.from_json(json.loads(text)))
        except Exception as error:
            self._summaries.put(_typed(error))
        else:
            self._summaries.put(None)


def _connect(spec: FlowSpec) -> bool:
    """Start a local Ray or join the cluster; False when the process is in one already."""
    # A local Ray's cores are bookkeeping: enough that readers and the ledger never wait for the engines'
    # share.
    cores = max(4, available_cores(), int(spec.actors * spec.cpus) + num_readers(spec) + 1)
    return connect(spec.ray_address, cores)


def _context(spec: FlowSpec) -> DataContext:
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # every unit a block of its own
    context.target_min_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = 0
    forget_blocks(context)
    if spec.is_elastic:
        # Of the units that could be in flight, a pool of the most actors has this share where one unit is: Ray adds
        # actors at once, as many as the cluster has room for. It takes none away (no share is below nothing) while
        # units are still to come, as each costs the loading of a model; after the last it takes all that are idle.
        least = 1 / (2 * spec.actors * spec.units_in_flight)
        context.autoscaling_config = AutoscalingConfig(least, -1.0)
    buffer = max(BUFFER_BYTES, BUFFER_BYTES_PER_UNIT * spec.actors * spec.units_in_flight)
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=buffer)
    return context


def num_readers(spec: FlowSpec) -> int:
    """How many windows are read at once, where there is room: one for a single actor, else two, and one for each 8
    actors."""
    wanted = max(NUM_READERS, -(-spec.actors // ACTORS_PER_READER))
    return min(wanted, spec.actors, len(spec.tasks))


def units_of(spec: FlowSpec) -> ray.data.Dataset:
    """The reading half of the graph: a row and a block for each unit that is left."""
    with DataContext.current(_context(spec)):
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
        # of a cluster's node `cluster_cpus` leaves room for so many beside its actors
        readers = num_readers(spec) if spec.ray_address is None else min(num_readers(spec), NUM_READERS * max(1, nodes))
        return ray.data.read_datasource(
            Windows(spec), num_cpus=1, compute=TaskPoolStrategy(size=readers), override_num_blocks=len(spec.tasks)
        )


def _graph(spec: FlowSpec, ledger: Any) -> ray.data.Dataset:
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong comes as an exception
    warnings.filterwarnings("ignore", module=r"ray\.data\.", category=UserWarning)  # fewer units than actors
    with DataContext.current(_context(spec)):
        return units_of(spec).map_batches(
            EngineActor,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(spec.work, ledger, spec.spot, spec.failpoints),
            num_cpus=spec.cpus,
            num_gpus=spec.gpus or None,
            compute=ActorPoolStrategy(
                min_size=spec.min_actors or spec.actors,
                max_size=spec.actors,
                max_tasks_in_flight_per_actor=spec.units_in_flight,
                max_concurrent_calls_per_actor=spec.units_in_flight,
                enable_true_multi_threading=True,
            ),
        )


def _typed(error: BaseException) -> PipelineError:
    """Ours where one of ours is inside, else the environment's."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)  # of Ray's RayTaskError: what the task raised
        if isinstance(seen, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
            seen = cause
        if isinstance(seen, PipelineError):
            return seen
        seen = seen.__cause__
    if isinstance(error, ray.exceptions.RayError):
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return EnvironmentFailed(f"Ray ended the run: {type(error).__name__}: {lines[-1] if lines else ''}")
    return PipelineError("".join(traceback.format_exception(error)))
