"""The GPU benchmark as a whole: what is run at which scale, in which order, and that nothing found is lost."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

import torch

from pipeline.bench.gpu.device import device_facts, find_device, memory_bytes
from pipeline.bench.gpu.figures import Failure, ModelFigures
from pipeline.bench.gpu.jobs import Limits, run_our_jobs
from pipeline.bench.gpu.kernels import kernel_times, linear_times, tile_times
from pipeline.bench.gpu.kernels.correctness import Check, Correctness, check_kernels
from pipeline.bench.gpu.kernels.engine_check import check_engine
from pipeline.bench.gpu.kernels.invariance import check_engine_invariance, check_invariance
from pipeline.bench.gpu.kernels.kernel_times import KernelCases, KernelTimes, kernel_cases
from pipeline.bench.gpu.kernels.linear_times import (
    DENSE_PATH,
    INT4_PATH,
    SERVED_PATH,
    LinearTimes,
    linear_cases,
    summed_up,
)
from pipeline.bench.gpu.kernels.tile_times import TileSizes, TileTime, TileTimes, tile_measurements
from pipeline.bench.gpu.peers import MODES, run_peers
from pipeline.bench.gpu.rates import Rates, measure_rates
from pipeline.bench.gpu.report import GpuBench
from pipeline.bench.gpu.request_sets import REQUEST_SETS, RequestSet
from pipeline.bench.gpu.stopwatch import Stopwatch
from pipeline.bench.roofline import find_set
from pipeline.bench.shapes import BenchModel, bench_model
from pipeline.errors import ConfigError, OutputError
from pipeline.kernels.select import default_dtype, select_kernels
from pipeline.model.config import DTYPES, read_config
from pipeline.roofline.step import DecoderSize, Reached, Weights

SECTIONS = ("correctness", "kernels", "linears", "jobs")
TILES = "tiles"  # a section that is run where it is asked for: it takes minutes and says what could be changed
CHECKED_MODELS = ("tiny-awq", "tiny")  # that the engine's tokens are checked on
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
    checked_each: int  # every so manyth of the checks
    checked_tokens: int  # of each completion


FULL = Scale(1, 1, 0.3, 2 << 30, (4096, 8192), kernel_times.FULL, linear_times.FULL_TOKENS, tile_times.FULL, 1, 32)
QUICK = Scale(8, 1, 0.1, 1 << 30, (8192,), kernel_times.QUICK, linear_times.QUICK_TOKENS, tile_times.QUICK, 1, 16)
SMOKE = Scale(256, 16, 0.0, 1 << 20, (64,), kernel_times.SMOKE, linear_times.SMOKE_TOKENS, tile_times.SMOKE, 7, 4)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What a run is to do, checked."""

    device: torch.device
    dtype: str
    sections: tuple[str, ...]
    sets: tuple[RequestSet, ...]
    rounds: int
    peers: tuple[tuple[str, str], ...]
    max_num_seqs: int | None
    folder: str | None
    scale: Scale


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
    asked = Asked(on, dtype, tuple(sections), smaller, rounds, tuple(peers), max_num_seqs, folder, scale)
    settings = {
        "scale": "smoke" if scale is SMOKE else "quick" if scale is QUICK else "full",
        "rounds": str(rounds),
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    told = tuple(each.to_text() for each in smaller)
    kept = _Kept(GpuBench(date, device_facts(on), tuple(sections), settings, told, on.type == "cuda"), out, say)
    kept.update()
    wanted = models if set(sections) - {"correctness"} else ()
    found = [bench_model(name, folder, say) for name in wanted]
    if "correctness" in sections:
        _check(kept, asked, say)
    stopwatch = Stopwatch(on, scale.budget_s)
    for name, model in zip(wanted, found):
        say(f"rates: {name}")
        with kept.section("rates", name):
            rated = _rated(model, name, asked, stopwatch)
            kept.model(rated)
            _measure(kept, rated, model, asked, stopwatch, say)
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
            raise OutputError(f"--out {self._path}: cannot be written ({error})") from None

    def model(self, figures: ModelFigures) -> None:
        """Put these figures in the place of the same model's earlier ones."""
        others = tuple(model for model in self.bench.models if model.model != figures.model)
        self.update(models=(*others, figures))

    @contextmanager
    def section(self, name: str, model: str) -> Iterator[None]:
        """Whatever is raised in it is told of in the result; what was found before stays."""
        try:
            yield
        except Exception as error:  # a kernel that does not run on this card must not cost what the others showed
            why = f"{type(error).__name__}: {str(error).strip()[:2000]}"
            self._say(f"{name}: {model} failed: {why}")
            self.update(failures=(*self.bench.failures, Failure(name, model, why)))


def _check(kept: _Kept, asked: Asked, say: Say) -> None:
    device, scale = asked.device, asked.scale
    dtypes = [torch.bfloat16, torch.float16] if device.type == "cuda" else [torch.float32]
    say("correctness: all kernels against the oracle")
    with kept.section("correctness", "all kernels"):
        checks: list[Check] = []
        for check in check_kernels(device, dtypes, scale.checked_each):
            checks.append(check)
            kept.update(correctness=Correctness(tuple(checks)))
        has_invariant = device.type == "cuda" or find_spec("numba") is not None
        say("correctness: batch-invariant kernels" + ("" if has_invariant else ": left out, on a CPU they need numba"))
        for check in check_invariance(device, dtypes, scale.checked_each) if has_invariant else ():
            checks.append(check)
            kept.update(correctness=Correctness(tuple(checks)))
        for name in CHECKED_MODELS:
            shape = bench_model(name, asked.folder, say).folder
            has_fp8 = read_config(shape).quantization is not None and "fp8" in select_kernels(device, dtypes[0]).rounded
            for dtype, activations in product(dtypes, ("auto", "fp8") if has_fp8 else ("auto",)):
                say(f"correctness: the engine with {name} in {dtype}, activations {activations}")
                checks.append(check_engine(shape, device, _named(dtype), scale.checked_tokens, say, activations))
                if activations == "auto" and has_invariant:
                    checks.append(check_engine_invariance(shape, device, _named(dtype), scale.checked_tokens, say))
                kept.update(correctness=Correctness(tuple(checks)))


def _rated(found: BenchModel, name: str, asked: Asked, stopwatch: Stopwatch) -> ModelFigures:
    """The device's own rates in the type that the model is run in."""
    wide = DTYPES.get(asked.dtype) or default_dtype(asked.device, read_config(found.folder).dtype)
    rates = measure_rates(stopwatch, wide, asked.scale.copy_bytes, asked.scale.gemm_sizes)
    return ModelFigures(name, found.about, _named(wide), rates)


def _measure(
    kept: _Kept, figures: ModelFigures, found: BenchModel, asked: Asked, stopwatch: Stopwatch, say: Say
) -> None:
    """The sections of one model, each kept as it ends."""
    name = figures.name
    config, scale, device, rates = read_config(found.folder), asked.scale, asked.device, figures.rates
    size, weights, dtype = config.size, config.weights_on_card(), DTYPES[figures.dtype]
    kernels = select_kernels(device, dtype)
    if "kernels" in asked.sections:
        say(f"kernels: {name}")
        for case in kernel_cases(size, kernels, dtype, stopwatch, rates, scale.kernels):
            with kept.section("kernels", name):
                before = () if figures.kernels is None else figures.kernels.times
                figures = replace(figures, kernels=KernelTimes((*before, case())))
                kept.model(figures)
    if "linears" in asked.sections:
        say(f"linears: {name}")
        for case in linear_cases(size, weights, kernels, dtype, stopwatch, scale.tokens):
            with kept.section("linears", name):
                before = () if figures.linears is None else figures.linears.times
                figures = replace(figures, linears=summed_up((*before, *case()), size, weights, rates))
                kept.model(figures)
    if TILES in asked.sections:
        say(f"tiles: {name}")
        for case in _tile_cases(asked, size, weights, dtype, stopwatch):
            with kept.section(TILES, name):
                before = () if figures.tiles is None else figures.tiles.times
                figures = replace(figures, tiles=TileTimes((*before, *case())))
                kept.model(figures)
        if figures.tiles is None:
            figures = replace(figures, tiles=TileTimes(left_out=_no_tiles(device)))
            kept.model(figures)
    if "jobs" in asked.sections:
        say(f"jobs: {name}")
        with kept.section("jobs", name):
            reached = reached_of(rates, figures.kernels, figures.linears)
            limits = Limits(size, weights, rates, reached, memory_bytes(device))
            figures = replace(figures, reached=reached)
            for jobs in run_our_jobs(
                found.folder, device, asked.dtype, asked.sets, asked.rounds, limits, asked.max_num_seqs, say
            ):
                figures = replace(figures, jobs=jobs)
                kept.model(figures)
            assert figures.jobs is not None
            for peer in run_peers(asked.peers, found.folder, asked.sets, asked.rounds, config, figures.jobs, say):
                figures = replace(figures, peers=(*figures.peers, peer))
                kept.model(figures)


def _tile_cases(
    asked: Asked, size: DecoderSize, weights: Weights, dtype: torch.dtype, stopwatch: Stopwatch
) -> Iterator[Callable[[], list[TileTime]]]:
    """None where Triton's kernels do not run."""
    if not _no_tiles(asked.device):
        from pipeline.bench.gpu.kernels.tile_cases import tile_cases

        sizes = asked.scale.tiles
        cases = tile_cases(size, weights, dtype, asked.device, sizes)
        yield from tile_measurements(cases, stopwatch, sizes.budget_s)


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


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
