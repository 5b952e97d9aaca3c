"""Engines of other environments, each in a process that reads names of request sets, line by line.

`peers/serve.py` defines the protocol. The process loads its model once and keeps running, so that rounds can alternate
between engines. While it waits it uses memory but no CPU.
"""

import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.bench.engines.contenders import Ran
from pipeline.bench.request_sets import BenchRequest
from pipeline.errors import ConfigError, EnvironmentFailed

PEERS = Path(__file__).parents[1] / "peers"
DRIVERS = {"vllm": "vllm_driver", "openvino": "openvino_driver", "llama.cpp": "llama_cpp_driver"}
LOAD_S, RUN_S = 1800.0, 3600.0
MAX_LOG_CHARS = 2000  # of a failed peer's log, shown in the error


@dataclass(frozen=True)
class PeerTask:
    """Task of every peer.

    dense_model: folder with unquantized weights; equals `model` unless that is AWQ. work_folder: for the peer's own
    conversions of the checkpoint. max_num_seqs: None uses the peer's default. shared_prefixes: whether prompts share a
    prefix, so that a prefix cache helps. eos_token_ids: stop requests that do not ignore EOS. device: cpu, cuda or
    cuda:N. performance_mode: vLLM's; None uses its default.
    """

    model: str
    dense_model: str
    quantized: bool
    dtype: str
    threads: int
    max_model_len: int
    work_folder: str
    shared_prefixes: bool
    sets: Mapping[str, Sequence[BenchRequest]]
    device: str
    max_num_seqs: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    performance_mode: str | None = None


def parse_peer(text: str) -> tuple[str, str]:
    """Split `vllm=/path` into name and path. Raises ConfigError for an unknown name or a missing path."""
    name, _, path = text.partition("=")
    if name not in DRIVERS or not path:
        raise ConfigError(f"--peer {text}: expected NAME=PATH, where NAME is one of {', '.join(DRIVERS)}")
    if not Path(path).exists():
        raise ConfigError(f"--peer {text}: no such file or folder")
    return name, path


class Peer:
    """Process of one peer. `python` is the interpreter of its environment."""

    def __init__(self, name: str, python: str, task: PeerTask) -> None:
        """Start the process and wait until its model is loaded and warmed up.

        Raises EnvironmentFailed with the end of its log when it exits before.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-peer-")
        path = Path(self._folder.name) / "task.json"
        request: dict[str, Any] = {key: value for key, value in vars(task).items() if key != "sets"}
        request["place"] = python
        request["sets"] = {key: [asdict(each) for each in requests] for key, requests in task.sets.items()}
        path.write_text(json.dumps(request))
        environment = os.environ | {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(PEERS / "serve.py"), DRIVERS[name], str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # so that its children can be killed with it
        )
        self.about: dict[str, str] = self._answer("ready", LOAD_S)["ready"]

    def run_set(self, name: str) -> Ran:
        """Run the request set `name` of the task."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        answer = self._answer("set", RUN_S)
        return Ran(answer["wall_s"], answer["token_ids"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _answer(self, key: str, timeout_s: float) -> dict[str, Any]:
        """Return the next line, an object with `key`. Each request gets one line, so no line is left in a buffer."""
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise self._failed(f"no response within {timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise self._failed()
        answer = json.loads(line)
        assert key in answer, line[:200]
        return answer

    def _failed(self, reason: str | None = None) -> EnvironmentFailed:
        if reason is None:
            reason = f"its process exited with code {self._process.wait()}"
        self._log.flush()
        self._log.seek(0)
        log_end = self._log.read().strip()[-MAX_LOG_CHARS:]
        self.close()
        return EnvironmentFailed(f"peer {self.name}: {reason}\n{log_end}")
