"""Limits of the control groups that this process is in: memory and processor time, of cgroup v1 and v2.

Each limit on the path from the process's own group up to the root holds. cgroups(7): `/proc/self/cgroup` names the
group in every hierarchy, `/proc/self/mountinfo` where a hierarchy is mounted and which of its groups is visible there.
In a container both may name paths that cannot be seen; then the limits of what is visible count. All functions take
the root of the file system.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # v1 has no word for it, but a number near 2^63


@dataclass(frozen=True)
class MemoryLimit:
    """The limit that leaves the least memory. free_bytes: without the page cache that the kernel drops first, as
    Kubernetes counts (the working set). source: the file that holds the limit."""

    limit_bytes: int
    free_bytes: int
    source: Path


@dataclass(frozen=True)
class CpuQuota:
    """The smallest quota of processor time. cpus: 0.5 is half of one. source: the file that holds it."""

    cpus: float
    source: Path


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Find the limit of this process; None without one."""
    found = []
    for group in _groups("memory", root):
        usage = _number(group / "memory.current", group / "memory.usage_in_bytes")
        used = max(0, usage - _stat(group, "total_inactive_file", "inactive_file"))
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if 0 < limit < _UNLIMITED:
                found.append(MemoryLimit(limit, max(0, limit - used), group / name))
        parents = _stat(group, "hierarchical_memory_limit")  # v1: also of groups that a container does not see
        if 0 < parents < _UNLIMITED:
            found.append(MemoryLimit(parents, max(0, parents - used), group / "memory.stat"))
    return min(found, key=lambda limit: (limit.free_bytes, limit.source.name == "memory.stat"), default=None)


def cpu_quota(root: Path = ROOT) -> CpuQuota | None:
    """Find the quota of this process; None without one."""
    found = []
    for group in _groups("cpu", root):
        with suppress(OSError, ValueError):
            quota, period = map(int, (group / "cpu.max").read_text().split())  # "max 100000" without a quota
            found.append(CpuQuota(quota / period, group / "cpu.max"))
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota > 0 and period > 0:
            found.append(CpuQuota(quota / period, group / "cpu.cfs_quota_us"))
    return min(found, key=lambda quota: quota.cpus, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The visible folders of this process's groups, from its own up to the root, in each hierarchy that may have the
    controller."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        for visible, mount in _mounts(controller if number != "0" else None, root):
            path = Path(group)
            inside = path.relative_to(visible) if path.is_relative_to(visible) else Path()
            if ".." in inside.parts:  # of another namespace
                inside = Path()
            folders = [mount / inside, *(mount / above for above in inside.parents)]
            yield from dict.fromkeys(folder for folder in folders if folder.is_dir())


def _mounts(controller: str | None, root: Path) -> Iterator[tuple[str, Path]]:
    """Which group is visible where: of the v1 hierarchy with the controller, or of v2 where that is None."""
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, system = line.partition(" - ")
        fields, (kind, _, options) = mounted.split(), system.split(" ", 2)
        if (kind == "cgroup2") if controller is None else (kind == "cgroup" and controller in options.split(",")):
            yield _unescaped(fields[3]), root / _unescaped(fields[4]).lstrip("/")


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(*paths: Path) -> int:
    """The number in the first of the files that holds one; -1 where none does."""
    for path in paths:
        with suppress(OSError, ValueError):
            return int(path.read_text())
    return -1


def _stat(group: Path, *names: str) -> int:
    """The first of these entries that the group's memory.stat has; 0 without."""
    entries = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    return next((int(entries[name]) for name in names if name in entries), 0)
