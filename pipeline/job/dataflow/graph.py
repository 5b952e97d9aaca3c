"""Ray Data graph of a job, in the Ray that `ray_session.py` starts or joins; `block_stats.py` bounds its memory.

    remaining windows -> read tasks: read, render, cut -> one Ray row per unit -> pool of engine actors -> summaries

A unit travels as one binary value in its own block, so that Ray can neither split nor merge it: blocks are shaped to at
most one byte, and a block of one row is never cut. Actors take units as they have capacity (`units_in_flight`
concurrent calls, each in its own thread), so the engine does not drain between units and a slow actor delays no other.
The graph's object store limit bounds the bytes that wait between reading and computing.

The registry is a small actor next to the graph. Engine actors report to it each second, and the driver reads it for
progress and for the run's record, so killed runs have a record too.
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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
import ray.exceptions
from ray import cloudpickle
from ray.data import ActorPoolStrategy, DataContext, Datasource, ExecutionResources, ReadTask, TaskPoolStrategy
from ray.data.block import BlockMetadata
from ray.data.context import AutoscalingConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.data.files.source_file import SourceFile
from pipeline.data.source import narrowed
from pipeline.data.units import Unit
from pipeline.errors import ConfigError, EnvironmentFailed, PipelineError
from pipeline.job.actor.actor_registry import ActorRegistry, Order, Placement
from pipeline.job.actor.row_function import RowFunction
from pipeline.job.actor.work_spec import WorkSpec
from pipeline.job.actor.worker import Worker
from pipeline.job.dataflow.block_stats import forget_blocks
from pipeline.job.dataflow.ray_session import connect, dead_nodes, disconnect, draining_nodes, session_logs
from pipeline.job.dataflow.reading import read_units
from pipeline.job.dataflow.spec import (
    ACTORS_PER_READER,
    NUM_READERS,
    EndOfUnits,
    FlowSpec,
    ReadSpec,
    WindowTask,
)
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.unit_summary import UnitSummary
from pipeline.machine.host import available_cores, now_us, process_age_us
from pipeline.machine.liveness import REPORT_S
from pipeline.stores import failpoints

BUFFER_BYTES = 256 * 2**20  # minimum buffer of units between reading and computing
BUFFER_BYTES_PER_UNIT = 8 * 2**20
NODES_S = 2.0  # interval of checks for lost and draining nodes
_UNIT_SCHEMA = pa.schema([("window", pa.int32()), ("unit", pa.int32()), ("data", pa.large_binary())])


class Windows(Datasource):
    """Data source with one read task per incomplete window."""

    def __init__(self, spec: FlowSpec) -> None:
        super().__init__()
        self._spec = spec

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        reading, tasks = self._spec.reading, self._spec.tasks
        # What all tasks share goes through the object store once. The source lists every file of the input, so each
        # task gets only its window's files: for a large input the list would dominate the cost of reading a window.
        shared = ray.put(replace(reading, source=replace(reading.source, files=(), skipped=())))
        return [
            ReadTask(partial(_read_task, replace(task, window=window), files, shared), unknown)
            for task, (files, window) in zip(tasks, narrowed(reading.source, (t.window for t in tasks)), strict=True)
        ]


def _read_task(task: WindowTask, files: tuple[SourceFile, ...], shared: Any) -> Iterator[pa.Table]:
    reading: ReadSpec = ray.get(shared)
    return map(block_of, read_units(task, replace(reading, source=replace(reading.source, files=files))))


def block_of(unit: Unit) -> pa.Table:
    """Return the block of a unit: one row with its bytes."""
    row = {"window": unit.window, "unit": unit.index, "data": unit.to_bytes()}
    return pa.Table.from_pylist([row], schema=_UNIT_SCHEMA)


class EngineActor:
    """Ray actor that hands units to a `Worker` and reports to the registry. Called from several threads."""

    def __init__(self, spec: WorkSpec, registry: Any, requested: str) -> None:
        failpoints.install_requested(requested)
        # As bytes: unpickling the handle would load all of Ray Data in the registry's process and delay all actors.
        handle = pickle.dumps(ray.get_runtime_context().current_actor)
        placement = Placement(socket.gethostname(), ray.get_runtime_context().get_node_id(), process_age_us())
        while (entry := ray.get(registry.register.remote(handle, placement))) is None:
            time.sleep(0.05)  # the driver has not called `begin` on the registry yet
        number, age_us, too_many = entry
        self._failure: PipelineError | None = None
        self._registry = registry
        self._stopping = threading.Event()
        try:
            if too_many:
                raise EnvironmentFailed(
                    f"{number} engine actors died. Ray's logs on their machines (session_latest/logs) name the "
                    "cause; too little memory and lost machines are common ones."
                )
            self._worker: Worker | None = Worker(spec, number, now_us() - age_us)
        except PipelineError as error:  # reported with the first unit: Ray retries a constructor that raises forever
            self._worker, self._failure = None, error
        except Exception:
            self._worker, self._failure = None, PipelineError(traceback.format_exc())
        else:
            threading.Thread(target=self._report, daemon=True, name="report").start()

    def __call__(self, batch: pa.Table) -> dict[str, list[str]]:
        return {"summary": [json.dumps(self._process(data.as_py()).to_json()) for data in batch["data"]]}

    def _process(self, data: bytes) -> UnitSummary:
        while self._stopping.is_set():  # no more units; the driver ends this process
            time.sleep(1.0)
        if self._worker is None:
            assert self._failure is not None
            return UnitSummary(0, 0, failure_kind=type(self._failure).__name__, failure_message=str(self._failure))
        summary = self._worker.process(data)
        while summary is None:  # interrupted; the driver ends this process
            time.sleep(1.0)
        # Report before the summary, so that the driver's final read of the registry includes this unit's work.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._registry.report.remote(self._worker.state()))
        return summary

    def _report(self) -> None:
        assert self._worker is not None
        while True:
            try:
                order, granted_usd = ray.get(self._registry.report.remote(self._worker.state()))
                if granted_usd is not None:
                    self._worker.grant(granted_usd)
                if order >= Order.ADMIT_NO_MORE:
                    self._stopping.set()
                if order >= Order.DRAIN:
                    self._worker.drain()
                if order >= Order.GIVE_UP:
                    self._worker.interrupt()
                if order == Order.LEAVE and not self._worker.state().record.units_in_progress:
                    os._exit(0)  # Ray starts a replacement elsewhere, with the open units
            except ray.exceptions.RayError:
                return  # the registry ends with the run
            time.sleep(REPORT_S)


class Dataflow:
    """One execution of the graph, driven by its own thread; created and used by the driver's main thread."""

    report_s = REPORT_S  # interval of an actor's reports

    def __init__(self, spec: FlowSpec, run_began_us: int) -> None:
        """Start or join Ray. `run_began_us`: on this process's clock. Raises EnvironmentFailed."""
        _check_function(spec.work.job.row_fn)
        self._spec = spec
        self._summaries: queue.SimpleQueue[UnitSummary | PipelineError | None] = queue.SimpleQueue()
        self._started_ray = _connect(spec)
        self.session_logs = session_logs()
        # On the driver's node: losing any other node of the cluster would lose what its actors reported.
        on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        registry: Any = ray.remote(num_cpus=0)(ActorRegistry)
        pool = spec.min_actors or spec.actors, spec.actors
        self._registry: Any = registry.options(scheduling_strategy=on_this_node).remote(*pool, spec.drain_timeout_s)
        self._lost_nodes: set[str] = set()
        self._next_look_at_nodes = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="dataflow")
        self._thread.start()
        try:
            ray.get(self._registry.is_up.remote())  # wait for it: the duration below must not age
            ray.get(self._registry.begin.remote(now_us() - run_began_us))
        except ray.exceptions.RayError as error:
            raise _typed(error) from error

    def next(self, timeout_s: float) -> UnitSummary | None:
        """Return the next finished unit, or None if none finishes in time. Raises EndOfUnits after the last one, and
        errors that end the graph."""
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
        """Return the last states of the actors; None if the registry does not answer."""
        try:
            if self._spec.ray_address is not None and (end or time.monotonic() >= self._next_look_at_nodes):
                self._lost_nodes = dead_nodes()
                self._registry.drain.remote(draining_nodes() - self._lost_nodes)
                self._next_look_at_nodes = time.monotonic() + NODES_S
            return ray.get(self._registry.states.remote(end, self._lost_nodes), timeout=5.0)
        except (ray.exceptions.RayError, TimeoutError):
            return None

    def order(self, order: Order) -> None:
        """Give all actors an order, which they receive with their next report."""
        self._registry.give.remote(order)

    def grant(self, usd: Mapping[int, float]) -> None:
        """Allow actors, by number, to send requests to a server up to these costs in US dollars."""
        self._registry.grant.remote(dict(usd))

    def close(self) -> None:
        """Stop everything that runs, finished or not."""
        if self._started_ray:
            disconnect()
            return
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            for actor in ray.get(self._registry.actors.remote(), timeout=5.0):
                ray.kill(pickle.loads(actor))
        ray.kill(self._registry)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            batch: Any
            for batch in _graph(self._spec, self._registry).iter_batches(
                batch_size=None, prefetch_batches=0, batch_format="pyarrow"
            ):
                for text in batch["summary"].to_pylist() if batch.num_rows else ():
                    self._summaries.put(UnitSummary.from_json(json.loads(text)))
        except Exception as error:
            self._summaries.put(_typed(error))
        else:
            self._summaries.put(None)


def _check_function(row_fn: RowFunction | None) -> None:
    """Raise ConfigError if a row function cannot be sent to engine actors."""
    try:
        cloudpickle.dumps(row_fn)  # type: ignore[attr-defined]
    except Exception as error:
        raise ConfigError(
            f"row_fn: cannot be sent to engine actors, which are processes of their own ({type(error).__name__}: "
            f"{error}). Create locks, clients and open files in the function, not around it"
        ) from error


def _connect(spec: FlowSpec) -> bool:
    """Start a local Ray or join the cluster; return False if the process is already connected."""
    # A local Ray's cores are bookkeeping: enough that readers and the registry never wait for the engines' share.
    cores = max(4, available_cores(), int(spec.actors * spec.cpus) + num_readers(spec) + 1)
    return connect(spec.ray_address, cores)


def _context(spec: FlowSpec) -> DataContext:
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # one block per unit
    context.target_min_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.max_errored_blocks = 0
    forget_blocks(context)
    if spec.is_elastic:
        # Ray scales up when the share of possible units in flight exceeds `min_share`; one unit in a pool of maximum
        # size is enough. It adds actors at once, up to the cluster's capacity. The lower threshold is unreachable, so
        # it removes none while units are pending, since each costs the loading of a model; after the last unit it
        # removes all idle ones.
        min_share = 1 / (2 * spec.actors * spec.units_in_flight)
        context.autoscaling_config = AutoscalingConfig(min_share, -1.0)
    buffer = max(BUFFER_BYTES, BUFFER_BYTES_PER_UNIT * spec.actors * spec.units_in_flight)
    context.execution_options.resource_limits = ExecutionResources(object_store_memory=buffer)
    return context


def num_readers(spec: FlowSpec) -> int:
    """Return how many windows are read at once: one for a single actor, else two, and one per 8 actors."""
    wanted = max(NUM_READERS, -(-spec.actors // ACTORS_PER_READER))
    return min(wanted, spec.actors, len(spec.tasks))


def units_of(spec: FlowSpec) -> ray.data.Dataset:
    """Return the reading half of the graph: one row and one block per remaining unit."""
    with DataContext.current(_context(spec)):
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
        # `cluster_cpus` reserves NUM_READERS CPUs on each node for readers
        readers = num_readers(spec) if spec.ray_address is None else min(num_readers(spec), NUM_READERS * max(1, nodes))
        return ray.data.read_datasource(
            Windows(spec), num_cpus=1, compute=TaskPoolStrategy(size=readers), override_num_blocks=len(spec.tasks)
        )


def _graph(spec: FlowSpec, registry: Any) -> ray.data.Dataset:
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # failures arrive as exceptions
    warnings.filterwarnings("ignore", module=r"ray\.data\.", category=UserWarning)  # such as fewer units than actors
    with DataContext.current(_context(spec)):
        return units_of(spec).map_batches(
            EngineActor,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(spec.work, registry, spec.failpoints),
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
    """Return the pipeline error inside `error`, else an EnvironmentFailed or PipelineError that describes it."""
    seen: BaseException | None = error
    while seen is not None:
        cause = getattr(seen, "cause", None)  # RayTaskError: the task's exception
        if isinstance(seen, ray.exceptions.RayTaskError) and isinstance(cause, BaseException):
            seen = cause
        if isinstance(seen, PipelineError):
            return seen
        seen = seen.__cause__
    if isinstance(error, ray.exceptions.RayError):
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return EnvironmentFailed(f"Ray ended the run: {type(error).__name__}: {lines[-1] if lines else ''}")
    return PipelineError("".join(traceback.format_exception(error)))
