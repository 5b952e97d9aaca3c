"""The GPU benchmark as a whole: what is run at which scale, in which order, and that nothing found is lost."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from pipeline.bench.gpu.device import device_facts, find_device, memory_bytes
from pipeline.bench.gpu.figures import Failure, ModelFigures
from pipeline.bench.gpu.jobs import Limits, run_our_jobs
from pipeline.bench.gpu.kernels import kernel_times, linear_times, tile_times
from pipeline.bench.gpu.kernels.checks import Check, Correctness
from pipeline.bench.gpu.kernels.kernel_times import KernelCases, KernelTimes, kernel_cases
from pipeline.bench.gpu.kernels.linear_times import (
    DENSE_PATH,
    INT4_PATH,
    SERVED_PATH,
    LinearTimes,
    linear_cases,
    summed_up,
)
from pipeline.bench.gpu.kernels.tile_times import TileSizes, TileTimes, tile_measurements
from pipeline.bench.gpu.peers import MODES, run_peers
from pipeline.bench.gpu.rates import Rates, Stopwatch, measure_rates
from pipeline.bench.gpu.report import GpuBench
from pipeline.bench.request_sets import REQUEST_SETS, RequestSet, find_set
from pipeline.bench.shapes import bench_model
from pipeline.errors import ConfigError, OutputError
from pipeline.kernels.select import default_dtype, select_kernels
from pipeline.model.config import DTYPES, ModelConfig, read_config
from pipeline.roofline.cost_model import DecoderSize, Reached, Weights

SECTIONS = ("correctness", "kernels", "linears", "jobs")
TILES = "tiles"  # a section that is run where it is asked for: it takes minutes and says what could be changed
MODELS = ("llama-8b-awq", "qwen3-0.6b")


@dataclass(frozen=True)
class Scale:
    """How much is run: whole on a card, quick in some five minutes, or just enough to see that it works."""

    requests_by: int
    tokens_by: int
    budget_s: float  # of one measurement
    copy_bytes: int
    gemm_sizes: tuple[int, ...]
    kernels: KernelCases
    tokens: tuple[int, ...]
    tiles: TileSizes


FULL = Scale(1, 1, 0.3, 2 << 30, (4096, 8192), kernel_times.FULL, linear_times.FULL_TOKENS, tile_times.FULL)
QUICK = Scale(8, 1, 0.1, 1 << 30, (8192,), kernel_times.QUICK, linear_times.QUICK_TOKENS, tile_times.QUICK)
SMOKE = Scale(256, 16, 0.0, 1 << 20, (64,), kernel_times.SMOKE, linear_times.SMOKE_TOKENS, tile_times.SMOKE)

Say = Callable[[str], None]


def bench_gpu(
    models: Sequence[str] = MODELS,
    device: str = "cuda",
    dtype: str = "auto",
    sections: Sequence[str] = SECTIONS,
    requests: Sequence[str] = (),
    rounds: int = 1,
    quick: bool = False,
    peers: Sequence[tuple[str, str]] = (),
    max_num_seqs: int | None = None,
    folder: str | None = None,
    out: str | None = None,
    say: Say = lambda text: None,
    command: str = "",
) -> GpuBench:
    """Run `sections` on `device`. out: a file that holds the JSON of what is known so far, from the first moment on.

    A section that fails is told of in the result and the next one runs. Raises ConfigError where the device is not
    there or an option makes no sense, OutputError where `out` cannot be written.
    """
    on = find_device(device, quick)
    scale = SMOKE if on.type == "cpu" else QUICK if quick else FULL
    if unknown := [name for name, _ in peers if name not in MODES]:
        raise ConfigError(f"--peer {unknown[0]}: expected one of {', '.join(MODES)} here")
    if unknown := [name for name in sections if name not in (*SECTIONS, TILES)]:
        raise ConfigError(f"--sections {unknown[0]}: expected some of {', '.join((*SECTIONS, TILES))}")
    sets = [find_set(name) for name in requests] or list(REQUEST_SETS.values())
    smaller = tuple(each.smaller(scale.requests_by, scale.tokens_by) for each in sets)
    of_scale = "smoke" if scale is SMOKE else "quick" if scale is QUICK else "full"
    settings = {"scale": of_scale, "rounds": str(rounds)}
    date, told = datetime.now(UTC).isoformat(timespec="seconds"), tuple(each.to_text() for each in smaller)
    known = GpuBench(date, device_facts(on), tuple(sections), settings, told, on.type == "cuda", command=command)
    kept = _Kept(known, out, say)
    kept.update()
    found = [(name, bench_model(name, folder, say)) for name in models]
    stopwatch = Stopwatch(on, scale.budget_s)
    for name, model in found:
        say(f"rates: {name}")
        with kept.section("rates", name):
            config = read_config(model.folder)
            wide = DTYPES.get(dtype) or default_dtype(on, config.dtype)
            rates = measure_rates(stopwatch, wide, scale.copy_bytes, scale.gemm_sizes)
            figures = ModelFigures(name, model.about, str(wide).removeprefix("torch."), rates)
            kept.model(figures)
            measuring = _Model(kept, figures, config.size, config.weights_on_card(), wide, scale, stopwatch)
            measuring.kernels_and_linears(say)
            if TILES in sections:
                measuring.tiles(say)
            if "jobs" in sections:
                measuring.jobs(model.folder, dtype, smaller, rounds, max_num_seqs, peers, config, say)
    kept.update(complete=True)
    return kept.bench


class _Kept:
    """What is known so far, and in its file."""

    def __init__(self, bench: GpuBench, out: str | None, say: Say) -> None:
        self.bench, self._say = bench, say
        self._path = None if out is None else Path(out).expanduser()

    def update(self, **changes: object) -> None:
        self.bench = replace(self.bench, **changes)  # type: ignore[arg-type]
        if self._path is None:
            return
        try:
            there = self._path.with_name(f".{self._path.name}.part")
            there.write_text(json.dumps(self.bench.to_json(), allow_nan=False))
            os.replace(there, self._path)
        except OSError as error:
            raise OutputError(f"--output {self._path}: cannot be written ({error})") from None

    def model(self, figures: ModelFigures) -> None:
        """Put these figures in the place of the same model's earlier ones."""
        others = tuple(model for model in self.bench.models if model.model != figures.model)
        self.update(models=(*others, figures))

    def checked(self, *checks: Check) -> None:
        before = () if self.bench.correctness is None else self.bench.correctness.checks
        self.update(correctness=Correctness((*before, *checks)))

    @contextmanager
    def section(self, name: str, model: str) -> Iterator[None]:
        """Whatever is raised in it is told of in the result; what was found before stays."""
        try:
            yield
        except Exception as error:  # a kernel that does not run on this card must not cost what the others showed
            why = f"{type(error).__name__}: {str(error).strip()[:2000]}"
            self._say(f"{name}: {model} failed: {why}")
            self.update(failures=(*self.bench.failures, Failure(name, model, why)))


@dataclass
class _Model:
    """The sections of one model; what each finds is kept at once."""

    kept: _Kept
    figures: ModelFigures
    size: DecoderSize
    weights: Weights
    dtype: torch.dtype
    scale: Scale
    stopwatch: Stopwatch

    def keep(self, **found: object) -> None:
        self.figures = replace(self.figures, **found)  # type: ignore[arg-type]
        self.kept.model(self.figures)

    def section(self, name: str) -> AbstractContextManager[None]:
        return self.kept.section(name, self.figures.name)

    def kernels_and_linears(self, say: Say) -> None:
        """Each is checked, and timed where that was asked for."""
        kernels, sections = select_kernels(self.stopwatch.device, self.dtype), self.kept.bench.sections
        of_model, rates = (kernels, self.dtype, self.stopwatch), self.figures.rates
        if {"kernels", "correctness"} & set(sections):
            say(f"kernels: {self.figures.name}")
            for case in kernel_cases(self.size, *of_model, rates, self.scale.kernels, "kernels" in sections):
                with self.section("kernels"):
                    check, time = case()
                    self.kept.checked(check)
                    if time is not None:
                        before = () if self.figures.kernels is None else self.figures.kernels.times
                        self.keep(kernels=KernelTimes((*before, time)))
        if {"linears", "correctness"} & set(sections):
            say(f"linears: {self.figures.name}")
            for case in linear_cases(self.size, self.weights, *of_model, self.scale.tokens, "linears" in sections):
                with self.section("linears"):
                    checks, times = zip(*case())
                    self.kept.checked(*checks)
                    before = () if self.figures.linears is None else self.figures.linears.times
                    if known := (*before, *(time for time in times if time is not None)):
                        self.keep(linears=summed_up(known, self.size, self.weights, rates))

    def tiles(self, say: Say) -> None:
        """Says why there are none where Triton's kernels do not run."""
        say(f"{TILES}: {self.figures.name}")
        if why := _no_tiles(self.stopwatch.device):
            self.keep(tiles=TileTimes(left_out=why))
            return
        from pipeline.bench.gpu.kernels.tile_cases import tile_cases

        sizes = self.scale.tiles
        cases = tile_cases(self.size, self.weights, self.dtype, self.stopwatch.device, sizes)
        for case in tile_measurements(cases, self.stopwatch, sizes.budget_s):
            with self.section(TILES):
                before = () if self.figures.tiles is None else self.figures.tiles.times
                self.keep(tiles=TileTimes((*before, *case())))

    def jobs(
        self,
        folder: Path,
        dtype: str,
        sets: Sequence[RequestSet],
        rounds: int,
        max_num_seqs: int | None,
        peers: Sequence[tuple[str, str]],
        config: ModelConfig,
        say: Say,
    ) -> None:
        figures, device = self.figures, self.stopwatch.device
        say(f"jobs: {figures.name}")
        with self.section("jobs"):
            reached = reached_of(figures.rates, figures.kernels, figures.linears)
            limits = Limits(self.size, self.weights, figures.rates, reached, memory_bytes(device))
            self.figures = replace(figures, reached=reached)
            for jobs in run_our_jobs(folder, device, dtype, sets, rounds, limits, max_num_seqs, say):
                self.keep(jobs=jobs)
            assert self.figures.jobs is not None
            for peer in run_peers(peers, folder, sets, rounds, config, self.figures.jobs, say):
                self.keep(peers=(*self.figures.peers, peer))


def _no_tiles(device: torch.device) -> str:
    """Why there is nothing to try them on; else empty."""
    if find_spec("triton") is None:
        return "triton is not installed"
    from pipeline.kernels.triton.kernel_set import is_interpreted

    if device.type == "cpu" and not is_interpreted():
        return "Triton has no device here; TRITON_INTERPRET=1 runs its kernels on a processor, very slowly"
    return ""


def reached_of(rates: Rates, kernels: KernelTimes | None, linears: LinearTimes | None) -> Reached:
    """Shares of the measured rates that this run's kernels reached, never above 1; 1 where nothing was measured."""

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
