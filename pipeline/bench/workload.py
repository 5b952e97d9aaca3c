"""Requests for benchmarks, new prompts every round: random tokens in ragged lengths, or the demonstration job's rows.

Random ones: lengths are drawn once from a fixed seed and every round has the same, so rounds can be compared; the
tokens of the prompts are drawn anew for each round, so nothing computed before can be found in a prefix cache.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.demo.reports import make_report
from pipeline.engine.params import Request, SamplingParams
from pipeline.errors import ConfigError

PROMPT_SIGMA = 0.5  # of the lengths' logarithm: the longest of 48 has about 3 times the median
MIN_PROMPT, MAX_PROMPT_FACTOR = 4, 6
REPORT_TOKENS = 96  # as in the demonstration job
FIRST_TOKEN = 16  # below lie the control tokens of usual tokenizers


@dataclass(frozen=True)
class BenchRequest:
    """Exactly `max_tokens` tokens are wanted; unless `ignore_eos` is false, when EOS ends it before."""

    prompt_token_ids: list[int]
    max_tokens: int
    ignore_eos: bool = True

    def to_request(self, row_id: object) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)
        return Request(row_id, self.prompt_token_ids, params)


@dataclass(frozen=True)
class Workload:
    """`requests` prompts of lognormal length around `prompt_tokens` (their median), each with a number of output
    tokens drawn evenly from `output_low` to `output_high`. Greedy."""

    requests: int
    prompt_tokens: int
    output_low: int
    output_high: int
    vocab_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or self.prompt_tokens < 1 or not 1 <= self.output_low <= self.output_high:
            raise ConfigError(f"{self}: expected a request at least, prompts, and outputs from 1 token on")
        if self.vocab_size <= FIRST_TOKEN:
            raise ConfigError(f"a vocabulary of {self.vocab_size}: expected more than {FIRST_TOKEN} tokens")

    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of each request."""
        rng = np.random.default_rng([self.seed, 1])
        prompts = rng.lognormal(np.log(self.prompt_tokens), PROMPT_SIGMA, self.requests).round().astype(int)
        prompts = prompts.clip(min(MIN_PROMPT, self.prompt_tokens), self.prompt_tokens * MAX_PROMPT_FACTOR)
        outputs = rng.integers(self.output_low, self.output_high, self.requests, endpoint=True)
        return list(zip(prompts.tolist(), outputs.tolist()))

    def round(self, name: str) -> list[BenchRequest]:
        """The requests of one round; another name has other prompts of the same lengths."""
        rng = np.random.default_rng([self.seed, 2, zlib.crc32(name.encode())])
        return [
            BenchRequest(rng.integers(FIRST_TOKEN, self.vocab_size, prompt).tolist(), output)
            for prompt, output in self.lengths()
        ]

    def one(self, name: str, output_tokens: int) -> BenchRequest:
        """A single request of exactly `prompt_tokens` and `output_tokens`; another name has another prompt."""
        rng = np.random.default_rng([self.seed, 3, zlib.crc32(name.encode())])
        return BenchRequest(rng.integers(FIRST_TOKEN, self.vocab_size, self.prompt_tokens).tolist(), output_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths())

    @property
    def num_output_tokens(self) -> int:
        return sum(output for _, output in self.lengths())

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(prompt + output for prompt, output in self.lengths())

    def to_text(self) -> str:
        prompts = [prompt for prompt, _ in self.lengths()]
        return (
            f"{self.requests} requests: prompts of {min(prompts)} to {max(prompts)} tokens (lognormal around "
            f"{self.prompt_tokens}), {sum(prompts):,} in; {self.output_low} to {self.output_high} out each, "
            f"{self.num_output_tokens:,} out; greedy, EOS ignored, seed {self.seed}"
        )


@dataclass(frozen=True)
class Reports:
    """Rows of the demonstration job, which begin with the same words and end by themselves; each round has others.

    `encode` is the tokenizer's. Only for the demonstration model: another would not end, or know the words.
    """

    requests: int
    encode: Callable[[Sequence[str]], list[list[int]]]

    def round(self, name: str) -> list[BenchRequest]:
        """The rows of round `name`, a number."""
        first = int(name) * self.requests
        texts = [make_report("job", index).prompt for index in range(first, first + self.requests)]
        return [BenchRequest(tokens, REPORT_TOKENS, ignore_eos=False) for tokens in self.encode(texts)]

    def one(self, name: str, output_tokens: int) -> BenchRequest:
        """A single row that is in no round; `output_tokens` at most."""
        tokens = self.encode([make_report("job", 1_000_000 + int(name)).prompt])[0]
        return BenchRequest(tokens, output_tokens, ignore_eos=False)

    def to_text(self) -> str:
        return (
            f"{self.requests} rows of the demonstration job a round, other ones each round; their shared first words "
            f"may be cached; greedy, until EOS or {REPORT_TOKENS} tokens"
        )


def count_tokens(requests: Sequence[BenchRequest]) -> tuple[int, int]:
    """Prompt tokens and output tokens."""
    return sum(len(r.prompt_token_ids) for r in requests), sum(r.max_tokens for r in requests)
