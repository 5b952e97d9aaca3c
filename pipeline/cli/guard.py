"""Run a command in a fork, so that the exit code is right however the command ends.

Ray exits its driver with code 1 and no message when the node's raylet dies, and the kernel kills a driver that takes
too much memory. A scheduler would read 1 as too many row errors, which a retry does not fix. So the command runs in a
fork that reports its intended exit code through a pipe; this process, the guard, waits and exits with that code. A fork
that ends without a report is a failure of the environment: exit code 3, resumable. The guard forwards signals; a fork
that a signal ended, or that exits with 75 after one, was interrupted: exit code 75. If the guard is killed, so is the
fork.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from pipeline.cli.console import exit_code
from pipeline.errors import EnvironmentFailed, Interrupted
from pipeline.machine.signals import handled

WAIT_S = 0.25
EXIT_TIMEOUT_S = 30.0  # from the report of the exit code to the end of the fork, which waits for Ray
_PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def guarded() -> Iterator[None]:
    """Continue in a fork, inside and after the block; the end or the error of the block decides the exit code.

    The calling process waits here. It raises SystemExit with the fork's code, EnvironmentFailed if the fork ended
    without a report, and Interrupted if a signal ended it. Call it before any thread is started.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    guard = os.getpid()
    forwarded = handled()
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until the handlers that forward them are installed
    child = os.fork()
    if child:
        os.close(writing)
        _wait_and_leave(child, reading, forwarded)
    os.close(reading)
    os.setpgid(0, 0)  # so that a terminal sends Ctrl-C only to the guard, which forwards it once
    _end_with(guard)
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        yield
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        os.write(writing, str(code).encode())
        os.close(writing)


def _wait_and_leave(child: int, reading: int, forwarded: list[signal.Signals]) -> NoReturn:
    sent: list[signal.Signals] = []

    def forward(number: int, _: object) -> None:
        sent.append(signal.Signals(number))
        os.kill(child, number)

    old = {number: signal.signal(number, forward) for number in forwarded}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    try:
        report = _read(reading)
        status = _wait(child, EXIT_TIMEOUT_S)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if report:
        sys.exit(int(report))
    if sent and _was_stopped(status, sent):
        raise Interrupted(f"Stopped by {sent[0].name}.")
    raise EnvironmentFailed(f"The driver died unexpectedly: {_describe_end(status)}")


def _read(pipe: int) -> bytes:
    """Read to the end of the pipe, with short waits so that handlers of signals run in between."""
    report = b""
    while True:
        if select.select([pipe], [], [], WAIT_S)[0]:
            data = os.read(pipe, 64)
            if not data:
                os.close(pipe)
                return report
            report += data


def _wait(child: int, limit_s: float) -> int:
    """Return the wait status of the child; kill it after limit_s."""
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.01)


def _end_with(guard: int) -> None:
    """Have the kernel kill this process when the guard ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard ended before prctl
        os._exit(EnvironmentFailed.exit_code)


def _was_stopped(status: int, sent: list[signal.Signals]) -> bool:
    """Return whether these signals ended the command: by `os._exit`, by the default action if a library replaced the
    handler, or by SIGABRT, which Ray's handler raises."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) in (*sent, signal.SIGABRT)
    return os.WEXITSTATUS(status) == Interrupted.exit_code


def _describe_end(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        memory = " It may have run out of memory (see `dmesg`)." if name == "SIGKILL" else ""
        return f"its process was killed by {name}.{memory}"
    return (
        f"its process exited with code {os.WEXITSTATUS(status)}, as it does when one of Ray's processes dies. "
        "The machine may have run out of memory, or this node has left the cluster."
    )
