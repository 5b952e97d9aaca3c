"""A server that we start: its command, its process group, its output, and one start at a time on a machine."""

import collections
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.endpoint import process_group
from pipeline.machine.caches import cache_root
from pipeline.stores.redaction import redacted

HOST = "127.0.0.1"
TAIL_LINES = 15
# Set for this package's own processes (`machine/interpreter.py`) and by Ray; the server may be another Python.
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT")


def command_of(serve: Sequence[str], model: str | None, port: int) -> list[str]:
    """Return the command with {model}, {host} and {port} filled in. A command without {port} gets `--host HOST --port
    N`, as vLLM, SGLang and llama.cpp expect."""
    filled = [
        part.replace("{model}", model or "").replace("{host}", HOST).replace("{port}", str(port)) for part in serve
    ]
    return filled if any("{port}" in part for part in serve) else [*filled, "--host", HOST, "--port", str(port)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


class Server:
    """A running server. It ends with this process, however that ends."""

    def __init__(self, command: Sequence[str], port: int, secrets: frozenset[str]) -> None:
        """Start the command. secrets: texts to remove from its output, which is copied to this process's output."""
        self.url = f"http://{HOST}:{port}/v1"
        self._secrets = secrets
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        reading, self._alive = os.pipe()
        environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-I", process_group.__file__, str(reading), *command],
            pass_fds=[reading],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        os.close(reading)
        self._output = threading.Thread(target=self._copy, daemon=True, name="server output")
        self._output.start()

    @property
    def has_ended(self) -> bool:
        """True if the server has ended. If only the leader of its group was killed, the rest is ended."""
        if self._process.poll() is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return True

    @property
    def last_line(self) -> str:
        return self._tail[-1] if self._tail else ""

    def tail(self) -> str:
        """Return its last lines; after its end all of its output is read first."""
        if self.has_ended:
            self._output.join(timeout=1.0)
        return "\n".join(self._tail)

    def close(self) -> None:
        """End the process group, within a few seconds."""
        with contextlib.suppress(OSError):
            os.close(self._alive)
        self._process.wait()

    def _copy(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            for secret in self._secrets:
                line = line.replace(secret, "***")
            if line.strip():
                self._tail.append(redacted(line, self._secrets)[:500])
            print(f"server: {line}", flush=True)


@contextlib.contextmanager
def alone(log: Callable[[str], None]) -> Iterator[None]:
    """Hold the machine's lock for starting servers: concurrent starts break the compile caches of some servers. log:
    receives a message every second while another server starts."""
    folder = Path(cache_root()) / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "start.lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                log("waiting for another server on this machine to start")
                time.sleep(1.0)
        yield
