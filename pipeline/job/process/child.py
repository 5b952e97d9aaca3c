"""An engine's process as its parent holds it: started, spoken to, killed, and its last words read."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from pipeline.engine.params import EngineConfig
from pipeline.engine.quality.reference_config import ReferenceConfig
from pipeline.job.process.messages import Crashed, Start, ToEngine
from pipeline.job.telemetry.logs import RotatedLog
from pipeline.machine.host import now_us
from pipeline.machine.interpreter import child_environment

LAST_WORDS_BYTES = 2000
MAX_LINE_BYTES = 8192
SHORT_CHARS = 300
LAST_BREATH_S = 5.0  # for the process to end after its socket was closed
LAST_LINES_S = 1.0  # for the rest of its output to arrive after the process has ended
_PLACE = re.compile(r'^ *File "([^"]+)", line (\d+)', re.M)  # a line of a traceback
_NO_MEMORY = re.compile(r"^(MemoryError|[\w.]*OutOfMemoryError|std::bad_alloc)\b|std::bad_alloc")


@dataclass(frozen=True)
class Launch:
    """How to start an engine's process. `factory` is `module:callable`, called in the process with `config` and
    with a function that it tells what it does while it loads."""

    factory: str
    config: EngineConfig
    step_timeout_s: float = 300.0
    load_timeout_s: float = 3600.0
    environment: dict[str, str] = field(default_factory=dict)
    reference: ReferenceConfig | None = None


@dataclass(frozen=True)
class Ended:
    """How a process ended, and the last that it wrote or said. `killed`: by the kernel or a stranger, not by us."""

    how: str
    words: str
    killed: bool = False

    def __str__(self) -> str:
        return f"{self.how}{': ' + self.words if self.words else ''}"

    def short(self) -> str:
        """On one line, for reports: the innermost call of a stack, or the last line."""
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        heads = [i for i, line in enumerate(lines[:-1]) if line.endswith("(most recent call first):")]
        current = [i for i in heads if lines[i].startswith("Current thread")]  # faulthandler's: that took the signal
        line = lines[(current or heads)[0] + 1] if heads else lines[-1] if lines else ""
        return f"{self.how}{': ' + line if line else ''}"[:SHORT_CHARS]

    def advice(self) -> str:
        """What to look at, as far as the end tells: at the memory, or at what raised and where. May be empty; begins
        with a blank else."""
        last = self.words.rpartition("\n")[2].strip()
        if self.killed or _NO_MEMORY.search(last):
            return " Is there enough memory?"
        places = _PLACE.findall(self.words)
        if not places or "(most recent call first)" in self.words:
            return ""
        file, line = places[-1]
        return f" It failed in {file}, line {line}: {last}"


class _Output:
    """What a process prints: its last bytes are kept, and all of it goes to the log, if there is one."""

    def __init__(self, log: RotatedLog | None) -> None:
        self._log = log
        self._tail = b""
        reading, self.writing = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(reading,), daemon=True, name="engine output")
        self._thread.start()

    def last(self) -> str:
        """The last that was printed. The process has ended; something it started may still hold the pipe."""
        self._thread.join(LAST_LINES_S)
        return self._tail.decode(errors="replace")

    def _read(self, reading: int) -> None:
        with open(reading, "rb") as lines:
            for line in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                self._tail = (self._tail + line)[-LAST_WORDS_BYTES:]
                if self._log is not None:
                    self._log.line(line.decode(errors="backslashreplace"), "print")


class Child:
    """One engine process and the socket to it."""

    def __init__(self, launch: Launch, log: RotatedLog | None = None) -> None:
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
        self.ready = False
        self.heard_us = now_us()
        self.crash: Crashed | None = None
        self._why_killed: str | None = None
        self.send(Start(launch.factory, launch.config, launch.reference))

    def send(self, message: ToEngine) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by the keeper, which then sends the rows again
            self.connection.send(message)

    def kill(self, why: str) -> None:
        self._why_killed = why
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def dump_stack(self) -> None:
        """Let a process that hangs write where it is to its log, and so into `bury`'s answer."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.3)

    def bury(self) -> Ended:
        """Wait for the process's end; how it ended and the last lines it wrote."""
        try:
            code = self.process.wait(timeout=LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            self.kill("it no longer answered")
            code = self.process.wait()
        self.connection.close()
        words = self.crash.message if self.crash else self._output.last()
        killed = code == -signal.SIGKILL and self._why_killed is None
        return Ended(self._how(code), words.strip()[-LAST_WORDS_BYTES:], killed)

    def _how(self, code: int) -> str:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if self._why_killed is not None:
            return f"{how}, by us: {self._why_killed}"
        if self.crash is not None and self.crash.out_of_memory:
            return f"{how}: out of memory"
        if code == -signal.SIGKILL:
            return f"{how} from outside, as by the kernel when memory runs out"
        return how
