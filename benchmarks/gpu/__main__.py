"""Time an NVIDIA GPU: kernels, linears, experts, engine steps, weights in host memory, jobs, and vLLM on the card.

    python -m benchmarks.gpu --output gpu-times --budget 600
    python -m benchmarks.gpu --output /tmp/smoke --device cpu --smoke

Sections run one after another, each in its own process with a time limit, the least known results first. After each
section report.txt and figures.json are rewritten. traces.tar holds traces of steps, clocks.csv the card's clocks and
power, log.txt the output of all sections.
Needs torch, triton, numpy, transformers, pyyaml and safetensors. `pytest -m gpu tests/gpu` tests the kernels.
"""

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clocks import ClockLog
from benchmarks.gpu.experts import expert_times
from benchmarks.gpu.jobs import AS_SERVED, FP8, SETS, jobs, peer_jobs
from benchmarks.gpu.kernels import kernel_times
from benchmarks.gpu.linears import linear_times
from benchmarks.gpu.offload import offload_times
from benchmarks.gpu.section import Found, Outcome, RunningSection, Section, Setting
from benchmarks.gpu.steps import step_times
from benchmarks.gpu.stopwatch import Rates, measure_rates
from benchmarks.measure import facts_to_text, machine_facts, table
from benchmarks.shapes import bench_model
from pipeline.machine.host import package_versions

MODELS, SMOKE_MODELS = ("llama3-8b-awq", "qwen3-0.6b"), ("tiny-awq", "tiny")
MACHINE = "machine"
PROMPT_BOUND = ("classification", "summaries")  # sets whose time is spent in large steps
MIN_S = 10.0  # remaining budget needed to start a section
RESERVE_S = 8.0  # part of the budget kept for ending the last section


@dataclass(frozen=True)
class Task:
    """One section of one model. needs_checkpoint: the checkpoint must be written first."""

    name: str
    section: Section
    model: str
    limit_s: float
    needs_checkpoint: bool = True


def machine(setting: Setting) -> Iterator[Found]:
    """Record versions and the card, and measure its rates."""
    facts = machine_facts() | package_versions(("triton", "vllm"))
    if setting.device.type == "cuda":
        card = torch.cuda.get_device_properties(setting.device)
        memory = f"{card.total_memory / 1e9:.1f} GB, {card.multi_processor_count} multiprocessors"
        shown = f"{card.name} ({memory}, sm_{card.major}{card.minor})"
        facts = {"card": shown, "cuda": str(torch.version.cuda)} | facts
    if setting.device.type == "cuda" and shutil.which("nvidia-smi"):
        query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        facts[query] = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    rates = measure_rates(setting.device, setting.dtype, setting.is_smoke)
    yield Found(f"{facts_to_text(facts)}\nAlone: {rates.to_text()}", {"machine": facts, "rates": asdict(rates)})


def checkpoints(setting: Setting, models: Sequence[str]) -> Iterator[Found]:
    """Write missing checkpoints of random weights."""
    began = time.monotonic()
    for model in models:
        bench_model(model, log=lambda text: print(text, flush=True))
    yield Found(f"{', '.join(models)}: {time.monotonic() - began:.1f} s")


def plan(models: Sequence[str], is_smoke: bool) -> list[Task]:
    """Return all kinds of sections for the first model, and steps and some jobs for the others."""
    large, *small = models

    def job(model: str, variant: str, names: Sequence[str], limit_s: float) -> Task:
        words = () if variant == AS_SERVED and model == large else variant.replace(",", "").split()
        return Task("-".join(("jobs", model, *words)), partial(jobs, names=names, variant=variant), model, limit_s)

    tasks = [
        Task(f"linears-{large}", linear_times, large, 120, False),
        job(large, AS_SERVED, SETS, 240),
        job(large, FP8, SETS[: 1 if is_smoke else None], 240),
        Task(f"kernels-{large}", kernel_times, large, 90, False),
        Task(f"steps-{large}", step_times, large, 120),
        Task(f"experts-{large}", expert_times, large, 60, False),
        Task(f"offload-{large}", offload_times, large, 120),
    ]
    if not is_smoke:
        tasks[2:2] = [job(large, variant, PROMPT_BOUND, 90) for variant in ("4,096 tokens", "8,192 tokens")]
        tasks += [job(large, variant, SETS[:1], 90) for variant in ("fp8 cache", "fp8 activations")]
    for model in small:
        tasks.append(Task(f"steps-{model}", step_times, model, 90))
        if not is_smoke:
            variants = AS_SERVED, "64 rows", "64 rows, prompts by kernel"
            tasks += [job(model, variant, SETS[:1], 90) for variant in variants]
    return tasks


class Session:
    """Run of tasks in order, which writes the report after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.outcomes: list[Outcome] = []
        self.found: dict[str, Found] = {}
        options.output.mkdir(parents=True, exist_ok=True)
        for name in ("report.txt", "figures.json", "log.txt", "traces.tar"):
            (options.output / name).unlink(missing_ok=True)
        self.clocks = ClockLog(options.output / "clocks.csv")
        self.setting = Setting(
            model=options.model[0],
            device=find_device(options.device),
            is_smoke=options.smoke,
            traces=options.output / "traces.tar",
        )

    def run(self) -> int:
        """Run all tasks. Returns the exit code: 1 if a section failed or was ended."""
        models, wanted = self.options.model, self.options.sections
        try:
            return self._sections(models, wanted)
        finally:
            self.clocks.close()

    def _sections(self, models: Sequence[str], wanted: Sequence[str]) -> int:
        self._run(Task(MACHINE, machine, models[0], 60))
        rates = self.found.get(MACHINE, Found()).figures.get("rates")
        if rates is None:
            return 1
        self.setting = replace(self.setting, rates=Rates(**rates))
        tasks = [*plan(models, self.options.smoke), self._peers(models[0])]
        tasks = [task for task in tasks if not wanted or any(task.name.startswith(each) for each in wanted)]
        writing: RunningSection | None = None
        if needed := list(dict.fromkeys(task.model for task in tasks if task.needs_checkpoint)):
            writing = self._start(Task("checkpoints", partial(checkpoints, models=needed), "", 300))
        for task in tasks:
            if task.needs_checkpoint and writing is not None:
                self._finish(writing, 300)
                writing = None
            self._run(task)
        if writing is not None:
            self._finish(writing, 300)
        return int(any(outcome.verdict in ("failed", "ended") for outcome in self.outcomes))

    def _peers(self, model: str) -> Task:
        def run(setting: Setting) -> Iterator[Found]:
            ours = self.found.get(f"jobs-{model}", Found()).figures.get("jobs", [])
            ours_s = {job["requests"]: job["wall_s"] for job in ours}
            python = dict(peer.split("=", 1) for peer in self.options.peer).get("vllm")
            if python is None and find_spec("vllm") is None:
                return iter([Found("skipped: vLLM is not installed; install it or pass --peer vllm=PYTHON")])
            return peer_jobs(setting, SETS, python or sys.executable, ours_s)

        return Task(f"peers-{model}", run, model, 560)

    def _left_s(self) -> float:
        return self.began + self.options.budget - RESERVE_S - time.monotonic()

    def _start(self, task: Task) -> RunningSection:
        setting = replace(self.setting, model=task.model)
        return RunningSection(task.name, task.section, setting, self.options.output / "log.txt")

    def _run(self, task: Task) -> None:
        if self._left_s() < MIN_S:
            self._record(Outcome(task.name, "not started", time.monotonic() - self.began, 0.0, "budget exhausted"))
        else:
            self._finish(self._start(task), task.limit_s)

    def _finish(self, running: RunningSection, limit_s: float) -> None:
        began = time.time()
        outcome = running.wait(min(limit_s, self._left_s()), self.began)
        found = self.found[running.name] = running.found
        if clocks := self.clocks.summary(began):
            found.figures["clocks"] = clocks
            found.text += f"\nclocks under load: {json.dumps(clocks)}"
        self._record(outcome)

    def _record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"[{time.monotonic() - self.began:4.0f} s] {outcome.name} {outcome.verdict} {outcome.why}", flush=True)
        write(self.options.output / "report.txt", self.to_text() + "\n")
        write(self.options.output / "figures.json", json.dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "command": shlex.join(sys.orig_argv),
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "sections": {name: {**found.figures, "failures": found.failures} for name, found in self.found.items()},
        }

    def to_text(self) -> str:
        rows = [(each.began_s, each.seconds, each.verdict, each.name, each.why) for each in self.outcomes]
        columns = "at s >6.0f | took s >7.1f | verdict <11 | section <34 | reason <1"
        parts = [f"{self.date}. {shlex.join(sys.orig_argv)}", "\n".join(table(columns, rows))]
        for name, found in self.found.items():
            failures = [f"FAILED {failure}" for failure in found.failures]
            parts.append("\n".join([f"=== {name}", *filter(None, [found.text]), *failures]))
        return "\n\n".join(parts)


def find_device(name: str) -> torch.device:
    """Return the device with an index, which torch.cuda.set_device requires, without initializing the card."""
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-times"), metavar="FOLDER", help="default: gpu-times")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="stop within this time")
    parser.add_argument("--device", default="cuda", metavar="cuda[:N]|cpu")
    parser.add_argument("--smoke", action="store_true", help="use tiny shapes, to check that every section runs")
    parser.add_argument("--model", action="append", metavar="SHAPE|PATH", help="repeatable; first: all sections")
    parser.add_argument("--sections", default="", metavar="NAME,NAME", help="run sections with these prefixes")
    parser.add_argument("--peer", action="append", default=[], metavar="vllm=PYTHON", help="Python that has vLLM")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # at exit Python ends the running section
    options.model = options.model or (SMOKE_MODELS if options.smoke else MODELS)
    options.sections = [name for name in options.sections.split(",") if name]
    return Session(options).run()


if __name__ == "__main__":
    sys.exit(main())
