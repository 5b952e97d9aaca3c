"""Failpoints: named points in the code where a test can stop, break or kill the process.

`hit("part.linked")` marks such a point and does nothing by default. A test in the same process installs callbacks. A
test of a run sets PIPELINE_FAILPOINTS="part.linked=kill@3,part.synced=enospc", which applies to its engine actors:
`name=action@n` acts on the n-th hit only (default 1). PIPELINE_ALLOW_FAILPOINTS=1 must be set too, so that a variable
left behind by a test cannot kill a real run.
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
    """Run the action that is installed at this failpoint, if any."""
    if _installed and name in _installed:
        _installed[name]()


def install(actions: Mapping[str, Action]) -> None:
    """Add callbacks by failpoint name; they run on every hit, in the thread that hits."""
    _installed.update(actions)


def clear() -> None:
    _installed.clear()


def on_hit(n: int, action: Action) -> Action:
    """Wrap `action` to run on the n-th call only, counted from 1."""
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
    """Return PIPELINE_FAILPOINTS; empty, with a warning, unless PIPELINE_ALLOW_FAILPOINTS is 1."""
    failpoints = environ.get("PIPELINE_FAILPOINTS", "")
    if failpoints and environ.get("PIPELINE_ALLOW_FAILPOINTS") != "1":
        warnings.warn("PIPELINE_FAILPOINTS is ignored: it breaks runs on purpose; tests must also set "
                      "PIPELINE_ALLOW_FAILPOINTS=1", stacklevel=2)  # fmt: skip
        return ""
    return failpoints


def install_requested(requested: str) -> None:
    """Install the failpoints that `requested` returned, in this process. Raises ValueError if they are malformed."""
    for entry in filter(None, requested.split(",")):
        name, _, action_at_n = entry.partition("=")
        action, _, n = action_at_n.partition("@")
        if action not in ACTIONS:
            raise ValueError(
                f"PIPELINE_FAILPOINTS: {entry!r}: expected name=action@n with an action of {sorted(ACTIONS)}"
            )
        install({name.strip(): on_hit(int(n or 1), ACTIONS[action])})
