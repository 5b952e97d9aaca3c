"""Processes of a running job, by kind, and strikes at them."""

import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

WEIGHTS = {"driver": 50, "engine": 25, "server": 25, "worker": 20, "node": 5}


def family(roots: Iterable[int]) -> dict[str, list[int]]:
    """Return the processes below `roots`, themselves included, that may be killed, by kind."""
    parent: dict[int, int] = {}
    words: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
            line = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        words[int(entry)] = line.replace(b"\0", b" ").decode(errors="replace")
        parent[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found: dict[str, list[int]] = {}
    tops = set(roots)
    for pid, line in words.items():
        above = pid
        while above and above not in tops:
            above = parent.get(above, 0)
        kind = _kind(line)
        if above and kind:
            found.setdefault(kind, []).append(pid)
    return found


def _kind(line: str) -> str | None:
    if "tests.faults.driver" in line:  # the guard, and its fork, which runs the job
        return "driver"
    if "process_group.py" in line or "tests.endpoint.fake_server" in line:
        return "server"
    if "pipeline.job.process.main" in line:
        return "engine"
    if "/raylet " in line or (line.startswith("ray::") and "Agent" in line):  # they end together
        return "node"
    if line.startswith("ray::") and "IDLE" not in line:
        return "worker"
    return None


def choose(found: dict[str, list[int]], victim: str, draw: random.Random) -> tuple[str, int] | None:
    """Return the kind and PID of a process of kind `victim`, or "any"; None if none exists."""
    kinds = [kind for kind in found if victim in ("any", kind)]
    if not kinds:
        return None
    kind = draw.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
    return kind, draw.choice(found[kind])


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has already ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def pause(pid: int, seconds: float) -> bool:
    """Stop a process for some seconds; return False if it has already ended."""
    if not send(pid, signal.SIGSTOP):
        return False
    time.sleep(seconds)
    send(pid, signal.SIGCONT)
    return True


def alive(pids: Iterable[int], kinds: tuple[str, ...]) -> list[int]:
    """Return those of `pids` that still run a command of these kinds."""
    left = []
    for pid in pids:
        try:
            line = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if _kind(line) in kinds:  # a zombie has no command line
            left.append(pid)
    return left
