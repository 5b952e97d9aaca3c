"""Clock, cores, processor, processes and installed packages of this machine."""

import math
import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, tzinfo
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.machine.cgroup import cpu_quota

VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # CPU flags that matrix products can use


def now_us() -> int:
    """Return monotonic time in whole microseconds. All processes of one machine share the clock."""
    return time.monotonic_ns() // 1000


def wall_time() -> datetime:
    """Return the local time without a time zone, in whole seconds."""
    return datetime.now().replace(microsecond=0)


def zone_time(zone: tzinfo) -> datetime:
    """Return the current time in `zone`."""
    return datetime.now(zone)


def available_cores() -> int:
    """Return the number of cores that this process may use at once: its affinity, capped by its CPU quota (rounded
    up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else min(cores, math.ceil(quota.cpus))


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def process_mark(pid: int) -> str:
    """Return an identifier of a process that is unique on this machine, even after its PID is reused: boot id, PID
    namespace and start time. Empty if there is no such process, or no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # proc(5): starttime
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started}"


def process_age_us() -> int:
    """Return the age of this process; 0 if the system does not provide it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5): starttime
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0
    return max(0, int(1e6 * age_s))


def processor() -> tuple[str, set[str]]:
    """Return the processor's name and its flags (avx2, ...), if the system provides them."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key == "flags":
                flags = set(value.split())
                break
    return model, flags
