"""The other ranks of an engine, as its leader sees them: starts their processes, sends calls, and notices their end.

A rank that ends, or stops responding to the system, ends the whole group: the leader kills the other processes, which
closes their connections, so that no exchange waits for it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from pipeline.engine.parallel.plans import Arrays, PlanMemory
from pipeline.errors import EnvironmentFailed, PipelineError, RankLost, error_named
from pipeline.machine.interpreter import child_environment
from pipeline.machine.out_of_memory import is_out_of_memory

RANK_MODULE = "pipeline.engine.rank_process"
POLL_S = 0.5
STOPPED_S = 5.0  # a process that is stopped for longer (by SIGSTOP, or a debugger) counts as lost
REASON_S = 2.0  # for the reason of a failed exchange to become known

Failure = tuple[str, str]
"""Kind of an error (`OUT_OF_MEMORY`, or the name of a class of `pipeline.errors`, or empty) and its text."""
OUT_OF_MEMORY = "out of memory"


def failure_of(error: BaseException) -> Failure:
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, str(error)
    if isinstance(error, PipelineError):
        return type(error).__name__, str(error)
    return "", "".join(traceback.format_exception(error))


class RankGroup:
    """Processes of ranks 1 to `size` - 1."""

    def __init__(self, size: int, plan_bytes: int, exits_when_lost: bool) -> None:
        """plan_bytes: upper bound of a call's arrays. exits_when_lost: end this process when a rank is lost, because
        its device would wait for that rank forever."""
        self.size, self._exits_when_lost = size, exits_when_lost
        self._folder = Path(tempfile.mkdtemp(prefix="pipeline-ranks-"))
        self.store = str(self._folder / "store")
        """File through which the ranks find each other."""
        self._reason: str | None = None
        self._failure: Exception | None = None  # that a rank sent before it ended
        self._closed = False
        self._is_raised = False  # the loss has been raised, so the device did not block this process
        self._unanswered: list[int] = []  # ranks that have not answered the last call
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        memory_fd = PlanMemory.create(plan_bytes)
        life_fd, self._life_fd = os.pipe()  # the ranks' end closes when this process ends
        try:
            self._memory = PlanMemory(memory_fd)
            for _ in range(1, size):
                self._start(memory_fd, life_fd)
        finally:
            os.close(memory_fd)
            os.close(life_fd)
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="rank watcher")
        self._watcher.start()

    def _start(self, memory_fd: int, life_fd: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fds = theirs.fileno(), memory_fd, life_fd
            command = [sys.executable, "-m", RANK_MODULE, *map(str, fds), str(self._folder)]
            process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, env=child_environment(), start_new_session=True
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))

    def start(self, specs: Sequence[object]) -> None:
        """Send each rank the specification of its share, and wait until all processes run. Raises RankLost if one has
        ended."""
        for connection, spec in zip(self._connections, specs, strict=True):
            with contextlib.suppress(OSError):  # it has ended, and `wait` raises the reason
                connection.send(spec)
        self._unanswered = [*range(1, self.size)]
        self.wait()

    def call(self, method: str, arrays: Arrays) -> None:
        """Start a call on all ranks. Raises RankLost if one is lost."""
        if self._unanswered:  # the caller was interrupted while it waited
            self.wait()
        message = self._memory.write(method, arrays)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError as error:
            raise self.lost(error) from None
        self._unanswered = [*range(1, self.size)]

    def wait(self) -> None:
        """Wait until all ranks have answered the call. Raises MemoryError if one had too little memory for it,
        RankLost if one is lost."""
        failures = []
        while self._unanswered:
            rank = self._unanswered[0]
            try:
                failure: Failure | None = self._connections[rank - 1].recv()
            except (EOFError, OSError) as error:
                lost = self.lost(error)
                raise next((self._error(*each) for each in failures if each[1] != OUT_OF_MEMORY), lost) from None
            del self._unanswered[0]
            if failure is not None:
                failures.append((rank, *failure))
        failures.sort(key=lambda failure: failure[1] == OUT_OF_MEMORY)  # other errors first
        if failures:
            raise self._error(*failures[0])

    def lost(self, error: Exception) -> Exception:
        """Return the reason of a failed exchange, once it is known, and end the group."""
        self._is_raised = True
        deadline = time.monotonic() + REASON_S
        while (failure := self._sent_failure()) is None and self._reason is None and time.monotonic() < deadline:
            self._look()
            time.sleep(0.02)
        failure = failure or self._sent_failure()  # the end of a rank may be noticed before its error is read
        reason = self._reason or str(error)
        self._end(reason)
        return failure or RankLost(f"tensor parallelism over {self.size} ranks ended: {reason}")

    def _sent_failure(self) -> Exception | None:
        """Return the error that a rank sent before it ended: of several, one that is not the loss of another rank. No
        other thread may be waiting for answers."""
        found: list[tuple[int, str, str]] = []
        for rank, connection in enumerate(self._connections, 1):
            with contextlib.suppress(EOFError, OSError):
                while connection.poll():
                    if (failure := connection.recv()) is not None:
                        found.append((rank, *failure))
        found.sort(key=lambda failure: failure[1] == RankLost.__name__)
        if found and self._failure is None:
            self._failure = self._error(*found[0])
        return self._failure

    def _error(self, rank: int, kind: str, text: str) -> Exception:
        text = f"rank {rank} of {self.size}: {text}"
        return MemoryError(text) if kind == OUT_OF_MEMORY else error_named(kind or RankLost.__name__, text)

    def close(self) -> None:
        """End all other ranks."""
        self._closed = True
        self._watcher.join()
        self._end("the engine was closed")
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the watcher's thread

    def _watch(self) -> None:
        stopped_s = dict.fromkeys(range(1, self.size), 0.0)
        while not self._closed and self._reason is None:
            time.sleep(POLL_S)
            self._look()
            for rank, process in enumerate(self._processes, 1):
                stopped_s[rank] = stopped_s[rank] + POLL_S if _is_stopped(process.pid) else 0.0
                if stopped_s[rank] > STOPPED_S:
                    self._end(f"rank {rank} (process {process.pid}) was stopped for {STOPPED_S:g} s")
        if self._closed or not self._exits_when_lost:
            return
        time.sleep(REASON_S)
        if not self._closed and not self._is_raised:
            reason = self._sent_failure() or self._reason  # the main thread waits for the device, not for answers
            print(f"tensor parallelism over {self.size} ranks ended: {reason}", file=sys.stderr, flush=True)
            os._exit(EnvironmentFailed.exit_code)

    def _look(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            if self._reason is None and (code := process.poll()) is not None:
                ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                self._end(f"rank {rank} (process {process.pid}) ended with {ending}")

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("T", "t")
