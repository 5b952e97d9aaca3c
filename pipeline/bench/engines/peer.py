"""Engines of other environments as contenders: a process that takes names of request sets, line by line.

The protocol is `peers/serve.py`'s. The process loads its model once and stays, so that its rounds can alternate with
the others'; while it waits it takes memory but no processor.
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
LAST_WORDS = 2000  # characters of what a peer said before it failed


@dataclass(frozen=True)
class PeerTask:
    """What every peer gets. dense_model: the folder with plain weights; the model's own unless it is AWQ. work_folder:
    where it may keep what it makes of the checkpoint.

    max_num_seqs: None leaves it to the peer. shared_prefixes: whether prompts begin alike, so that a prefix cache is of
    use. eos_token_ids: what ends requests that do not ignore EOS. device: cpu, cuda or cuda:N. performance_mode:
    vLLM's; None is its default.
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
    """`vllm=/path` -> its name and place. Raises ConfigError for a peer that there is no driver of."""
    name, _, place = text.partition("=")
    if name not in DRIVERS or not place:
        raise ConfigError(f"--peer {text}: expected NAME=PATH with a NAME of {', '.join(DRIVERS)}")
    if not Path(place).exists():
        raise ConfigError(f"--peer {text}: no such file or folder")
    return name, place


class Peer:
    """One peer's process. `place` is the Python of its environment."""

    def __init__(self, name: str, place: str, task: PeerTask) -> None:
        """Starts it and waits until its model is loaded and warm.

        Raises EnvironmentFailed with its last words when it ends before.
        """
        self.name = name
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the process)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-peer-")
        path = Path(self._folder.name) / "task.json"
        request: dict[str, Any] = {key: value for key, value in vars(task).items() if key != "sets"}
        request["place"] = place
        request["sets"] = {key: [asdict(each) for each in requests] for key, requests in task.sets.items()}
        path.write_text(json.dumps(request))
        environment = os.environ | {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [place, str(PEERS / "serve.py"), DRIVERS[name], str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # so that what it started can be ended with it
        )
        self.about: dict[str, str] = self._answer("ready", LOAD_S)["ready"]

    def run_set(self, name: str) -> Ran:
        """Run the task's set of that name."""
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
        """The next line, an object with `key`. One line follows one question, so none waits unseen in a buffer."""
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise self._failed(f"no answer in {timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            raise self._failed()
        answer = json.loads(line)
        assert key in answer, line[:200]
        return answer

    def _failed(self, why: str | None = None) -> EnvironmentFailed:
        if why is None:
            why = f"its process ended with {self._process.wait()}"
        self._log.flush()
        self._log.seek(0)
        last_words = self._log.read().strip()[-LAST_WORDS:]
        self.close()
        return EnvironmentFailed(f"peer {self.name}: {why}\n{last_words}")
