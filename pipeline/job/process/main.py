"""The engine's process: `python -m pipeline.job.process.main FD`, started by `supervisor.py`.

It owns one engine and nothing else, so that a hang, a segmentation fault, a sticky device error or an out-of-memory
kill ends this process but never the bookkeeping. One thread steps the engine; another reads the socket, so that the
parent never waits for a step before it can hand over rows. The process ends when its socket closes: a dead parent
leaves no engine behind.
"""

import faulthandler
import functools
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pipeline.engine.completion import Completion
from pipeline.engine.request import Request
from pipeline.errors import EngineUnusable, EnvironmentFailed, PipelineError, RankLost
from pipeline.job.process.messages import (
    Add,
    Crashed,
    Drain,
    Drained,
    Failed,
    Finished,
    FromEngine,
    Grant,
    Loading,
    Ready,
    Start,
    StartFailed,
    Stop,
    ToEngine,
    Worked,
)
from pipeline.machine.energy import EnergyMeter
from pipeline.machine.host import now_us
from pipeline.machine.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from pipeline.engine.quality.watch import QualityWatch

REPORT_US = 500_000


class EngineProtocol(Protocol):
    """Interface of an engine: `pipeline.engine.engine.Engine`, `pipeline.endpoint.engine.EndpointEngine`, or a test's
    fake."""

    resolved: dict[str, str | int]

    @property
    def has_unfinished(self) -> bool: ...
    def counters(self) -> dict[str, int]: ...
    def add(self, request: Any) -> None: ...
    def step(self) -> list[Completion]: ...
    def drain(self) -> None: ...
    def warm_up(self) -> None: ...
    def paused(self, ns: int) -> None: ...


@runtime_checkable
class PaidEngine(Protocol):
    """Engine whose requests cost money each: `EndpointEngine`."""

    @property
    def waits_for(self) -> str: ...
    def grant(self, usd: float) -> None: ...
    def abandon(self) -> None: ...


def serve(
    engine: EngineProtocol,
    inbox: "queue.SimpleQueue[ToEngine]",
    send: Callable[[FromEngine], None],
    meter: EnergyMeter | None = None,
    watch: "QualityWatch | None" = None,
) -> None:
    """Step the engine until Stop or the end of the process, accept messages between steps, and report finished rows.
    watch: compares some rows with a reference model; the counter `quality_us` is its time within and between steps."""
    last_us = reported = now_us()
    busy_us = idle_us = quality_us = 0
    is_draining = False

    def report() -> None:
        nonlocal reported
        counters = engine.counters()
        counters["quality_us"] = counters.get("quality_us", 0) + quality_us
        if meter is not None:
            counters["energy_uj"] = meter.read_uj()
        send(Worked(last_us, busy_us, idle_us, counters, engine.waits_for if isinstance(engine, PaidEngine) else ""))
        reported = last_us

    while True:
        busy = engine.has_unfinished or (watch is not None and watch.has_work)
        if is_draining and not busy:
            is_draining = False
            send(Drained())
        for message in _received(inbox, wait_s=None if busy else REPORT_US / 1e6):
            match message:
                case Add(requests=requests):
                    for request in requests:
                        engine.add(request)
                        if watch is not None:
                            assert isinstance(request, Request)
                            watch.expect(request)
                case Grant(usd=usd):
                    assert isinstance(engine, PaidEngine)
                    engine.grant(usd)
                case Drain():
                    engine.drain()
                    is_draining = True
                case Stop():
                    if isinstance(engine, PaidEngine):
                        engine.abandon()
                    return report()
        if not busy:
            now = now_us()
            idle_us += now - last_us
            last_us = now
        completions: list[Completion] = []
        if engine.has_unfinished:
            try:
                completions = engine.step()
            except Exception:
                if isinstance(engine, PaidEngine):  # what its requests cost must not be lost with it
                    engine.abandon()
                    report()
                raise
            now = now_us()
            busy_us += now - last_us
            idle_us = 0
            last_us = now
        if watch is not None:
            completions = watch.add_finished(completions)
            if watch.has_work:
                completions += watch.advance()
                now = now_us()
                engine.paused(1000 * (now - last_us))
                quality_us += now - last_us
                busy_us += now - last_us
                idle_us = 0
                last_us = now
        # Send counters before rows, so that the work for a received row is already counted.
        if completions or last_us - reported >= REPORT_US:
            report()
        if completions:
            send(Finished(tuple(completions)))


def _received(inbox: "queue.SimpleQueue[ToEngine]", wait_s: float | None) -> list[ToEngine]:
    """Return all queued messages. With `wait_s`, wait up to that time for the first one."""
    messages = []
    try:
        messages.append(inbox.get(timeout=wait_s) if wait_s is not None else inbox.get_nowait())
        while True:
            messages.append(inbox.get_nowait())
    except queue.Empty:
        return messages


def _read(connection: Connection, inbox: "queue.SimpleQueue[ToEngine]") -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent died or closed us: do not finish the step


def _no_room(model: str, error: Exception) -> str:
    return (
        f"There is not enough memory to load {model} ({type(error).__name__}: {error}). Lower "
        "engine.kv_cache_memory_bytes or engine.max_num_seqs, or use a machine or device with more memory."
    )


def load_factory(path: str) -> Callable[..., Any]:
    """Return the callable of `module:name` or `module:Class.method`."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))  # type: ignore[return-value]


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C in a terminal
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the supervisor requests the stack of a hung engine
    connection = Connection(fd)
    start = connection.recv()
    assert isinstance(start, Start)

    def report_loading(activity: str) -> None:
        connection.send(Loading(now_us(), activity))

    try:
        factory, watch = load_factory(start.factory), None
        report_loading("opening it")
        if start.reference is None:
            engine = factory(start.config, report_loading)
        else:
            from pipeline.engine.quality.watch import QualityWatch, open_reference

            # first, because the KV cache takes the remaining memory
            reference = open_reference(start.reference, factory, report_loading)
            engine = factory(start.config, report_loading)
            watch = QualityWatch(engine, reference)
        engine.warm_up()
    except RankLost as error:  # as if this process had crashed: the supervisor starts another
        connection.send(Crashed(str(error), out_of_memory=False))
        os._exit(error.exit_code)
    except PipelineError as error:
        connection.send(StartFailed(type(error).__name__, str(error)))
        sys.exit(error.exit_code)
    except Exception as error:
        if is_out_of_memory(error):
            connection.send(StartFailed(EnvironmentFailed.__name__, _no_room(start.config.model, error)))
            sys.exit(EnvironmentFailed.exit_code)
        connection.send(StartFailed("", traceback.format_exc()))
        sys.exit(70)
    meter = EnergyMeter.from_resolved(engine.resolved)
    energy_source = {} if meter is None else {"energy": meter.source}
    connection.send(Ready(now_us(), engine.resolved | energy_source))
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True, name="inbox").start()
    try:
        serve(engine, inbox, connection.send, meter, watch)
    except EngineUnusable as error:
        connection.send(Failed(type(error).__name__, str(error)))
    except Exception as error:
        connection.send(Crashed(traceback.format_exc(), is_out_of_memory(error)))
        os._exit(70)  # a device in an unknown state may hang in its destructors
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads and destructors


if __name__ == "__main__":
    main(int(sys.argv[1]))
