"""Requests for benchmarks: sets of fixed lengths with new prompts in each round, or the demonstration job's rows.

Each request of a set has its own number of output tokens and ignores EOS, so every engine does the same work. Lengths
follow from a seed; the tokens also from the round, so that no round finds another's prompts in a prefix cache. Of a set
with a shared prefix, all prompts of a round begin alike.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.demo.reports import make_report
from pipeline.engine.engine import Engine
from pipeline.engine.params import Request, SamplingParams
from pipeline.errors import ConfigError, PipelineError
from pipeline.roofline.job_simulation import RequestTokens

SEED = 7
SIGMA = 0.5  # of the logarithm of lognormal lengths: the longest of 48 has about 3 times the median
REPORT_TOKENS = 96  # as in the demonstration job
FIRST_TOKEN = 16  # below are the control tokens of usual tokenizers


@dataclass(frozen=True)
class BenchRequest:
    """Exactly `max_tokens` tokens are wanted; unless `ignore_eos` is false, when EOS ends it before."""

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
    """Return each request's tokens, in their order; all are added at once.

    Raises PipelineError when a request fails, does not get its tokens, or is found in the prefix cache where it must
    not be.
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
            why = completion.error_message
            if why is None and requests[number].ignore_eos and len(tokens) != requests[number].max_tokens:
                why = f"{len(tokens)} of {requests[number].max_tokens} tokens"
            if why is not None:
                raise PipelineError(f"request {number} failed: {why}")
            if completion.num_cached_tokens and not shares_prefixes:
                raise PipelineError(f"request {number} was found in the prefix cache: not a fresh round")
            token_ids[number] = tokens
    return token_ids


@dataclass(frozen=True)
class Lengths:
    """From `low` to `high` tokens: uniform, or lognormal around `median` and cut off at both ends."""

    low: int
    high: int
    median: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ConfigError(f"{self.low}-{self.high} tokens: expected from 1 on, the larger number last")

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
    """`count` requests. `prompt` is what each has for itself, after the `shared_prefix` tokens that all have. seed: of
    the lengths; else the set's name gives it."""

    name: str
    count: int
    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0
    seed: tuple[int, ...] = ()

    def lengths(self) -> list[RequestTokens]:
        """Of each whole prompt and output; the same at every call."""
        rng = self._random()
        prompts = self.shared_prefix + self.prompt.sample(rng, self.count)
        return [RequestTokens(p, o) for p, o in zip(prompts.tolist(), self.output.sample(rng, self.count).tolist())]

    def round(self, name: str, vocab_size: int) -> list[BenchRequest]:
        """The requests of one round; another name has other prompts of the same lengths."""
        rng = self._random(name)
        shared = rng.integers(FIRST_TOKEN, vocab_size, self.shared_prefix).tolist()
        return [
            BenchRequest(shared + rng.integers(FIRST_TOKEN, vocab_size, n.prompt - len(shared)).tolist(), n.output)
            for n in self.lengths()
        ]

    def one(self, name: str, output_tokens: int, vocab_size: int) -> BenchRequest:
        """A request of median length that is in no round."""
        prompt = self.prompt.median or self.prompt.high
        return BenchRequest(self._random("one", name).integers(FIRST_TOKEN, vocab_size, prompt).tolist(), output_tokens)

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
        seed = self.seed or (SEED, zlib.crc32(self.name.encode()))
        return np.random.default_rng([*seed, *(zlib.crc32(name.encode()) for name in of)])


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
    """Ragged prompts around `prompt_tokens`, and uniform numbers of output tokens."""
    prompts = Lengths(min(4, prompt_tokens), 6 * prompt_tokens, prompt_tokens)
    return RequestSet("workload", requests, prompts, Lengths(*output_tokens), seed=(0, 1))


@dataclass(frozen=True)
class Reports:
    """Rows of the demonstration job, which begin with the same words and end by themselves; each round has others.

    `encode` is the tokenizer's. Only for the demonstration model: another would not end, or know the words.
    """

    count: int
    encode: Callable[[Sequence[str]], list[list[int]]]

    def round(self, name: str) -> list[BenchRequest]:
        """The rows of round `name`, a number."""
        first = int(name) * self.count
        texts = [make_report("job", index).prompt for index in range(first, first + self.count)]
        return [BenchRequest(tokens, REPORT_TOKENS, ignore_eos=False) for tokens in self.encode(texts)]

    def one(self, name: str, output_tokens: int) -> BenchRequest:
        """A single row that is in no round; `output_tokens` at most."""
        tokens = self.encode([make_report("job", 1_000_000 + int(name)).prompt])[0]
        return BenchRequest(tokens, output_tokens, ignore_eos=False)

    def to_text(self) -> str:
        return (
            f"{self.count} rows of the demonstration job a round, other ones each round; their shared first words "
            f"may be cached; greedy, until EOS or {REPORT_TOKENS} tokens"
        )
