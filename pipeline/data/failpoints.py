"""Named places where a test can stop, break or kill the process; they do nothing otherwise.

`hit("part.linked")` marks the place. A test in the same process installs callbacks. A test of another process
sets PIPELINE_FAILPOINTS="part.linked=kill@3,part.synced=enospc", which acts only where an entry point has
called `from_environ()`: `name=action@n` acts on the n-th hit (default 1) and on that one only.
"""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping

Action = Callable[[], None]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    time.sleep(3600)


def _enospc() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: Mapping[str, Action] = {"kill": _kill, "stop": _stop, "hang": _hang, "enospc": _enospc}

_installed: dict[str, Action] = {}


def hit(name: str) -> None:
    """Run what is installed at this place, if anything."""
    if _installed and name in _installed:
        _installed[name]()


def install(actions: Mapping[str, Action]) -> None:
    """Add callbacks by name; they run at every hit, in the thread that hits."""
    _installed.update(actions)


def clear() -> None:
    _installed.clear()


def on_hit(n: int, action: Action) -> Action:
    """`action`, run on the n-th call only (1 is the first)."""
    lock = threading.Lock()
    hits = 0

    def counted() -> None:
        nonlocal hits
        with lock:
            hits += 1
            now = hits == n
        if now:
            action()

    return counted


def from_environ(environ: Mapping[str, str] = os.environ) -> None:
    """Install what PIPELINE_FAILPOINTS asks for; called once by a process's entry point. ValueError if
    malformed."""
    for entry in filter(None, environ.get("PIPELINE_FAILPOINTS", "").split(",")):
        name, _, what = entry.partition("=")
        action, _, n = what.partition("@")
        if action not in ACTIONS:
            raise ValueError(f"PIPELINE_FAILPOINTS: {entry!r}: expected name=action@n, action one of {sorted(ACTIONS)}")
        install({name.strip(): on_hit(int(n or 1), ACTIONS[action])})
