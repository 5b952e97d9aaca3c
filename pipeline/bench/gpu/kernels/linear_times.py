"""The paths of a linear over numbers of tokens: which is fastest where, and whether the served one always takes it.

served: what the engine runs. 16 bit: torch's product (cuBLAS on a card) on weights in 16 bit, or in the type that is
measured. fixed tile: 16 bit by the product of `engine.deterministic`. Of int4 weights also each path alone, and that
with activations in fp8 (`kernels/activations/fp8.py`), which computes something else and is served where it is asked
for. What torch itself has for such weights stands beside (`torch_times.py`). Summed over a layer's linears.

Suffixes as in `kernels/contract.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pipeline.bench.gpu.kernels.checks import TOLERANCES, Check, check
from pipeline.bench.gpu.kernels.inputs import random_int4
from pipeline.bench.gpu.kernels.kernel_times import sampled
from pipeline.bench.gpu.kernels.torch_kernels import TORCH_PATHS
from pipeline.bench.gpu.rates import Rates, Stopwatch
from pipeline.bench.gpu.rows import rows_of
from pipeline.bench.measure import table
from pipeline.kernels.contract import Kernels, Linear, RoundedLinears
from pipeline.kernels.reference import prepare_linear, reference_kernels
from pipeline.roofline.cost_model import DENSE_BYTES, DecoderSize, Weights
from pipeline.weights.packed import DenseWeight, GroupIntWeight, LinearWeight

FULL_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
SMOKE_TOKENS = (1, 32)
DENSE_PATH, FIXED_PATH, INT4_PATH, FP8_PATH, SERVED_PATH = "16 bit", "fixed tile", "int4 fused", "fp8", "served"
CACHED_PATH, SCRATCH_PATH = "cached", "scratch"  # of int4 weights: their 16-bit form kept, or made in each call
ALLOWED_BEHIND = 1.05  # of the better path, that the served one may take


@dataclass(frozen=True)
class LinearTime:
    """One linear by one path at a number of tokens."""

    linear: str
    path: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class LinearTimes:
    """floors_s: path -> seconds of a layer's linears by tokens at the measured rates."""

    times: tuple[LinearTime, ...]
    flops_per_token: float
    floors_s: dict[str, dict[int, float]]

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "LinearTimes":
        floors_s = {path: {int(n): s for n, s in floor.items()} for path, floor in told["floors_s"].items()}
        return cls(rows_of(LinearTime, told["times"]), told["flops_per_token"], floors_s)

    def layer_s(self, path: str) -> dict[int, float]:
        """Tokens -> seconds of all linears of a layer."""
        summed: dict[int, float] = {}
        for time in self.times:
            if time.path == path:
                summed[time.tokens] = summed.get(time.tokens, 0.0) + time.seconds
        return summed

    def by_linear(self, path: str) -> dict[str, dict[int, float]]:
        """Linear -> tokens -> seconds."""
        found: dict[str, dict[int, float]] = {}
        for time in self.times:
            if time.path == path:
                found.setdefault(time.linear, {})[time.tokens] = time.seconds
        return found

    @property
    def paths(self) -> list[str]:
        """Those that were measured on all linears at all numbers of tokens: others cannot be summed."""
        linears, tokens = {time.linear for time in self.times}, {time.tokens for time in self.times}
        names = dict.fromkeys(time.path for time in self.times)
        return [p for p in names if sum(t.path == p for t in self.times) == len(linears) * len(tokens)]

    @property
    def crossovers(self) -> dict[str, int | None]:
        """Of each other path, the fewest tokens from which 16 bit is faster, as far as was measured."""
        if DENSE_PATH not in self.paths:
            return {}
        dense = self.layer_s(DENSE_PATH)
        found: dict[str, int | None] = {}
        for path in self.paths:
            if path not in (DENSE_PATH, SERVED_PATH, *TORCH_PATHS):
                own = self.layer_s(path)
                slower = [tokens for tokens in own if own[tokens] > dense[tokens]]
                ever_after = [t for t in slower if all(other in slower for other in own if other > t)]
                found[path] = min(ever_after, default=None)
        return found

    @property
    def behind(self) -> dict[int, float]:
        """Tokens -> how many times as long the served path takes as the fastest of all others of the same result."""
        others = [self.layer_s(path) for path in self.paths if path not in (SERVED_PATH, FP8_PATH, *TORCH_PATHS)]
        if SERVED_PATH not in self.paths or not others:
            return {}
        served = self.layer_s(SERVED_PATH)
        return {tokens: served[tokens] / min(other[tokens] for other in others) for tokens in served}

    def to_json(self) -> dict[str, Any]:
        rows = [vars(time) for time in self.times]
        return {
            "times": rows,
            "flops_per_token": self.flops_per_token,
            "floors_s": self.floors_s,
            "crossovers": self.crossovers,
            "behind": self.behind,
        }

    def to_text(self) -> str:
        paths, floor = self.paths, self.floors_s
        lines = [
            "Linears of a layer together, microseconds by path; floor: of the path with the fewest bytes, at the rates "
            "above; TFLOP/s: of the fastest; behind: served by the best of the others but fp8, which rounds "
            "activations, and torch's own, which are not ours to serve.",
        ]
        seconds = {path: self.layer_s(path) for path in paths}
        behind = self.behind
        rows = []
        for tokens in floor["dense"] if paths else ():
            least, best = (min(of[tokens] for of in several) for several in (floor.values(), seconds.values()))
            own = [seconds[path][tokens] * 1e6 for path in paths]
            rate = self.flops_per_token * tokens / best / 1e12
            rows.append((tokens, *own, least * 1e6, rate, behind.get(tokens)))
        of_paths = "".join(f" | {path} >12,.1f" for path in paths)
        lines += table(f"tokens >7,{of_paths} | floor >9,.1f | TFLOP/s >8,.2f | behind >7.2f", rows)
        for path, tokens in self.crossovers.items():
            where = "at no number measured" if tokens is None else f"from {tokens:,} tokens on"
            lines.append(f"16 bit is faster than {path} {where}.")
        slow = [tokens for tokens, times in behind.items() if times > ALLOWED_BEHIND]
        if behind:
            lines.append(
                f"Served is more than {ALLOWED_BEHIND - 1:.0%} behind the best path at "
                + (", ".join(f"{tokens:,}" for tokens in slow) + " tokens." if slow else "no number of tokens.")
            )
        return "\n".join(lines)


def linear_cases(
    size: DecoderSize,
    weights: Weights,
    kernels: Kernels,
    dtype: torch.dtype,
    stopwatch: Stopwatch,
    tokens: tuple[int, ...],
    is_timed: bool,
) -> Iterator[Callable[[], list[tuple[Check, LinearTime | None]]]]:
    """Each linear of a layer by each path that `weights` has on this device; checked and timed when called, at each
    number of tokens. What is wrong has no time, as has everything without `is_timed`."""
    random, device = torch.Generator().manual_seed(1), stopwatch.device

    def measured(
        name: str, path: str, prepare: Callable[[], Linear], prepare_exact: Callable[[], Linear]
    ) -> list[tuple[Check, LinearTime | None]]:
        linear, exact, found = prepare(), prepare_exact(), []
        inputs = next(each for each in size.linears() if each[0] == name)[1]
        for count in tokens:
            x_TK = torch.randn(count, inputs, device=device).to(dtype)
            some = torch.from_numpy(sampled(count)).to(device)
            compare = partial(lambda x, rows: [(linear(x)[rows], exact(x[rows].float()))], x_TK, some)
            about = f"{name} by {path}, {count:,} tokens"
            checked = check("linear", about, dtype, kernels.served_by["linear"], TOLERANCES[dtype], compare)
            is_right = is_timed and checked.passed
            time = LinearTime(name, path, count, stopwatch.seconds(partial(linear, x_TK))) if is_right else None
            found.append((checked, time))
        return found

    for name, inputs, outputs in size.linears():
        weight = random_int4(outputs, inputs, weights.group_size, random)
        for path, (prepare, exact) in _paths(weight, weights.int4, kernels, dtype, device).items():
            yield partial(measured, name, path, prepare, exact)


def summed_up(times: Sequence[LinearTime], size: DecoderSize, weights: Weights, rates: Rates) -> LinearTimes:
    """With the floor of each kind of weights."""
    parameters = size.linear_parameters / size.layers
    kinds = {"dense": DENSE_BYTES} | ({"int4": weights.packed_bytes} if weights.int4 else {})
    tokens = sorted({time.tokens for time in times})
    floors = {
        kind: {count: rates.floor_s(each * parameters, 2.0 * parameters * count) for count in tokens}
        for kind, each in kinds.items()
    }
    return LinearTimes(tuple(times), 2.0 * parameters, floors)


def _paths(
    weight: GroupIntWeight, int4: bool, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[Callable[[], Linear], Callable[[], Linear]]]:
    """Path -> what packs the weight for it, and the reference in float32."""
    served = weight if int4 else DenseWeight(weight.dequantize(dtype))
    alone: dict[str, Callable[[], Linear]] = {DENSE_PATH: lambda: prepare_linear(served, dtype, device)}
    if device.type == "cuda":
        alone[FIXED_PATH] = lambda: fixed_path(served, dtype, device)
        alone |= int4_paths(weight, dtype, device) if int4 else {}
    exact = partial(prepare_linear, served, torch.float32, device)
    found = {path: (prepare, exact) for path, prepare in alone.items()}
    if int4 and "fp8" in kernels.rounded:
        rounded = reference_kernels(torch.float32, device).rounded["fp8"]
        found[FP8_PATH] = partial(_fp8_linear, kernels.rounded["fp8"], weight), partial(_fp8_linear, rounded, weight)
    return found | {SERVED_PATH: (partial(kernels.prepare_linear, served), exact)}


def _fp8_linear(fp8: RoundedLinears, weight: GroupIntWeight) -> Linear:
    linear = fp8.prepare(weight)
    assert linear is not None, "groups of 32, 64 or multiples of 128"
    return linear


def fixed_path(weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> Linear:
    """The product of `engine.deterministic`, on a card."""
    from pipeline.kernels.triton.batch_invariant import prepare_linear

    return prepare_linear(weight, dtype, device)


def int4_paths(weight: GroupIntWeight, dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Linear]]:
    """The ways of an int4 weight on a card, each for any number of tokens."""
    from pipeline.kernels.triton.linear.dispatch import Scratch, TwoPathLinear

    return {
        INT4_PATH: lambda: TwoPathLinear(weight, dtype, device).fused,
        CACHED_PATH: lambda: TwoPathLinear(weight, dtype, device).dense,
        SCRATCH_PATH: lambda: TwoPathLinear(weight, dtype, device, Scratch(dtype, device)).dense,
    }
