"""Named places where a test can stop, break or kill the process; they do nothing otherwise.

`hit("part.linked")` marks the place. A test in the same process installs callbacks. A test of a run sets
PIPELINE_FAILPOINTS="part.linked=kill@3,part.synced=enospc", which acts in its engine actors: `name=action@n` acts on
the n-th hit (default 1) and on that one only. It is nothing without PIPELINE_ALLOW_FAILPOINTS=1, so that no variable
that was left behind kills a real run.
"""

import errno
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping

Action = Callable[[], None]


def _enospc() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


ACTIONS: Mapping[str, Action] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(3600),
    "enospc": _enospc,
}

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


def requested(environ: Mapping[str, str]) -> str:
    """What PIPELINE_FAILPOINTS asks for. Nothing, with a warning, where PIPELINE_ALLOW_FAILPOINTS is not 1."""
    asked = environ.get("PIPELINE_FAILPOINTS", "")
    if asked and environ.get("PIPELINE_ALLOW_FAILPOINTS") != "1":
        warnings.warn("PIPELINE_FAILPOINTS is ignored: it breaks runs, for tests that set PIPELINE_ALLOW_FAILPOINTS=1 "
                      "too", stacklevel=2)  # fmt: skip
        return ""
    return asked


def install_requested(requested: str) -> None:
    """Install what `requested` returned, in the process that is to break. ValueError if malformed."""
    for entry in filter(None, requested.split(",")):
        name, _, what = entry.partition("=")
        action, _, n = what.partition("@")
        if action not in ACTIONS:
            raise ValueError(f"PIPELINE_FAILPOINTS: {entry!r}: expected name=action@n, action one of {sorted(ACTIONS)}")
        install({name.strip(): on_hit(int(n or 1), ACTIONS[action])})
