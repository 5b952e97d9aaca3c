"""Starting a Ray on this machine or joining a cluster, for the rest of this process, and asking what it has.

What Ray reads from the environment is set here, when it is started or joined and not before; Ray hands it to the
processes that it starts.
"""

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from itertools import takewhile
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook
from ray.job_config import JobConfig

from pipeline.errors import EnvironmentFailed
from pipeline.machine.caches import write_problem
from pipeline.machine.interpreter import PACKAGE_PARENT
from pipeline.machine.ray_folder import ray_folder, ray_folder_problem

START_TRIES = 3  # of a local Ray: on a busy machine or a cold disk its own patience of 30 s may not do
HANDLERS_S = 0.01  # between two looks after the handlers of signals while Ray starts or ends
_ENVIRONMENT = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its native log would speak to the terminal
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES of actors without GPUs
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at Ray's 15 any other program starves the engine
}


def connect(address: str | None, cores: int = 0) -> bool:
    """Join the cluster at `address`, or start a Ray on this machine that counts `cores`. False when this process is
    in one already. Raises EnvironmentFailed."""
    if ray.is_initialized():
        return False
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address is None:
        if problem := ray_folder_problem(ray_folder()):
            raise EnvironmentFailed(problem)
        if "RAY_AUTH_TOKEN_PATH" not in os.environ and not _home_keeps_token():
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    auto_init_hook.enable_auto_connect = False  # or a thread that outlives the run would start another Ray
    where: dict[str, Any] = {"address": address}
    if address is None:  # without "local" it would join any Ray that runs on this machine
        where = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    tries = START_TRIES if address is None else 1
    for attempt in range(1, tries + 1):
        try:
            with _quiet():
                _beside(
                    lambda: ray.init(**where, job_config=_SafePath(), log_to_driver=False, logging_level=logging.ERROR)
                )
            break
        except Exception as error:  # Ray raises bare ones, for a start that took more than its 30 s among others
            ray.shutdown()
            if attempt == tries:
                place = f"Ray at {address} cannot be joined" if address else "Ray cannot be started on this machine"
                raise EnvironmentFailed(f"{place}: {error}") from error
    return True


def _home_keeps_token() -> bool:
    """Whether Ray can read the token of its processes in the user's home, or create one there, as it does unasked."""
    folder = Path(os.path.expanduser("~/.ray"))
    return os.access(folder / "auth_token", os.R_OK) or (folder.is_absolute() and not write_problem(folder))


def disconnect() -> None:
    """End the Ray that `connect` started, or leave the cluster."""
    _beside(ray.shutdown)


def session_logs() -> Path | None:
    """Where the processes of a Ray that was started here write their logs; None of a cluster that was joined."""
    node = ray._private.worker._global_node  # type: ignore[attr-defined]  # it has no public name
    return Path(node.get_logs_dir_path()) if node is not None and node.is_head() else None


def cluster_has_gpus(address: str) -> bool:
    """Join the cluster (for the rest of the process) and ask it."""
    connect(address)
    return ray.cluster_resources().get("GPU", 0) > 0


def cluster_cpus(address: str, gpus: float, reserved: int) -> float:
    """The CPUs of one actor where the job does not say: with GPUs their share of its node's, else a whole node's;
    of the node that has the fewest, since an actor must fit anywhere, and with `reserved` ones left beside it.
    1 while there is no such node."""
    connect(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = [
        (node["CPU"] - reserved) * (gpus / node["GPU"] if gpus else 1.0)
        for node in nodes
        if node.get("CPU", 0) > 0 and (not gpus or node.get("GPU", 0) >= gpus)
    ]
    return max(1.0, float(int(min(each)))) if each else 1.0


def dead_nodes() -> set[str]:
    """Ray's names for the machines that have left the cluster, whether they were drained or died."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def draining_nodes() -> set[str]:
    """Ray's names for the machines that are about to leave: by `ray drain-node`, an autoscaler, or SIGTERM to their
    Ray. Ray's own libraries ask in this way; it has no public one."""
    return set(ray._private.state.state.get_draining_nodes())  # type: ignore[attr-defined]


class _SafePath(JobConfig):
    """Ray lets workers look for modules first where the driver was started and where its script lies: a `random.py`
    there would be imported in the place of Python's. This sends them to this package alone."""

    def _serialize(self) -> str:
        self._py_driver_sys_path = _source_tree()
        return super()._serialize()


def _source_tree() -> list[str]:
    """The folder that holds this package, where it comes before Python's own: workers would not look there by
    themselves. Of an installed package none."""
    python = os.path.dirname(os.__file__)
    return [PACKAGE_PARENT] if PACKAGE_PARENT in takewhile(lambda place: place != python, sys.path) else []


def _beside(call: Callable[[], object]) -> None:
    """Call it in another thread and wait, so that a signal need not wait for Ray, and its handler stays the run's: in
    the main thread Ray would put one of its own for SIGTERM in its place. The thread stays too: Linux ends Ray's
    processes with the thread that started them (prctl's PR_SET_PDEATHSIG)."""
    ended: Future[object] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, daemon=True, name="Ray").start()
    while not wait([ended], timeout=HANDLERS_S).done:
        _keep_handlers()
    _keep_handlers()
    ended.result()


def _keep_handlers() -> None:
    """Ray's native part takes signals over as it starts, and gives them back to the system as it ends, without Python's
    knowledge; here Python takes them back."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if handler is not None:  # None: it was not Python's before
                signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Ray's native part says about its own log level while it starts off the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
