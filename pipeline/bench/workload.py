"""Requests for benchmarks: ragged lengths as real jobs have, drawn from fixed seeds, new prompts every round.

Lengths are drawn once and every round has the same, so rounds can be compared; the tokens of the prompts are drawn
anew for each round and name, so nothing computed before can be found in a prefix cache.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engine.params import Request, SamplingParams
from pipeline.errors import ConfigError

PROMPT_SIGMA = 0.5  # of the lengths' logarithm: the longest of 48 has about 3 times the median
MIN_PROMPT, MAX_PROMPT_FACTOR = 4, 6
FIRST_TOKEN = 16  # below lie the control tokens of usual tokenizers


@dataclass(frozen=True)
class BenchRequest:
    """Exactly `max_tokens` tokens are wanted: EOS does not end it."""

    prompt_token_ids: list[int]
    max_tokens: int

    def to_request(self, row_id: object) -> Request:
        return Request(row_id, self.prompt_token_ids, SamplingParams(max_tokens=self.max_tokens, ignore_eos=True))


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


def count_tokens(requests: Sequence[BenchRequest]) -> tuple[int, int]:
    """Prompt tokens and output tokens."""
    return sum(len(r.prompt_token_ids) for r in requests), sum(r.max_tokens for r in requests)
