"""Sampling parameters of a request, and the checks of their values."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.option_checks import check_options, is_finite, is_int
from pipeline.engine.reasoning.markers import ReasoningMarkers

OFF_AT_MINUS_1 = {"top_k": 0, "seed": None, "thinking_token_budget": None}  # vLLM's -1, and its meaning here
MAX_SAMPLES = 1024  # of one request: they finish together, so more would hold up their unit
MAX_PATTERN_SIZE = 1024  # of repetition detection: each token is compared with up to this many before it


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Parameters of repetition detection. Names and meanings are vLLM's.

    A row ends with the token that makes its last `min_count` patterns of n tokens equal, for some n from
    `min_pattern_size` to `max_pattern_size`. Only generated tokens count.

    Raises ConfigError when a value is out of range.
    """

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        top, bottom = self.max_pattern_size, self.min_pattern_size
        check_options(
            "sampling.repetition_detection",
            self,
            [
                (
                    "max_pattern_size",
                    is_int(top) and 1 <= top <= MAX_PATTERN_SIZE,
                    f"an integer 1 to {MAX_PATTERN_SIZE}",
                ),
                (
                    "min_pattern_size",
                    is_int(bottom) and is_int(top) and 1 <= bottom <= top,
                    "an integer from 1 to max_pattern_size",
                ),
                ("min_count", is_int(self.min_count) and self.min_count >= 2, "an integer of at least 2"),
            ],
        )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names and meanings follow vLLM where both have them.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off; `seed` and `thinking_token_budget` -1
    are None. `repetition_penalty` counts prompt and output tokens, the presence and frequency penalties count output
    tokens only. `logprobs`: None returns none, 0 the chosen token's, n also those of the n best tokens (of the raw
    distribution, before temperature and penalties). A stop string ends the text just before it; no stop condition acts
    before `min_tokens` tokens.
    `prompt_logprobs` does the same for prompt tokens, each given the tokens before it; the first one has none.
    `repetition_detection` ends a row that repeats itself; None is off.
    `n` completions of one prompt are returned as one Completion with `samples`; the prompt is computed once. Their
    seeds derive from the request's (`pipeline.engine.samples.sample_seed`), as if they were n requests with them.
    `seed` None uses the engine's seed plus the request's index: in its call of `generate` or `stream`, or among all
    requests passed to `add`. One seed gives the same tokens from the same logits in any batch and on any device, except
    where a number is within float32 rounding of a boundary.

    `structured_outputs` constrains the completion: a mapping with one of vLLM's keys json (a JSON Schema, as a mapping
    or text), json_object (true), regex, choice (a list of texts) and grammar (Lark). JSON has no whitespace between its
    tokens unless `whitespace_pattern` allows some. The row ends when nothing can follow, even with `ignore_eos`; at
    max_tokens it is cut off. Cannot be combined with min_tokens.

    `reasoning` splits the completion at the model's markers: "auto" uses those of its tokenizer, a mapping with `start`
    and `end` names them. The text between them is the completion's `reasoning`; what follows is its text, and
    `structured_outputs` constrain only that. `thinking_token_budget` forces the end marker after this number of
    generated reasoning tokens, and the answer follows; it needs `reasoning`. `max_tokens` counts all tokens.

    Raises ConfigError when a value is out of range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    reasoning: ReasoningMarkers | Literal["auto"] | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", ReasoningMarkers.from_config(self.reasoning))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_config(self.structured_outputs))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, off in OFF_AT_MINUS_1.items():
            if type(value := getattr(self, name)) is int and value == -1:
                object.__setattr__(self, name, off)
        for name in ("stop", "stop_token_ids"):
            if isinstance(given := getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(given))
        check_options("sampling", self, self._checks())

    def _checks(self) -> list[tuple[str, bool, str]]:
        return [
            ("max_tokens", is_int(self.max_tokens) and self.max_tokens >= 1, "an integer of at least 1"),
            (
                "min_tokens",
                is_int(self.min_tokens) and is_int(self.max_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                "an integer from 0 to max_tokens",
            ),
            (
                "min_tokens",
                self.structured_outputs is None or self.min_tokens == 0,
                "0 with structured_outputs, which determine where a completion ends",
            ),
            ("temperature", is_finite(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            ("top_k", is_int(self.top_k) and self.top_k >= 0, "an integer of at least 0 (0 or -1: off)"),
            ("top_p", is_finite(self.top_p) and 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("min_p", is_finite(self.min_p) and 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
            (
                "repetition_penalty",
                is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0",
            ),
            ("presence_penalty", is_finite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", is_finite(self.frequency_penalty), "a finite number"),
            (
                "stop",
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "non-empty strings",
            ),
            (
                "stop_token_ids",
                isinstance(self.stop_token_ids, tuple) and all(is_int(t) and t >= 0 for t in self.stop_token_ids),
                "token ids",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("seed", self.seed is None or is_int(self.seed), "an integer, or none"),
            (
                "logprobs",
                self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= 100),
                "an integer from 0 to 100, or none",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or (is_int(self.prompt_logprobs) and 0 <= self.prompt_logprobs <= 100),
                "an integer from 0 to 100, or none",
            ),
            (
                "repetition_detection",
                isinstance(self.repetition_detection, RepetitionDetectionParams | None),
                "RepetitionDetectionParams, or none",
            ),
            (
                "thinking_token_budget",
                self.thinking_token_budget is None
                or (is_int(self.thinking_token_budget) and self.thinking_token_budget >= 0),
                "an integer of at least 0, or none",
            ),
            (
                "thinking_token_budget",
                self.thinking_token_budget is None or self.reasoning is not None,
                "none without sampling.reasoning, which marks where reasoning ends; set that to auto",
            ),
            ("n", is_int(self.n) and 1 <= self.n <= MAX_SAMPLES, f"an integer 1 to {MAX_SAMPLES}"),
            (
                "n",
                self.n == 1 or (is_finite(self.temperature) and self.temperature > 0.0),
                f"1 with temperature 0, which gives {self.n} equal texts; set sampling.temperature above 0",
            ),
        ]
