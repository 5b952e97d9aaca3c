"""Start Ray on this machine or join a cluster, for the rest of this process, and query its resources.

Environment variables that Ray reads are set here, only when it is started or joined; Ray passes them to the processes
that it starts.
"""

import contextlib
import logging
import os
import secrets
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
from pipeline.machine.signals import restore_handlers

START_TRIES = 3  # of a local Ray: on a busy machine or a cold disk its own timeout of 30 s may be too short
HANDLERS_S = 0.01  # interval at which signal handlers are restored while Ray starts or ends
_ENVIRONMENT = {
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # keep its native log off the terminal
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep CUDA_VISIBLE_DEVICES of actors without GPUs
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at Ray's default of 15 any other program starves the engine
}


def connect(address: str | None, cores: int = 0) -> bool:
    """Join the cluster at `address`, or start Ray on this machine with `cores` CPUs. Return False if this process is
    already connected. Raises EnvironmentFailed."""
    if ray.is_initialized():
        return False
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address is None:
        if problem := ray_folder_problem(ray_folder()):
            raise EnvironmentFailed(problem)
        if "RAY_AUTH_TOKEN_PATH" not in os.environ and not _home_keeps_token():
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    auto_init_hook.enable_auto_connect = False  # else a thread that outlives the run would start another Ray
    options: dict[str, Any] = {"address": address}
    if address is None:  # without "local" it would join any Ray on this machine
        options = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    tries = START_TRIES if address is None else 1
    for attempt in range(1, tries + 1):
        try:
            with _quiet():
                _call_in_thread(
                    lambda: ray.init(
                        **options, job_config=_SafePath(), log_to_driver=False, logging_level=logging.ERROR
                    )
                )
            break
        except Exception as error:  # Ray raises bare exceptions, such as on its timeout
            ray.shutdown()
            if attempt == tries:
                joined = f"RAY_ADDRESS={address}: the cluster cannot be joined"
                failure = joined if address else "Ray cannot be started on this machine"
                raise EnvironmentFailed(f"{failure}: {error}") from error
    return True


def _home_keeps_token() -> bool:
    """Return whether Ray can read or create its authentication token in the user's home, as it does by default."""
    folder = Path(os.path.expanduser("~/.ray"))
    return os.access(folder / "auth_token", os.R_OK) or (folder.is_absolute() and not write_problem(folder))


def disconnect() -> None:
    """End the Ray that `connect` started, or leave the cluster."""
    _call_in_thread(ray.shutdown)


def session_logs() -> Path | None:
    """Return the log folder of a Ray that this process started; None for a cluster that it joined."""
    node = ray._private.worker._global_node  # type: ignore[attr-defined]  # no public API
    return Path(node.get_logs_dir_path()) if node is not None and node.is_head() else None


def cluster_has_gpus(address: str) -> bool:
    """Join the cluster for the rest of the process, and return whether it has GPUs."""
    connect(address)
    return ray.cluster_resources().get("GPU", 0) > 0


def cluster_cpus(address: str, gpus: float, reserved: int) -> float:
    """Return the CPUs of one actor if the job does not set them: with GPUs a share of its node's CPUs, else the whole
    node. Uses the smallest node, since an actor must fit anywhere, and leaves `reserved` CPUs free on it. 1 without
    such a node."""
    connect(address)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = [
        (node["CPU"] - reserved) * (gpus / node["GPU"] if gpus else 1.0)
        for node in nodes
        if node.get("CPU", 0) > 0 and (not gpus or node.get("GPU", 0) >= gpus)
    ]
    return max(1.0, float(int(min(each)))) if each else 1.0


def dead_nodes() -> set[str]:
    """Return Ray's ids of the nodes that left the cluster, whether they were drained or died."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def draining_nodes() -> set[str]:
    """Return Ray's ids of the nodes that are about to leave: by `ray drain-node`, an autoscaler, or SIGTERM to their
    Ray. Ray's own libraries use this call; there is no public one."""
    return set(ray._private.state.state.get_draining_nodes())  # type: ignore[attr-defined]


class _SafePath(JobConfig):
    """Job configuration that restricts the workers' module path to this package. By default Ray workers first search
    the driver's working directory and script folder, where a `random.py` would shadow Python's."""

    def _serialize(self) -> str:
        self._py_driver_sys_path = _source_tree()
        return super()._serialize()


def _source_tree() -> list[str]:
    """Return the folder of this package if it precedes Python's own in `sys.path`: workers would not search it by
    default. Empty for an installed package."""
    python = os.path.dirname(os.__file__)
    return [PACKAGE_PARENT] if PACKAGE_PARENT in takewhile(lambda folder: folder != python, sys.path) else []


def _call_in_thread(call: Callable[[], object]) -> None:
    """Call `call` in another thread and wait, so that signals need not wait for Ray and keep the run's handlers: in the
    main thread Ray would install its own handler for SIGTERM. The thread stays alive, because Linux ends Ray's
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
        restore_handlers()
    restore_handlers()
    ended.result()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages about its log level that Ray's native code prints as it starts."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
