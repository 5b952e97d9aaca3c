"""Times of what torch itself has for int4 linears, beside ours. That it cannot be had, or is off by more than its
format rounds, is no failure of ours: the reason is told, and there is no time."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pipeline.bench.gpu.kernels.checks import check
from pipeline.bench.gpu.kernels.inputs import random_int4
from pipeline.bench.gpu.kernels.kernel_times import sampled
from pipeline.bench.gpu.kernels.linear_times import LinearTime
from pipeline.bench.gpu.kernels.torch_kernels import TORCH_PATHS, torch_paths
from pipeline.bench.gpu.rates import Stopwatch
from pipeline.kernels.contract import Linear
from pipeline.kernels.reference import prepare_linear
from pipeline.roofline.cost_model import DecoderSize, Weights


class NoBaseline(Exception):
    """torch has no such kernel here, or it computes something else."""


def torch_cases(
    size: DecoderSize, weights: Weights, dtype: torch.dtype, stopwatch: Stopwatch, tokens: tuple[int, ...]
) -> Iterator[Callable[[], list[LinearTime]]]:
    """Each linear of a layer by each of torch's paths, measured when called. Nothing where there is no card, or the
    weights are not int4. A call raises NoBaseline."""
    if not weights.int4 or not stopwatch.on_gpu:
        return
    random = torch.Generator().manual_seed(1)
    for name, inputs, outputs in size.linears():
        weight = random_int4(outputs, inputs, weights.group_size, random)
        exact = partial(prepare_linear, weight, torch.float32, stopwatch.device)
        for path, prepare in torch_paths(weight, dtype, stopwatch.device).items():
            yield partial(_measured, name, path, inputs, prepare, exact, dtype, stopwatch, tokens)


def _measured(
    name: str,
    path: str,
    inputs: int,
    prepare: Callable[[], Linear],
    prepare_exact: Callable[[], Linear],
    dtype: torch.dtype,
    stopwatch: Stopwatch,
    tokens: tuple[int, ...],
) -> list[LinearTime]:
    try:
        linear, exact = prepare(), prepare_exact()
    except Exception as error:  # whatever torch refuses
        raise NoBaseline(f"{path}, {name}: {type(error).__name__}: {str(error)[:300]}") from None
    found: list[LinearTime] = []
    for count in tokens:
        x_TK = torch.randn(count, inputs, device=stopwatch.device).to(dtype)
        some = torch.from_numpy(sampled(count)).to(stopwatch.device)
        compare = partial(lambda x, rows: [(linear(x)[rows], exact(x[rows].float()))], x_TK, some)
        checked = check(path, f"{name}, {count:,} tokens", dtype, "torch", TORCH_PATHS[path], compare)
        if not checked.passed:
            raise NoBaseline(checked.to_text())
        found.append(LinearTime(name, path, count, stopwatch.seconds(partial(linear, x_TK))))
    return found
