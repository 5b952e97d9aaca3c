"""Which sections a session runs, in which order and with which limits.

A stage's tasks run side by side; stages follow one another. What is known first is worth most: a card may be taken back
at any moment. Nothing is timed while checks run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from pipeline.bench.gpu.subject import MACHINE
from pipeline.bench.gpu.task import Task
from pipeline.bench.gpu.variants import AS_SERVED, VARIANTS
from pipeline.errors import ConfigError

MODELS = ("llama3-8b-awq", "qwen3-0.6b")
SMOKE_MODELS = ("tiny-awq", "tiny")
SHARDS = 12
SETS = ("generation", "summaries", "shared", "single")  # of the first model, whole
SMALL_SETS = ("generation",)  # of the others
LARGE_VARIANTS = ("512 rows, 8,192 tokens", "fp8 cache")
SMALL_VARIANTS = ("64 rows", "64 rows, prompts by kernel", "admitted at once", "512 rows, 8,192 tokens")
Peers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Stage:
    """least_s: of the budget, that must be left for it to start. packs_cache: Triton's cache is packed after it."""

    tasks: tuple[Task, ...]
    least_s: float
    packs_cache: bool = False


@dataclass(frozen=True)
class Size:
    """Of a plan: the shards of checks that are run, of how many there are, and which tests of `tests/gpu` they take, by
    words in their names."""

    shards: int
    of: int
    bfloat16: str
    float16: str
    tests: str


CARD = Size(SHARDS, SHARDS, "bfloat16", "float16", "card, ")
SMOKE = Size(2, 24, "float32", "bfloat16", "errors_are_relative")


def main_plan(models: Sequence[str], peers: Peers, is_smoke: bool) -> list[Stage]:
    """models: the first is measured as a whole, the others' steps, one job and choices. Ten minutes on a card."""
    size, (large, *small) = SMOKE if is_smoke else CARD, models
    small_variants, large_variants = (SMALL_VARIANTS[:1], ()) if is_smoke else (SMALL_VARIANTS, LARGE_VARIANTS)
    writing = tuple(Task(f"checkpoint-{name}", "checkpoints", 150, {"model": name}) for name in models)
    stages = [
        Stage((Task(MACHINE, "machine", 40),), 5),
        Stage((*_checks("checks", size.bfloat16, models, size), *writing), 25, packs_cache=True),
        Stage((_steps(large),), 25),
        Stage((_jobs(large, SETS, AS_SERVED, 200),), 30),
        Stage((Task(f"linears-{large}", "kernels", 75, {"model": large, "what": "linears"}),), 10),
        Stage((Task(f"kernels-{large}", "kernels", 60, {"model": large, "what": "kernels"}),), 10),
    ]
    for name in small:
        stages.append(Stage((_steps(name),), 15))
        stages += [Stage((_jobs(name, SMALL_SETS, variant, 45),), 15) for variant in (AS_SERVED, *small_variants)]
    tiles = {"model": large, "kernels": ["worst"], "budget_s": 2.0 if is_smoke else 35.0}
    stages += [
        Stage((Task(f"tiles-{large}", "tiles", 60, tiles),), 15),
        Stage(_checks("checks", size.float16, models, size, "-float16"), 25),
        Stage(_checks("deterministic", size.bfloat16, models, size), 15),
        *(Stage((_jobs(large, SMALL_SETS, variant, 90),), 45) for variant in large_variants),
    ]
    if peers:
        about = {"model": large, "requests": list(SETS), "peers": [list(peer) for peer in peers]}
        about["of_task"] = _jobs(large, SETS, AS_SERVED, 0).name
        stages.append(Stage((Task(f"peers-{large}", "jobs", 240, about),), 60))
    return [replace(stage, least_s=0.0) for stage in stages] if is_smoke else stages


def follow_up_plan(models: Sequence[str], is_smoke: bool) -> list[Stage]:
    """The ten minutes after: on the machine that is still warm, with its checkpoints and compiled kernels."""
    large, budget_s = models[0], 2.0 if is_smoke else 55.0

    def under(tool: str, kernel: str) -> Stage:
        about = {"tool": tool, "model": large, "kernel": kernel}
        return Stage((Task(f"{tool}-{kernel}", "under_tool", 75, about),), 20)

    def tiles(*kernels: str) -> Stage:
        about = {"model": large, "kernels": list(kernels), "budget_s": budget_s}
        return Stage((Task(f"tiles-{'-'.join(kernels)}", "tiles", budget_s + 30, about),), 20, packs_cache=True)

    stages = [
        Stage((Task(MACHINE, "machine", 40),), 5),
        *(under("compute-sanitizer", kernel) for kernel in ("int4", "decode", "cascade")),
        *(under("ncu", kernel) for kernel in ("int4", "decode")),
        *(tiles(*kernels) for kernels in (("int4",), ("decode", "prefill"), ("sample", "fp8"))),
    ]
    return [replace(stage, least_s=0.0) for stage in stages] if is_smoke else stages


def only(stages: Sequence[Stage], sections: Sequence[str]) -> list[Stage]:
    """Those tasks whose section or name is named, and the first, whose rates others go by. Raises ConfigError."""
    known = {task.section for stage in stages for task in stage.tasks} | {t.name for s in stages for t in s.tasks}
    if unknown := [name for name in sections if name not in known]:
        raise ConfigError(f"--sections {unknown[0]}: expected some of {', '.join(sorted(known))}")
    wanted = (MACHINE, *sections)
    kept = [
        replace(stage, tasks=tuple(task for task in stage.tasks if task.section in wanted or task.name in wanted))
        for stage in stages
    ]
    return [stage for stage in kept if stage.tasks]


def installed_peers() -> Peers:
    """vLLM, where this environment has it."""
    return [("vllm", sys.executable)] if find_spec("vllm") is not None else []


def _checks(name: str, dtype: str, models: Sequence[str], size: Size, suffix: str = "") -> tuple[Task, ...]:
    is_deterministic = name == "deterministic"
    tests = f"{size.tests}{dtype}" if size is CARD else size.tests
    return tuple(
        Task(
            f"{name}{suffix}-{shard + 1}-of-{size.of}",
            "correctness",
            110,
            {
                "models": list(models),
                "dtype": dtype,
                "shard": shard,
                "shards": size.of,
                "tests": tests,
                "is_deterministic": is_deterministic,
            },
        )
        for shard in range(size.shards)
    )


def _steps(model: str) -> Task:
    return Task(f"steps-{model}", "steps", 150, {"model": model})


def _jobs(model: str, sets: Sequence[str], variant: str, limit_s: float) -> Task:
    """Named by the number of the variant."""
    number = list(VARIANTS).index(variant)
    about = {"model": model, "requests": list(sets), "variant": variant}
    return Task(f"jobs-{model}" + (f"-variant-{number}" if number else ""), "jobs", limit_s, about)
