"""The engine's process as seen by its parent: start, send, kill, and read its final output."""

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from pipeline.endpoint.spec import EndpointConfig
from pipeline.engine.config import EngineConfig
from pipeline.engine.quality.reference_config import ReferenceConfig
from pipeline.job.process.messages import Crashed, Start, ToEngine
from pipeline.job.telemetry.logs import RotatedLog
from pipeline.machine.host import now_us
from pipeline.machine.interpreter import child_environment

OUTPUT_TAIL_BYTES = 2000
MAX_LINE_BYTES = 8192
SHORT_CHARS = 300
EXIT_GRACE_S = 5.0  # for the process to exit after its socket was closed
OUTPUT_GRACE_S = 1.0  # for the rest of its output to arrive after its exit
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+)', re.M)  # a frame of a traceback
_NO_MEMORY = re.compile(r"^(MemoryError|[\w.]*OutOfMemoryError|std::bad_alloc)\b|std::bad_alloc")


@dataclass(frozen=True)
class ChildSpec:
    """Specification of an engine's process. `factory` is `module:callable`, called in the process with `config` and a
    progress function."""

    factory: str
    config: EngineConfig | EndpointConfig
    step_timeout_s: float = 300.0
    load_timeout_s: float = 3600.0
    environment: dict[str, str] = field(default_factory=dict)
    reference: ReferenceConfig | None = None


@dataclass(frozen=True)
class Ended:
    """End of a process: how it ended, and its final output. `killed`: by the kernel or another process, not by us."""

    exit_description: str
    words: str
    killed: bool = False

    def __str__(self) -> str:
        return f"{self.exit_description}{': ' + self.words if self.words else ''}"

    def short(self) -> str:
        """Return one line for reports: the innermost call of a stack, or the last line."""
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        heads = [i for i, line in enumerate(lines[:-1]) if line.endswith("(most recent call first):")]
        # faulthandler's "Current thread" is the one that received the signal
        current = [i for i in heads if lines[i].startswith("Current thread")]
        line = lines[(current or heads)[0] + 1] if heads else lines[-1] if lines else ""
        return f"{self.exit_description}{': ' + line if line else ''}"[:SHORT_CHARS]

    def advice(self) -> str:
        """Return a hint for the user: check the memory, or the exception and its location. Begins with a space unless
        empty."""
        last = self.words.rpartition("\n")[2].strip()
        if self.killed or _NO_MEMORY.search(last):
            return " Is there enough memory?"
        frames = _FRAME.findall(self.words)
        if not frames or "(most recent call first)" in self.words:
            return ""
        file, line = frames[-1]
        return f" It failed in {file}, line {line}: {last}"


class _Output:
    """Output of a process: keep the last bytes, and copy all of it to the log, if there is one."""

    def __init__(self, log: RotatedLog | None) -> None:
        self._log = log
        self._tail = b""
        reading, self.writing = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True, name="engine output")
        self._thread.start()

    def last(self) -> str:
        """Return the final output. The process has ended, but one of its children may still hold the pipe."""
        self._thread.join(OUTPUT_GRACE_S)
        return self._tail.decode(errors="replace")

    def _read(self, reading: int) -> None:
        with open(reading, "rb") as lines:
            for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                self._tail = (self._tail + line)[-OUTPUT_TAIL_BYTES:]
                if self._log is not None:
                    self._log.line(line.decode(errors="backslashreplace"), "print")


class Child:
    """One engine process and the socket to it."""

    def __init__(self, launch: ChildSpec, log: RotatedLog | None = None) -> None:
        ours, theirs = socket.socketpair()
        self._output = _Output(log)
        with theirs, open(self._output.writing, "wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.job.process.main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                env=child_environment(**launch.environment),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        # A thread of its own sends, since that blocks while a hung process reads nothing.
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, daemon=True, name="engine messages")
        self._sender.start()
        self.ready = False
        self.heard_us = now_us()
        self.crash: Crashed | None = None
        self._kill_reason: str | None = None
        self.send(Start(launch.factory, launch.config, launch.reference))

    def send(self, message: ToEngine) -> None:
        """Send a message later. If the process ends first, the keeper notices it and sends the rows again."""
        self._outbox.put(message)

    def kill(self, reason: str) -> None:
        self._kill_reason = reason
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def dump_stack(self) -> None:
        """Make a hung process write its stack to its output, and so into the result of `reap`."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.3)

    def reap(self) -> Ended:
        """Wait for the process to end. Return how it ended and its final output."""
        try:
            code = self.process.wait(timeout=EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill("it did not respond")
            code = self.process.wait()
        self._outbox.put(None)
        self._sender.join()  # a socket that is closed while a thread sends may be another file by then
        self.connection.close()
        words = self.crash.message if self.crash else self._output.last()
        killed = code == -signal.SIGKILL and self._kill_reason is None
        return Ended(self._describe_exit(code), words.strip()[-OUTPUT_TAIL_BYTES:], killed)

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            while (message := self._outbox.get()) is not None:
                self.connection.send(message)

    def _describe_exit(self, code: int) -> str:
        exit_description = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._kill_reason is not None:
            return f"{exit_description}, by us: {self._kill_reason}"
        if self.crash is not None and self.crash.out_of_memory:
            return f"{exit_description}: out of memory"
        if code == -signal.SIGKILL:
            return f"{exit_description} from outside, as by the kernel when memory runs out"
        return exit_description
