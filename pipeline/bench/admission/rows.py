"""The rows of simulated jobs: prompts, and how much each generates, by what such jobs look like.

Rows come in the order in which a job computes them: cut into units, longest first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.data.bucket import BYTES_PER_TOKEN, cut_units
from pipeline.errors import ConfigError

UNIT_TOKENS, UNIT_ROWS = 100_000, 512  # as a job cuts its units
VOCAB = 30_000
GROUP = 8  # rows that share the beginning of their prompts, in the job that has such


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row. max_tokens: what all may generate; shared: of the prompts, the same in `GROUP` rows."""

    prompts: np.ndarray
    outputs: np.ndarray
    max_tokens: int
    shared: int = 0


@dataclass(frozen=True)
class JobRow:
    prompt: np.ndarray  # int32
    output: int
    max_tokens: int


def _around(rng: np.random.Generator, count: int, median: float, sigma: float, low: int, high: int) -> np.ndarray:
    """Lognormal: `sigma` is the deviation of the logarithm."""
    return rng.lognormal(np.log(median), sigma, count).round().astype(int).clip(low, high)


def _summaries(rng: np.random.Generator, count: int) -> Lengths:
    """A summary has about 15% of its text's length."""
    prompts = _around(rng, count, 1000, 0.7, 64, 6000)
    outputs = (0.15 * prompts * rng.lognormal(0.0, 0.3, count)).round().astype(int).clip(8, 1024)
    return Lengths(prompts, outputs, 1024)


def _classification(rng: np.random.Generator, count: int) -> Lengths:
    return Lengths(_around(rng, count, 400, 0.5, 100, 1600), rng.integers(2, 9, count), 64)


def _generation(rng: np.random.Generator, count: int) -> Lengths:
    """Short prompts that say nothing of the length of the text."""
    return Lengths(rng.integers(32, 129, count), _around(rng, count, 250, 0.8, 16, 2048), 2048)


def _reasoning(rng: np.random.Generator, count: int) -> Lengths:
    """As generation, with more and rarer long ones: one in twenty has over four times the median."""
    return Lengths(rng.integers(64, 513, count), _around(rng, count, 600, 0.9, 32, 4096), 4096)


def _either(rng: np.random.Generator, count: int) -> Lengths:
    """Four in five rows are answered by a word, the others by a page."""
    is_short = rng.random(count) < 0.8
    outputs = np.where(is_short, rng.integers(2, 12, count), _around(rng, count, 800, 0.4, 64, 2048))
    return Lengths(rng.integers(64, 513, count), outputs, 2048)


def _mixed(rng: np.random.Generator, count: int) -> Lengths:
    """Several tasks in one job."""
    tasks = [task(rng, count) for task in (_summaries, _classification, _generation)]
    which = rng.integers(0, len(tasks), count)
    prompts, outputs = (np.choose(which, [getattr(task, kind) for task in tasks]) for kind in ("prompts", "outputs"))
    return Lengths(prompts, outputs, max(task.max_tokens for task in tasks))


def _shared(rng: np.random.Generator, count: int) -> Lengths:
    """Several questions about each of some documents."""
    return Lengths(1000 + rng.integers(16, 65, count), _around(rng, count, 150, 0.8, 8, 1024), 1024, shared=1000)


JOBS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "summaries": _summaries,
    "classification": _classification,
    "generation": _generation,
    "reasoning": _reasoning,
    "either": _either,
    "mixed": _mixed,
    "shared": _shared,
}


def job_rows(name: str, count: int, seed: int) -> list[JobRow]:
    """The same at every call. Raises ConfigError for a job that is not there."""
    if name not in JOBS:
        raise ConfigError(f"--job {name}: expected one of {', '.join(JOBS)}")
    rng = np.random.default_rng([seed, list(JOBS).index(name)])
    lengths = JOBS[name](rng, count)
    prompts = [rng.integers(0, VOCAB, tokens).astype(np.int32) for tokens in lengths.prompts.tolist()]
    for first in range(0, count if lengths.shared else 0, GROUP):
        for prompt in prompts[first + 1 : first + GROUP]:
            prompt[: lengths.shared] = prompts[first][: lengths.shared]
    assert prompts[0].itemsize == BYTES_PER_TOKEN
    units = cut_units(
        [prompt.tobytes() for prompt in prompts], np.full(count, lengths.max_tokens), UNIT_TOKENS, UNIT_ROWS
    )
    order = [row for unit in units for row in unit.tolist()]
    return [JobRow(prompts[row], int(lengths.outputs[row]), lengths.max_tokens) for row in order]
