"""Whole jobs: the fixed request sets through the engine, against the card's limits and the cost model's prediction.

All requests of a set are there from the beginning, as in a job. Each round has new prompts of the same lengths.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.rows import rows_of
from pipeline.bench.gpu.variants import Variant
from pipeline.bench.measure import table
from pipeline.bench.request_sets import BenchRequest, RequestSet, run_requests
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig
from pipeline.engine.startup.memory import release_cached_memory
from pipeline.engine.stats import EngineStats
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Reached, Weights
from pipeline.roofline.job_simulation import (
    Batching,
    JobSeconds,
    Moment,
    job_bytes,
    job_flops,
    simulate_job,
    tail_seconds,
)


@dataclass(frozen=True)
class Round:
    """One set, once. tokens: of each request, in their order."""

    wall_s: float
    token_ids: list[list[int]]
    moments: list[Moment]
    counted: EngineStats  # what the engine's totals grew by


@dataclass(frozen=True)
class OurJob:
    """A request set through this engine; times of each round, the rest of the last.

    bound_s: nothing that keeps to the measured rates is faster. predicted_s: by the shares of them that this run's
    kernels reached. mfu, mbu: the job's products and bytes over its time, by the measured rates.
    """

    requests: str
    wall_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_steps: int
    num_preemptions: int
    num_out_of_memory: int
    sequences: float
    kv_used: float
    tail_s: float
    mfu: float
    mbu: float
    bound_s: float
    predicted_s: float
    predicted_tail_s: float


@dataclass(frozen=True)
class OurJobs:
    """token_ids: request set -> those of the last round, to compare with others'."""

    settings: dict[str, str | int]
    jobs: tuple[OurJob, ...]
    token_ids: dict[str, list[list[int]]]

    def to_json(self) -> dict[str, Any]:
        return {"settings": self.settings, "jobs": [asdict(job) for job in self.jobs], "token_ids": self.token_ids}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "OurJobs":
        return cls(told["settings"], rows_of(OurJob, told["jobs"]), told["token_ids"])

    def to_text(self) -> str:
        lines = [
            "Whole jobs through the engine. bound and predicted: seconds by the cost model, at the measured rates and "
            "at the shares of them that the kernels reached, as far as the session knew them by then; MFU, MBU: of the "
            "measured rates.",
            ", ".join(f"{key} {value}" for key, value in self.settings.items() if not key.startswith("kernel.")),
        ]
        rows = []
        for job in self.jobs:
            wall_s, tokens = median(job.wall_s), job.prompt_tokens - job.cached_tokens + job.output_tokens
            rates = job.output_tokens / wall_s, tokens / wall_s, job.mfu, job.mbu, job.tail_s
            counts = job.num_steps, job.sequences, job.kv_used, job.cached_tokens, job.num_preemptions
            rows.append((job.requests, wall_s, job.predicted_s, job.bound_s, *rates, *counts))
        seconds = "requests <15 | seconds >8.2f | predicted >9.2f | bound >8.2f"
        rates = "out/s >8,.0f | all/s >9,.0f | MFU >5.0% | MBU >5.0% | tail s >7.2f"
        counts = "steps >6, | at once >7.0f | KV >4.0% | cached >9, | preempted >9,"
        return "\n".join([*lines, *table(f"{seconds} | {rates} | {counts}", rows)])


@dataclass(frozen=True)
class Limits:
    """What a job is held against: the model's sizes, the measured rates, and the shares of them that kernels reach."""

    size: DecoderSize
    weights: Weights
    rates: Rates
    reached: Reached
    memory_bytes: float

    def ceilings(self, reached: Reached) -> Ceilings:
        return Ceilings(
            "this device", self.rates.copy_bytes_per_s, self.rates.gemm_flops_per_s, self.memory_bytes, reached
        )


def run_our_jobs(
    folder: Path,
    device: torch.device,
    dtype: str,
    sets: Sequence[RequestSet],
    rounds: int,
    limits: Limits,
    variant: Variant,
    say: Callable[[str], None],
) -> Iterator[OurJobs]:
    """Every set in `rounds` rounds through one engine; after each, all there is so far. The engine is gone afterwards,
    its memory too.

    Raises PipelineError when a request fails or comes short.
    """
    longest = max(each.longest for each in sets)
    options = EngineConfig(str(folder), device=str(device), dtype=dtype, max_model_len=longest, **variant.options)
    jobs: list[OurJob] = []
    token_ids: dict[str, list[list[int]]] = {}
    _release()  # what earlier measurements left with the allocator would be missing in the KV cache
    with Engine(options, say) as engine:
        engine.warm_up()
        variant.prepare(engine)
        warm_up(engine, sets)
        for each in sets:
            ran: list[Round] = []
            for number in range(1, rounds + 1):
                say(f"{each.name}, round {number} of {rounds}: this engine")
                ran.append(run_round(engine, each.round(str(number), engine.runner.vocab_size)))
            jobs.append(_job(each, ran, engine, limits))
            token_ids[each.name] = ran[-1].token_ids
            yield OurJobs(dict(engine.resolved), tuple(jobs), token_ids)
    _release()


def _release() -> None:
    gc.collect()
    release_cached_memory()


def warm_up(engine: Engine, sets: Sequence[RequestSet]) -> None:
    """A few requests of each set, so that no kernel is compiled in a round that counts."""
    for each in sets:
        run_round(engine, each.smaller(64, 1).round("warm-up", engine.runner.vocab_size))


def run_round(engine: Engine, requests: Sequence[BenchRequest]) -> Round:
    """Raises PipelineError when a request fails or does not get its tokens."""
    moments: list[Moment] = []
    before, batch_sum, start = replace(engine.stats), engine.stats.batch_sum, time.perf_counter()

    def note(step_s: float) -> None:
        nonlocal batch_sum
        batch_sum, sequences = engine.stats.batch_sum, engine.stats.batch_sum - batch_sum
        moments.append(Moment(time.perf_counter() - start, engine.num_unfinished, sequences))

    token_ids = run_requests(engine, requests, True, note)
    return Round(moments[-1].at_s, token_ids, moments, engine.stats.since(before))


def _job(work: RequestSet, ran: Sequence[Round], engine: Engine, limits: Limits) -> OurJob:
    last, lengths, size, weights, rates = ran[-1], work.lengths(), limits.size, limits.weights, limits.rates
    steps, cached = last.counted.num_steps, last.counted.cached_tokens
    read = job_bytes(lengths, size, weights, steps, shared_prefix=work.shared_prefix)
    bound, predicted = (predict(work, engine.resolved, limits, reached) for reached in (Reached(), limits.reached))
    return OurJob(
        requests=work.name,
        wall_s=tuple(each.wall_s for each in ran),
        prompt_tokens=sum(n.prompt for n in lengths),
        cached_tokens=cached,
        output_tokens=sum(n.output for n in lengths),
        num_steps=steps,
        num_preemptions=last.counted.num_preemptions,
        num_out_of_memory=last.counted.num_out_of_memory,
        sequences=last.counted.batch_sum / steps,
        kv_used=last.counted.kv_used_ppm_sum / steps / 1e6,
        tail_s=tail_seconds(last.moments),
        mfu=job_flops(lengths, size, cached) / last.wall_s / rates.gemm_flops_per_s,
        mbu=read / last.wall_s / rates.copy_bytes_per_s,
        bound_s=bound.wall_s,
        predicted_s=predicted.wall_s,
        predicted_tail_s=predicted.tail_s,
    )


def predict(work: RequestSet, settings: Mapping[str, str | int], limits: Limits, reached: Reached) -> JobSeconds:
    """By the cost model with the engine's own bounds of a step and of the KV cache. Where kernels are at their limit,
    every linear takes its faster path; else the one that the engine takes."""
    resolved = {name: int(value) for name, value in settings.items() if isinstance(value, int)}
    batching = Batching(
        resolved["max_num_seqs"],
        resolved["max_num_batched_tokens"],
        resolved["num_kv_blocks"] * resolved["block_size"],
        resolved["block_size"],
    )
    cached = "scratch" not in str(settings["kernel.linear"])
    borders = crossover_of(torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0))
    fused_tokens = None if reached == Reached() else borders.cached if cached else borders.scratch
    weights = replace(limits.weights, cached=cached, fused_tokens=fused_tokens)
    return simulate_job(work.lengths(), limits.size, weights, limits.ceilings(reached), batching, work.shared_prefix)
