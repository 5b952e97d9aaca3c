"""An engine's process as its parent holds it: started, spoken to, killed, and its last words read."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from pipeline.engine.params import EngineConfig
from pipeline.job.machine import now_us
from pipeline.job.messages import Start, ToEngine

LAST_WORDS_BYTES = 2000


@dataclass(frozen=True)
class Launch:
    """How to start an engine's process. `factory` is `module:callable`, called with `config` in the
    process."""

    factory: str
    config: EngineConfig
    step_timeout_s: float = 300.0
    environment: dict[str, str] = field(default_factory=dict)


class Child:
    """One engine process and the socket to it."""

    def __init__(self, launch: Launch) -> None:
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        environment = {**os.environ, **launch.environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.job.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env=environment,
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.heard_us = now_us()
        self.crash = ""
        self.send(Start(launch.factory, launch.config))

    def send(self, message: ToEngine) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by the keeper, which then sends the rows again
            self.connection.send(message)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def dump_stack(self) -> None:
        """Let a process that hangs write where it is to its log, and so into `bury`'s answer."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.3)

    def bury(self) -> str:
        """Wait for the process's end; how it ended and the last lines it wrote."""
        self.kill()
        code = self.process.wait()
        self.connection.close()
        with self.log:
            size = self.log.seek(0, os.SEEK_END)
            self.log.seek(max(0, size - LAST_WORDS_BYTES))
            words = (self.crash or self.log.read().decode(errors="replace")).strip()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}{': ' + words[-LAST_WORDS_BYTES:] if words else ''}"
