"""What a session found of one model, put together from the results of its sections, and what predictions go by."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from pipeline.bench.engines.agreement import Agreement
from pipeline.bench.gpu.jobs import OurJobs
from pipeline.bench.gpu.kernels.crossover import Border
from pipeline.bench.gpu.kernels.kernel_times import KernelTimes
from pipeline.bench.gpu.kernels.linear_times import DENSE_PATH, INT4_PATH, SERVED_PATH, LinearTimes
from pipeline.bench.gpu.kernels.tile_times import TileTimes
from pipeline.bench.gpu.peers import PeerJob, PeerJobs
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.result import Found
from pipeline.bench.gpu.rows import rows_of
from pipeline.bench.gpu.steps.step_times import StepTime
from pipeline.bench.gpu.subject import MACHINE
from pipeline.bench.gpu.variants import AS_SERVED
from pipeline.roofline.cost_model import Reached


@dataclass(frozen=True)
class Failure:
    """A section that ended before it was done."""

    section: str
    model: str
    why: str


@dataclass(frozen=True)
class ModelFigures:
    """Everything of one model; None or empty what was not run, or failed. jobs and steps: of the engine as it is
    served. reached: shares that predictions go by."""

    name: str
    rates: Rates
    kernels: KernelTimes | None = None
    linears: LinearTimes | None = None
    borders: tuple[Border, ...] = ()
    tiles: TileTimes | None = None
    reached: Reached = Reached()  # noqa: RUF009 (frozen)
    jobs: OurJobs | None = None
    steps: tuple[StepTime, ...] = ()
    peers: tuple[PeerJobs, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "rates": asdict(self.rates), "reached": asdict(self.reached)}

    @property
    def has_kernels(self) -> bool:
        """Whether anything was measured that `reached` follows from."""
        return self.kernels is not None or self.linears is not None


def model_figures(results: Mapping[str, Found], model: str) -> ModelFigures | None:
    """Of `model`; None where the rates that all is held against were not measured."""
    if MACHINE not in results or "rates" not in results[MACHINE].figures:
        return None
    rates = Rates(**results[MACHINE].figures["rates"])
    found = ModelFigures(model, rates, reached=reached_by(results, model, rates))
    for figures in _of_model(results, model):
        if "kernels" in figures:
            found = replace(found, kernels=KernelTimes.from_json(figures["kernels"]))
        if "linears" in figures:
            met = rows_of(Border, figures.get("borders", ()))
            found = replace(found, linears=LinearTimes.from_json(figures["linears"]), borders=met)
        if "tiles" in figures:
            found = replace(found, tiles=TileTimes.from_json(figures["tiles"]))
        if "peers" in figures:
            found = replace(found, peers=(*found.peers, *map(_peer_of, figures["peers"])))
        if figures.get("variant") == AS_SERVED and "jobs" in figures:
            jobs, before = OurJobs.from_json(figures["jobs"]), found.jobs
            if before is not None:
                jobs = replace(jobs, jobs=(*before.jobs, *jobs.jobs), token_ids=before.token_ids | jobs.token_ids)
            found = replace(found, jobs=jobs)
        if figures.get("variant") == AS_SERVED and "steps" in figures:
            found = replace(found, steps=(*found.steps, *map(StepTime.from_json, figures["steps"])))
    return found


def reached_by(results: Mapping[str, Found], model: str, rates: Rates) -> Reached:
    """By what the results say so far."""
    kernels, linears = None, None
    for figures in _of_model(results, model):
        kernels = KernelTimes.from_json(figures["kernels"]) if "kernels" in figures else kernels
        linears = LinearTimes.from_json(figures["linears"]) if "linears" in figures else linears
    return reached_of(rates, kernels, linears)


def reached_of(rates: Rates, kernels: KernelTimes | None, linears: LinearTimes | None) -> Reached:
    """Shares of the measured rates that kernels reached, never above 1; 1 where nothing was measured."""

    def share(value: float) -> float:
        return min(value, 1.0)

    found = Reached()
    attention = [] if kernels is None else [time for time in kernels.times if time.kernel == "attention"]
    if decoding := [share(time.share) for time in attention if time.case.startswith("decoding")]:
        found = replace(found, kv=median(decoding))
    if prompts := [time.flops / time.seconds for time in attention if "prompt" in time.case]:
        found = replace(found, attention=share(median(prompts) / rates.gemm_flops_per_s))
    if linears is not None and {DENSE_PATH, SERVED_PATH} <= set(linears.paths):
        few, many = min(time.tokens for time in linears.times), max(time.tokens for time in linears.times)
        least_s = min(floor[few] for floor in linears.floors_s.values())
        rate = {path: linears.flops_per_token * many / linears.layer_s(path)[many] for path in linears.paths}
        found = replace(
            found,
            bandwidth=share(least_s / linears.layer_s(SERVED_PATH)[few]),
            gemm=share(rate[DENSE_PATH] / rates.gemm_flops_per_s),
            int4=share(rate.get(INT4_PATH, rate[DENSE_PATH]) / rates.gemm_flops_per_s),
        )
    return found


def _of_model(results: Mapping[str, Found], model: str) -> Iterable[dict[str, Any]]:
    return [found.figures for found in results.values() if found.figures.get("model") == model]


def _peer_of(told: dict[str, Any]) -> PeerJobs:
    jobs = tuple(
        PeerJob(job["requests"], tuple(job["wall_s"]), rows_of(Agreement, [job["agreement"]])[0])
        for job in told["jobs"]
    )
    return PeerJobs(told["name"], told["about"], jobs, told["failure"])
