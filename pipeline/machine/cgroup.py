"""Memory and CPU limits of the control groups of this process, for cgroup v1 and v2.

Every limit on the path from the process's own group up to the root applies. cgroups(7): `/proc/self/cgroup` names the
group in each hierarchy, `/proc/self/mountinfo` names the mount point of a hierarchy and its visible root group.
In a container both may name paths that are not visible; then the limits of the visible groups apply. All functions take
the root of the file system.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60  # v1 writes a number near 2^63


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory limit. free_bytes: counts page cache that the kernel can reclaim at once as free, as
    Kubernetes does (working set). source: the file that holds the limit."""

    limit_bytes: int
    free_bytes: int
    source: Path


@dataclass(frozen=True)
class CpuQuota:
    """The smallest CPU quota. cpus: 0.5 is half a CPU. source: the file that holds the quota."""

    cpus: float
    source: Path


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the memory limit of this process, or None."""
    found = []
    for group in _groups("memory", root):
        usage = _number(group / "memory.current", group / "memory.usage_in_bytes")
        used = max(0, usage - _stat(group, "total_inactive_file", "inactive_file"))
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if 0 < limit < _UNLIMITED:
                found.append(MemoryLimit(limit, max(0, limit - used), group / name))
        parents = _stat(group, "hierarchical_memory_limit")  # v1: includes groups outside the container
        if 0 < parents < _UNLIMITED:
            found.append(MemoryLimit(parents, max(0, parents - used), group / "memory.stat"))
    return min(found, key=lambda limit: (limit.free_bytes, limit.source.name == "memory.stat"), default=None)


def cpu_quota(root: Path = ROOT) -> CpuQuota | None:
    """Return the CPU quota of this process, or None."""
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
    """Yield the visible folders of this process's groups, from its own up to the root, in each hierarchy that may have
    the controller."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        for visible, mount in _mounts(controller if number != "0" else None, root):
            path = Path(group)
            inside = path.relative_to(visible) if path.is_relative_to(visible) else Path()
            if ".." in inside.parts:  # the group is outside this namespace
                inside = Path()
            folders = [mount / inside, *(mount / above for above in inside.parents)]
            yield from dict.fromkeys(folder for folder in folders if folder.is_dir())


def _mounts(controller: str | None, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (root group, mount point) of the v1 hierarchies with `controller`, or of v2 if it is None."""
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
    """Return the number in the first file that holds one, or -1."""
    for path in paths:
        with suppress(OSError, ValueError):
            return int(path.read_text())
    return -1


def _stat(group: Path, *names: str) -> int:
    """Return the first of these entries in the group's memory.stat, or 0."""
    entries = dict(line.split(" ", 1) for line in _lines(group / "memory.stat") if " " in line)
    return next((int(entries[name]) for name in names if name in entries), 0)
