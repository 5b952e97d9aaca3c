"""The fixed request sets of the GPU benchmark: lengths that do not change, prompts that are new in each round.

Each request has its own number of output tokens and ignores EOS, so every engine does the same work. Lengths follow
from a seed and the set's name; the tokens also from the round, so that no round finds another's prompts in a prefix
cache. Of the set with a shared prefix, all prompts of a round begin alike.
"""

import zlib
from dataclasses import dataclass, replace

import numpy as np

from pipeline.bench.workload import FIRST_TOKEN, BenchRequest
from pipeline.roofline.job import RequestTokens

SEED = 7
SIGMA = 0.5  # of the logarithm of lognormal lengths


@dataclass(frozen=True)
class Lengths:
    """From `low` to `high` tokens: evenly, or lognormal around `median` and cut off at both ends."""

    low: int
    high: int
    median: int | None = None

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.median is None:
            return rng.integers(self.low, self.high, count, endpoint=True)
        return rng.lognormal(np.log(self.median), SIGMA, count).round().astype(int).clip(self.low, self.high)

    def over(self, divisor: int) -> "Lengths":
        low, high = max(self.low // divisor, 1), max(self.high // divisor, 1)
        return Lengths(low, high, None if self.median is None else max(self.median // divisor, 1))

    def to_text(self) -> str:
        around = "" if self.median is None else f", around {self.median}"
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}{around}"


@dataclass(frozen=True)
class RequestSet:
    """`count` requests. `prompt` is what each has for itself, behind the `shared_prefix` tokens that all have."""

    name: str
    count: int
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0

    def lengths(self) -> list[RequestTokens]:
        """Of each whole prompt and output; the same at every call."""
        rng = self._random()
        prompts = self.shared_prefix + self.prompt.draw(rng, self.count)
        return [RequestTokens(p, o) for p, o in zip(prompts.tolist(), self.output.draw(rng, self.count).tolist())]

    def round(self, name: str, vocab_size: int) -> list[BenchRequest]:
        """The requests of one round; another name has other prompts of the same lengths."""
        rng = self._random(name)
        shared = rng.integers(FIRST_TOKEN, vocab_size, self.shared_prefix).tolist()
        return [
            BenchRequest(shared + rng.integers(FIRST_TOKEN, vocab_size, n.prompt - len(shared)).tolist(), n.output)
            for n in self.lengths()
        ]

    def smaller(self, count_by: int, tokens_by: int) -> "RequestSet":
        """The same kind of work with fewer and shorter requests; at least one of at least one token."""
        return replace(
            self,
            count=max(self.count // count_by, 1),
            prompt=self.prompt.over(tokens_by),
            output=self.output.over(tokens_by),
            shared_prefix=self.shared_prefix // tokens_by,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(n.prompt + n.output for n in self.lengths())

    def to_text(self) -> str:
        shared = f"{self.shared_prefix:,} shared and " if self.shared_prefix else ""
        lengths = self.lengths()
        return (
            f"{self.name}: {self.count:,} requests, {shared}{self.prompt.to_text()} tokens in, {self.output.to_text()} "
            f"out; {sum(n.prompt for n in lengths):,} in, {sum(n.output for n in lengths):,} out together"
        )

    def _random(self, *of: str) -> np.random.Generator:
        return np.random.default_rng([SEED, *(zlib.crc32(name.encode()) for name in (self.name, *of))])


REQUEST_SETS = {
    each.name: each
    for each in (
        RequestSet("summaries", 1024, Lengths(64, 4096, median=735), Lengths(32, 256)),
        RequestSet("mixed", 512, Lengths(100, 1024), Lengths(100, 1024)),
        RequestSet("generation", 1024, Lengths(32, 128), Lengths(256, 768)),
        RequestSet("shared", 1024, Lengths(32, 128), Lengths(32, 128), shared_prefix=2048),
        RequestSet("classification", 2048, Lengths(100, 1600, median=400), Lengths(1, 4)),
        RequestSet("single", 1, Lengths(512, 512), Lengths(256, 256)),
    )
}
