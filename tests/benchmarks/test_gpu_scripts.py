"""The GPU scripts on a CPU: every section runs in an environment without the job's packages, and crossovers and traces
are read right."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu.clocks import summarize
from benchmarks.gpu.linears import cheapest_crossover
from benchmarks.gpu.trace import Trace, pauses
from pipeline.engine.forward.graphs import CudaCapture
from pipeline.errors import PipelineError

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def smoke(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the sections in an environment without the packages of a job. Return the figures."""
    missing = 'import sys\nsys.modules |= dict.fromkeys(("ray", "pydantic", "click", "llguidance"))\n'
    (folder / "sitecustomize.py").write_text(missing)
    paths, output = os.pathsep.join([str(folder), str(ROOT)]), str(folder / "out")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--smoke", "--output", output, *arguments]
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out" / "figures.json").read_text())


def test_every_section_runs_without_the_packages_of_a_job(tmp_path: Path) -> None:
    figures = smoke(tmp_path)
    outcomes = {each["name"]: each["verdict"] for each in figures["outcomes"]}
    assert set(outcomes.values()) == {"done"}
    assert {name.split("-")[0] for name in outcomes} == {
        "machine", "checkpoints", "kernels", "linears", "experts", "steps", "jobs", "offload", "peers",
    }  # fmt: skip
    sections = figures["sections"]
    assert all(time["seconds"] > 0 for time in sections["kernels-tiny-awq"]["kernels"])
    assert all((time["off"] or 0.0) < 0.02 for time in sections["kernels-tiny-awq"]["kernels"])
    assert set(sections["linears-tiny-awq"]["linears_s"]) >= {"16 bit", "served"}
    assert [step["rows"] for step in sections["steps-tiny"]["steps"]] == [2, 1]
    assert sections["steps-tiny"]["largest_step"]["tokens"] > 40
    assert [len(sections[f"jobs-{name}"]["jobs"]) for name in ("tiny-awq", "tiny-awq-fp8")] == [5, 1]
    report = (tmp_path / "out" / "report.txt").read_text()
    assert "skipped: vLLM is not installed" in report


def test_experts_of_each_form_are_timed_without_writing_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants of one work agree. No selected section needs a checkpoint."""
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    figures = smoke(tmp_path, "--sections", "experts")
    assert [each["name"] for each in figures["outcomes"]] == ["machine", "experts-tiny-awq"]
    assert not (tmp_path / "cache" / "bench").exists()
    times = figures["sections"]["experts-tiny-awq"]["kernels"]
    variants: dict[str, set[str]] = {}
    for each in times:
        variants.setdefault(each["kernel"], set()).add(each["variant"])
    quantized = {form: {"served", "16 bit"} for form in ("int4, groups of 128", "fp8, blocks", "mxfp4")}
    by_torch = {kernel: {"served", "torch"} for kernel in ("adapters", "route")}
    assert variants == quantized | by_torch | {"dense": {"served", "torch", "torch products"}}
    assert any(time["shape"].startswith("gpt-oss-20b") for time in times)
    assert all(time["off"] < 0.02 for time in times if time["variant"] != "torch products")


def test_a_failed_capture_names_the_reason_and_leaves_torch_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 fails at the end of a failed capture: the capture stream stays current, and the default generator
    counts as captured."""
    cuda = SimpleNamespace(stream="default", is_captured=False, pools=0)

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        cuda.stream, cuda.is_captured = "capture", True
        try:
            yield
        except RuntimeError:
            raise RuntimeError("capture_end: operation failed due to a previous error during capture") from None
        cuda.stream, cuda.is_captured = "default", False

    def new_pool() -> int:
        cuda.pools += 1
        return cuda.pools

    def synchronize() -> None:
        if cuda.is_captured:
            raise RuntimeError("operation not permitted when stream is capturing")

    fresh = SimpleNamespace(clone_state=lambda: False, graphsafe_set_state=partial(setattr, cuda, "is_captured"))
    for name, fake in {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "current_stream": lambda *_: cuda.stream,
        "set_stream": partial(setattr, cuda, "stream"),
        "current_device": lambda: 0,
        "default_generators": (fresh,),
        "graph_pool_handle": new_pool,
        "graph": graph,
        "synchronize": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture = CudaCapture()
    with pytest.raises(
        PipelineError, match="CUDA graph capture failed: RuntimeError: operation not permitted when stream is capt"
    ):
        capture(synchronize)
    assert (cuda.stream, cuda.is_captured, cuda.pools) == ("default", False, 2)
    assert capture(lambda: None)() is None


def test_the_crossover_loses_the_smallest_sum_of_time() -> None:
    def crossover(fused: tuple[float, ...], dense: tuple[float, ...]) -> int:
        return cheapest_crossover(*({2**i: s for i, s in enumerate(times)} for times in (fused, dense)))

    assert crossover((1, 1, 2, 4), (2, 2, 2.1, 2)) == 4
    assert crossover((1, 1, 2.02, 1), (2, 2, 2, 2)) == 8, "slower at one number by 1% is noise"
    assert crossover((3, 3, 3, 3), (2, 2, 2, 2)) == 0


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def test_clocks_are_those_of_a_section_under_load() -> None:
    lines = [
        "2026/11/26 10:00:01.000, 1980, 690.5, 0x0000000000000000",  # of an earlier section
        "2026/11/26 10:01:00.000, 1755, 700.1, 0x0000000000000004",
        "2026/11/26 10:01:00.200, 1980, 650.0, 0x0000000000000000",
        "2026/11/26 10:01:00.400, 345, 120.0, 0x0000000000000001",  # idle
        "2026/11/26 10:01:00.600, 17",  # cut
    ]
    began = time.mktime((2026, 11, 26, 10, 1, 0, 0, 0, -1))
    assert summarize("\n".join(lines), began) == {
        "sm_mhz": {"median": 1867.5, "min": 1755.0},
        "watts": {"median": pytest.approx(675.05), "max": 700.1},
        "lowered_by": {"power cap": 0.5},
    }
    assert summarize("\n".join(lines), began + 10) == {}


def test_a_captured_step_lasts_from_its_first_kernel_to_its_last() -> None:
    """Two steps, each a replay of two kernels and one after it; the second synchronize 100 us for the host."""
    events = [{"ph": "M", "name": "process_name"}]
    for number, start in enumerate((1000.0, 1200.0)):
        graph, single = 10 + number, 20 + number
        events += [
            event("cuda_runtime", "cudaGraphLaunch", start - 30, 5, graph),
            event("cuda_driver", "cuLaunchKernelEx", start - 20, 5, single),
            event("kernel", "attend", start, 40, graph),
            event("kernel", "multiply", start + 42, 38, graph),
            event("kernel", "sample", start + 81, 19, single),
        ]
    found = Trace(events).steps(2)
    assert found is not None
    assert (found.replay_s, found.busy_s, found.idle_s) == pytest.approx((80e-6, 97e-6, 53e-6))
    assert found.host_s == pytest.approx(50e-6), "the pauses of one and two microseconds are no waiting"
    assert found.kernels == pytest.approx({"attend": 40e-6, "multiply": 38e-6, "sample": 19e-6})


def test_the_host_time_of_a_mixed_step_ends_at_its_last_launch() -> None:
    events = [
        event("user_annotation", "mixed step", 100, 500),
        event("cuda_runtime", "cudaLaunchKernel", 150, 10, 1),
        event("cuda_runtime", "cudaLaunchKernel", 390, 10, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 420, 170, 3),
        event("cuda_runtime", "cudaLaunchKernel", 700, 10, 4),
        *(event("kernel", name, start, length, n) for n, (name, start, length) in enumerate(
            (("a", 170, 50), ("b", 410, 60)), 1)),
        event("kernel", "c", 720, 60, 4),
    ]  # fmt: skip
    (found,) = Trace(events).windows("mixed step")
    assert (found.launched_s, found.device_s, found.num_launches) == pytest.approx((300e-6, 110e-6, 2))
    assert pauses([(5, 7), (0, 2), (1, 3), (7, 8)]) == [2]
