"""Memory and CPU limits, read from made-up trees of both versions of control groups."""

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline.engine.startup import build, memory
from pipeline.machine import host
from pipeline.machine.cgroup import CpuQuota, MemoryLimit, cpu_quota, memory_limit

GB = 10**9
V1_UNLIMITED = 9223372036854771712
V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MEMORY = "36 24 0:31 {} {} rw - cgroup cgroup rw,memory"
V1_CPU = "37 24 0:32 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
PROC = "24 1 0:5 / /proc rw - proc proc rw"
SELF = "/sys/fs/cgroup"


class Tree(NamedTuple):
    """cgroup, mountinfo: of /proc/self. files: below the root. memory: limit, free bytes and the file of the limit."""

    cgroup: str
    mountinfo: str
    files: dict[str, object]
    memory: tuple[int, int, str] | None = None
    cpu: tuple[float, str] | None = None


def used(group: str, current: int, inactive: int = 0, v1: bool = False) -> dict[str, object]:
    names = ("memory.usage_in_bytes", "total_inactive_file") if v1 else ("memory.current", "inactive_file")
    return {f"{group}/{names[0]}": current, f"{group}/memory.stat": f"anon 5\n{names[1]} {inactive}"}


A = f"{SELF}/system.slice"
JOB = f"{A}/job.scope"
V1 = f"{SELF}/memory"
TREES = {
    "no cgroups": Tree("", "", {}),
    "none that limits": Tree("0::/\n", V2, {f"{SELF}/cpu.stat": "usage_usec 1"}),
    "v2, of its own": Tree("0::/system.slice/job.scope\n", f"{PROC}\n{V2}",
        {f"{JOB}/memory.max": GB, **used(JOB, 400, 100), f"{JOB}/cpu.max": "150000 100000"},
        (GB, GB - 300, f"{JOB}/memory.max"), (1.5, f"{JOB}/cpu.max")),
    "v2, of a parent": Tree("0::/system.slice/job.scope\n", V2,
        {f"{JOB}/memory.max": "max", **used(JOB, 400), f"{JOB}/cpu.max": "max 100000",
         f"{A}/memory.max": GB, **used(A, 600, 50), f"{A}/cpu.max": "50000 100000"},
        (GB, GB - 550, f"{A}/memory.max"), (0.5, f"{A}/cpu.max")),
    "v2, a larger one of its own": Tree("0::/system.slice/job.scope\n", V2,
        {f"{JOB}/memory.max": 2 * GB, **used(JOB, 0), f"{JOB}/cpu.max": "400000 100000",
         f"{A}/memory.max": GB, **used(A, 600), f"{A}/cpu.max": "200000 100000"},
        (GB, GB - 600, f"{A}/memory.max"), (2.0, f"{A}/cpu.max")),
    "v2, a larger one of a parent that others fill": Tree("0::/system.slice/job.scope\n", V2,
        {f"{JOB}/memory.max": GB, **used(JOB, 0), f"{A}/memory.max": 3 * GB, **used(A, 3 * GB - 500)},
        (3 * GB, 500, f"{A}/memory.max")),
    "v2, throttled before its limit": Tree("0::/system.slice\n", V2,
        {f"{A}/memory.max": 2 * GB, f"{A}/memory.high": GB, **used(A, 100)}, (GB, GB - 100, f"{A}/memory.high")),
    "v2, used up": Tree("0::/system.slice\n", V2, {f"{A}/memory.max": GB, **used(A, 2 * GB)},
        (GB, 0, f"{A}/memory.max")),
    "v2, in a container": Tree("0::/\n", V2,
        {f"{SELF}/memory.max": GB, **used(SELF, 7), f"{SELF}/cpu.max": "100000 100000"},
        (GB, GB - 7, f"{SELF}/memory.max"), (1.0, f"{SELF}/cpu.max")),
    "v2, a path outside the namespace": Tree("0::/../other\n", V2, {f"{SELF}/memory.max": GB, **used(SELF, 7)},
        (GB, GB - 7, f"{SELF}/memory.max")),
    "v2, a path that is not visible": Tree("0::/docker/0123\n", V2, {f"{SELF}/memory.max": GB, **used(SELF, 7)},
        (GB, GB - 7, f"{SELF}/memory.max")),
    "v2, mounted elsewhere": Tree("0::/a\n", r"35 24 0:30 / /mnt/my\040groups rw - cgroup2 none rw",
        {"/mnt/my groups/a/memory.max": GB, **used("/mnt/my groups/a", 7)},
        (GB, GB - 7, "/mnt/my groups/a/memory.max")),
    "v1, of its own": Tree("9:memory:/job\n2:cpu,cpuacct:/job\n",
        "\n".join([V1_MEMORY.format("/", V1), V1_CPU]),
        {f"{V1}/job/memory.limit_in_bytes": GB, **used(f"{V1}/job", 400, 100, v1=True),
         f"{V1}/memory.limit_in_bytes": V1_UNLIMITED, **used(V1, 50 * GB, v1=True),
         f"{SELF}/cpu,cpuacct/job/cpu.cfs_quota_us": 25000, f"{SELF}/cpu,cpuacct/job/cpu.cfs_period_us": 50000,
         f"{SELF}/cpu,cpuacct/cpu.cfs_quota_us": -1, f"{SELF}/cpu,cpuacct/cpu.cfs_period_us": 100000},
        (GB, GB - 300, f"{V1}/job/memory.limit_in_bytes"), (0.5, f"{SELF}/cpu,cpuacct/job/cpu.cfs_quota_us")),
    "v1, of a parent, as Slurm sets it": Tree("9:memory:/slurm/uid_5/job_7/step_0\n", V1_MEMORY.format("/", V1),
        {f"{V1}/slurm/uid_5/job_7/memory.limit_in_bytes": GB, **used(f"{V1}/slurm/uid_5/job_7", 600, v1=True),
         f"{V1}/slurm/uid_5/job_7/step_0/memory.limit_in_bytes": V1_UNLIMITED,
         **used(f"{V1}/slurm/uid_5/job_7/step_0", 500, v1=True)},
        (GB, GB - 600, f"{V1}/slurm/uid_5/job_7/memory.limit_in_bytes")),
    "v1, in a container": Tree("9:memory:/docker/0123\n", V1_MEMORY.format("/docker/0123", V1),
        {f"{V1}/memory.limit_in_bytes": GB, **used(V1, 7, v1=True)}, (GB, GB - 7, f"{V1}/memory.limit_in_bytes")),
    "v1, of a parent that a container does not see": Tree("9:memory:/docker/0123\n",
        V1_MEMORY.format("/docker/0123", V1),
        {f"{V1}/memory.limit_in_bytes": V1_UNLIMITED, f"{V1}/memory.usage_in_bytes": 9,
         f"{V1}/memory.stat": f"total_inactive_file 2\nhierarchical_memory_limit {GB}"},
        (GB, GB - 7, f"{V1}/memory.stat")),
    "hybrid": Tree("9:memory:/job\n0::/job\n",
        "\n".join([V1_MEMORY.format("/", V1), "38 24 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"]),
        {f"{V1}/job/memory.limit_in_bytes": GB, **used(f"{V1}/job", 7, v1=True), f"{SELF}/unified/job/cpu.stat": "0"},
        (GB, GB - 7, f"{V1}/job/memory.limit_in_bytes")),
    "hybrid, the controller in v2": Tree("9:name=systemd:/job\n0::/job\n",
        "38 24 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        {f"{SELF}/unified/job/cpu.max": "300000 100000"}, None, (3.0, f"{SELF}/unified/job/cpu.max")),
    "files that say something else": Tree("0::/\n", V2, {f"{SELF}/memory.max": "?", f"{SELF}/cpu.max": "max"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_limit_on_the_path(tmp_path, name):
    tree = TREES[name]
    files = {"/proc/self/cgroup": tree.cgroup, "/proc/self/mountinfo": tree.mountinfo} if tree.cgroup else {}
    for path, text in (files | tree.files).items():
        (tmp_path / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path[1:]).write_text(f"{str(text).rstrip()}\n")
    limit, quota = memory_limit(tmp_path), cpu_quota(tmp_path)
    assert limit == (None if tree.memory is None else MemoryLimit(*tree.memory[:2], tmp_path / tree.memory[2][1:]))
    assert quota == (None if tree.cpu is None else CpuQuota(tree.cpu[0], tmp_path / tree.cpu[1][1:]))


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, 1), (1.0, 1), (1.5, 2), (3.01, 4), (64.0, 4), (None, 4)])
def test_a_quota_is_the_number_of_cores_and_threads(monkeypatch, cpus, threads):
    quota = None if cpus is None else CpuQuota(cpus, Path("cpu.max"))
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert host.available_cores() == threads
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [build._num_threads(wanted) for wanted in (None, 3)] == [threads, 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert build._num_threads(None) is None, "the user's number wins"


def test_free_memory_is_what_the_limit_leaves(monkeypatch):
    unlimited = memory.free_cpu_bytes()
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(GB, 5_000_000, Path("memory.max")))
    assert memory.free_cpu_bytes() == 5_000_000 < unlimited
