"""Lets a command go on in a fork of this process, so that whatever ends it has an exit code that means what it says.

Ray ends its driver with exit code 1 and no word when the node's own process is gone; the kernel ends one that takes too
much memory. To a scheduler 1 says that too many rows failed, which no new try will mend. So the command goes on in a
fork, which tells through a pipe with which code it means to leave. This process, the guard, waits and leaves with that
code. An end without a word is the environment's failure: exit code 3, resumable. Signals are passed on; an end without
a word after one, by it or by 75, is an interruption: exit code 75. A guard that is killed takes the command with it.
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

WAIT_S = 0.25
LEAVE_S = 30.0  # from the command's word to its end, which waits for Ray's
_PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def guarded() -> Iterator[None]:
    """What follows, inside and after the block, happens in a fork; the block's end or error is its word.

    The process that called waits here: it leaves (SystemExit) with the fork's code, and raises EnvironmentFailed where
    the fork ended without a word, Interrupted where a signal ended it so. To be called before there are threads.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    guard = os.getpid()
    passed_on = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup asks
        passed_on.append(signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until there is somebody to pass them on
    child = os.fork()
    if child:
        os.close(writing)
        _wait_and_leave(child, reading, passed_on)
    os.close(reading)
    os.setpgid(0, 0)  # a terminal's Ctrl-C comes to the guard alone, and to us once
    _end_with(guard)
    code = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        yield
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        os.write(writing, str(code).encode())
        os.close(writing)


def _wait_and_leave(child: int, reading: int, passed_on: list[signal.Signals]) -> NoReturn:
    sent: list[signal.Signals] = []

    def pass_on(number: int, _: object) -> None:
        sent.append(signal.Signals(number))
        os.kill(child, number)

    old = {number: signal.signal(number, pass_on) for number in passed_on}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    try:
        word = _read(reading)
        status = _wait(child, LEAVE_S)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if word:
        sys.exit(int(word))
    if sent and _was_stopped(status, sent):
        raise Interrupted(f"Stopped by {sent[0].name}.")
    raise EnvironmentFailed(f"The run ended without a word: {_how(status)}")


def _read(pipe: int) -> bytes:
    """All that comes. In short waits: a signal that arrives just before one is handled after it."""
    word = b""
    while True:
        if select.select([pipe], [], [], WAIT_S)[0]:
            data = os.read(pipe, 64)
            if not data:
                os.close(pipe)
                return word
            word += data


def _wait(child: int, limit_s: float) -> int:
    """The child's status, once it has ended; it is killed when that takes too long."""
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
    """The kernel ends this process when the guard's ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it ended before we asked
        os._exit(EnvironmentFailed.exit_code)


def _was_stopped(status: int, sent: list[signal.Signals]) -> bool:
    """Whether a command that was sent these signals ended by them: by `os._exit`, by the system's default where a
    library had taken the handler away, or by SIGABRT, as Ray's own handler does it."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) in (*sent, signal.SIGABRT)
    return os.WEXITSTATUS(status) == Interrupted.exit_code


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        memory = " Was there too little memory (see `dmesg`)?" if name == "SIGKILL" else ""
        return f"its process was ended by {name}.{memory}"
    return (
        f"its process left with {os.WEXITSTATUS(status)}, as Ray makes it do when a process of its own is gone. "
        "Was there too little memory, or has this node left the cluster?"
    )
