"""Requests for benchmarks: sets of fixed lengths with new prompts in each round, or the demonstration job's rows.

Each request of a set has its own number of output tokens and ignores EOS, so every engine does the same work. A seed
determines the lengths. The seed and the round determine the tokens, so that no round finds another round's prompts in
a prefix cache. If a set has a shared prefix, all prompts of a round begin with the same tokens.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.demo.reports import make_report
from pipeline.engine.engine import Engine
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError, PipelineError
from pipeline.roofline.job_simulation import RequestTokens

SEED = 7
SIGMA = 0.5  # standard deviation of the lengths' logarithm: the longest of 48 is about 3 times the median
REPORT_TOKENS = 96  # as in the demonstration job
FIRST_TOKEN = 16  # usual tokenizers have control tokens below


@dataclass(frozen=True)
class BenchRequest:
    """Request for exactly `max_tokens` tokens, or up to `max_tokens` where `ignore_eos` is false."""

    prompt_token_ids: list[int]
    max_tokens: int
    ignore_eos: bool = True

    def to_request(self, row_id: object) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)
        return Request(row_id, self.prompt_token_ids, params)


def run_requests(
    engine: Engine,
    requests: Sequence[BenchRequest],
    shares_prefixes: bool,
    after_step: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Add all requests at once, step the engine until they finish, and return their tokens in order.

    Raises PipelineError when a request fails, ends with fewer tokens than it requires, or hits the prefix cache
    although `shares_prefixes` is false.
    """
    token_ids: list[list[int]] = [[] for _ in requests]
    for number, request in enumerate(requests):
        engine.add(request.to_request(number))
    while engine.has_unfinished:
        completions = engine.step()
        after_step()
        for completion in completions:
            number, tokens = completion.row_id, completion.token_ids
            assert isinstance(number, int)
            failure = completion.error_message
            if failure is None and requests[number].ignore_eos and len(tokens) != requests[number].max_tokens:
                failure = f"{len(tokens)} of {requests[number].max_tokens} tokens"
            if failure is not None:
                raise PipelineError(f"request {number} failed: {failure}")
            if completion.num_cached_tokens and not shares_prefixes:
                raise PipelineError(f"request {number} hit the prefix cache: not a fresh round")
            token_ids[number] = tokens
    return token_ids


@dataclass(frozen=True)
class Lengths:
    """Distribution of lengths from `low` to `high` tokens: uniform, or lognormal around `median` and clipped."""

    low: int
    high: int
    median: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"{self.low}-{self.high} tokens: expected LOW-HIGH with 1 <= LOW <= HIGH")

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
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
    """Set of `count` requests.

    prompt: lengths after the `shared_prefix` tokens that all prompts share. seed: of lengths and tokens; derived from
    the set's name if empty.
    """

    name: str
    count: int
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0
    seed: tuple[int, ...] = ()

    def lengths(self) -> list[RequestTokens]:
        """Return the lengths of each prompt, shared prefix included, and output. Every call returns the same."""
        rng = self._random()
        prompts = self.shared_prefix + self.prompt.sample(rng, self.count)
        return [RequestTokens(p, o) for p, o in zip(prompts.tolist(), self.output.sample(rng, self.count).tolist())]

    def round(self, name: str, vocab_size: int) -> list[BenchRequest]:
        """Return the requests of one round. Other names give other prompts of the same lengths."""
        rng = self._random(name)
        shared = rng.integers(FIRST_TOKEN, vocab_size, self.shared_prefix).tolist()
        return [
            BenchRequest(shared + rng.integers(FIRST_TOKEN, vocab_size, n.prompt - len(shared)).tolist(), n.output)
            for n in self.lengths()
        ]

    def one(self, name: str, output_tokens: int, vocab_size: int) -> BenchRequest:
        """Return a request of median length that is in no round."""
        prompt = self.prompt.median or self.prompt.high
        return BenchRequest(self._random("one", name).integers(FIRST_TOKEN, vocab_size, prompt).tolist(), output_tokens)

    def smaller(self, count_by: int, tokens_by: int) -> "RequestSet":
        """Return a set with fewer and shorter requests: at least one, of at least one token."""
        return replace(
            self,
            count=max(self.count // count_by, 1),
            prompt=self.prompt.over(tokens_by),
            output=self.output.over(tokens_by),
            shared_prefix=self.shared_prefix // tokens_by,
        )

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, prompt and output together."""
        return max(n.prompt + n.output for n in self.lengths())

    def to_text(self) -> str:
        shared = f"{self.shared_prefix:,} shared and " if self.shared_prefix else ""
        lengths = self.lengths()
        return (
            f"{self.name}: {self.count:,} requests, {shared}{self.prompt.to_text()} prompt tokens, "
            f"{self.output.to_text()} output tokens; "
            f"{sum(n.prompt for n in lengths):,} in, {sum(n.output for n in lengths):,} out in total"
        )

    def _random(self, *names: str) -> np.random.Generator:
        seed = self.seed or (SEED, zlib.crc32(self.name.encode()))
        return np.random.default_rng([*seed, *(zlib.crc32(name.encode()) for name in names)])


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


def find_set(name: str) -> RequestSet:
    if name not in REQUEST_SETS:
        raise ConfigError(f"--requests {name}: expected one of {', '.join(REQUEST_SETS)}")
    return REQUEST_SETS[name]


def workload(requests: int, prompt_tokens: int, output_tokens: tuple[int, int]) -> RequestSet:
    """Return a set of ragged prompts around `prompt_tokens` tokens, with uniform numbers of output tokens."""
    prompts = Lengths(min(4, prompt_tokens), 6 * prompt_tokens, prompt_tokens)
    return RequestSet("workload", requests, prompts, Lengths(*output_tokens), seed=(0, 1))


@dataclass(frozen=True)
class Reports:
    """Rows of the demonstration job, which begin with the same words and stop at EOS. Each round has other rows.

    encode: the tokenizer's method. Only the demonstration model knows the words and stops.
    """

    count: int
    encode: Callable[[Sequence[str]], list[list[int]]]

    def round(self, name: str) -> list[BenchRequest]:
        """Return the rows of a round. `name` is the round's number."""
        first = int(name) * self.count
        texts = [make_report("job", index).prompt for index in range(first, first + self.count)]
        return [BenchRequest(tokens, REPORT_TOKENS, ignore_eos=False) for tokens in self.encode(texts)]

    def one(self, name: str, output_tokens: int) -> BenchRequest:
        """Return a row that is in no round, with up to `output_tokens` tokens."""
        tokens = self.encode([make_report("job", 1_000_000 + int(name)).prompt])[0]
        return BenchRequest(tokens, output_tokens, ignore_eos=False)

    def to_text(self) -> str:
        return (
            f"{self.count} rows of the demonstration job, other rows in each round; their shared first words "
            f"may be cached; greedy, until EOS or {REPORT_TOKENS} tokens"
        )
