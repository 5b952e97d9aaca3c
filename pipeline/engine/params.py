"""Inputs and outputs of the engine: plain frozen dataclasses, no torch.

They define and check every option. `startup/resolve.py` resolves `auto` values for a machine and a checkpoint.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, get_args

from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.reasoning.markers import ReasoningMarkers
from pipeline.engine.tasks import Task, TaskResult, TokenLogprobs
from pipeline.errors import ConfigError

FinishReason = Literal["stop", "length", "length_loop", "error"]
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
        for name, ok, expected in (
            ("max_pattern_size", _is_int(top) and 1 <= top <= MAX_PATTERN_SIZE, f"an integer 1 to {MAX_PATTERN_SIZE}"),
            (
                "min_pattern_size",
                _is_int(bottom) and _is_int(top) and 1 <= bottom <= top,
                "an integer from 1 to max_pattern_size",
            ),
            ("min_count", _is_int(self.min_count) and self.min_count >= 2, "an integer of at least 2"),
        ):
            if not ok:
                value = getattr(self, name)
                raise ConfigError(f"sampling.repetition_detection.{name} = {value!r}: expected {expected}")


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
        for name, ok, expected in self._checks():
            if not ok:
                raise ConfigError(f"sampling.{name} = {getattr(self, name)!r}: expected {expected}")

    def _checks(self) -> list[tuple[str, bool, str]]:
        return [
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer of at least 1"),
            (
                "min_tokens",
                _is_int(self.min_tokens) and _is_int(self.max_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                "an integer from 0 to max_tokens",
            ),
            (
                "min_tokens",
                self.structured_outputs is None or self.min_tokens == 0,
                "0 with structured_outputs, which determine where a completion ends",
            ),
            ("temperature", _is_finite(self.temperature) and self.temperature >= 0, "a finite number of at least 0"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "an integer of at least 0 (0 or -1: off)"),
            ("top_p", _is_finite(self.top_p) and 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
            ("min_p", _is_finite(self.min_p) and 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
            (
                "repetition_penalty",
                _is_finite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0",
            ),
            ("presence_penalty", _is_finite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", _is_finite(self.frequency_penalty), "a finite number"),
            (
                "stop",
                isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
                "non-empty strings",
            ),
            (
                "stop_token_ids",
                isinstance(self.stop_token_ids, tuple) and all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
                "token ids",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("seed", self.seed is None or _is_int(self.seed), "an integer, or none"),
            (
                "logprobs",
                self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 100),
                "an integer from 0 to 100, or none",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or (_is_int(self.prompt_logprobs) and 0 <= self.prompt_logprobs <= 100),
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
                or (_is_int(self.thinking_token_budget) and self.thinking_token_budget >= 0),
                "an integer of at least 0, or none",
            ),
            (
                "thinking_token_budget",
                self.thinking_token_budget is None or self.reasoning is not None,
                "none without sampling.reasoning, which marks where reasoning ends; set that to auto",
            ),
            ("n", _is_int(self.n) and 1 <= self.n <= MAX_SAMPLES, f"an integer 1 to {MAX_SAMPLES}"),
            (
                "n",
                self.n == 1 or (_is_finite(self.temperature) and self.temperature > 0.0),
                f"1 with temperature 0, which gives {self.n} equal texts; set sampling.temperature above 0",
            ),
        ]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Return whether `value` is a number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


SpeculationMethod = Literal["auto", "off", "lookup", "draft_model"]
MAX_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of speculative decoding. It changes the speed of generation, not the tokens; with a draft model, sampled
    tokens keep their distribution.

    method: "lookup" drafts the tokens that followed the same last tokens earlier, in the row's own text and in finished
    outputs; "draft_model" drafts with the smaller model `model`, which must have the same tokens; "auto" is lookup,
    never a draft model; "off".
    num_speculative_tokens: maximum drafts of a sequence in a step. forced: draft in every step, for measurements;
    otherwise drafts are computed only where they save time.
    """

    method: SpeculationMethod = "auto"
    model: str | None = None
    num_speculative_tokens: int = 6
    forced: bool = False

    @classmethod
    def from_value(cls, value: object) -> "SpeculationConfig":
        """Return the config for a method alone, False ("off"), or a mapping of these fields. Raises ConfigError."""
        if isinstance(value, SpeculationConfig):
            return value
        if value is False:
            value = "off"
        given: Any = {"method": value} if isinstance(value, str) else value
        names = cls.__dataclass_fields__
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ConfigError(
                f"speculation = {value!r:.80}: expected {', '.join(get_args(SpeculationMethod))}, or a mapping with "
                f"keys among {', '.join(names)}"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        methods, count = get_args(SpeculationMethod), self.num_speculative_tokens
        for name, ok, expected in (
            ("method", self.method in methods, f"one of {', '.join(methods)}"),
            ("model", isinstance(self.model, str | None), "a folder or a Hugging Face id, or none"),
            (
                "num_speculative_tokens",
                _is_int(count) and 1 <= count <= MAX_SPECULATIVE_TOKENS,
                f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}",
            ),
            ("forced", isinstance(self.forced, bool), "true or false"),
        ):
            if not ok:
                raise ConfigError(f"speculation.{name} = {getattr(self, name)!r:.80}: expected {expected}")
        if wrong := model_contradiction(self.method, self.model):
            raise ConfigError(f"speculation.model: {wrong}")


def model_contradiction(method: str, model: str | None) -> str | None:
    """Return why the method contradicts this draft model (or None), if it does."""
    if method == "draft_model" and model is None:
        return "required by method draft_model: the checkpoint of a smaller model with the same tokens"
    if method != "draft_model" and model is not None:
        return f"only for method draft_model, but the method is {method}; set method: draft_model, or remove the key"
    return None


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine. `None` and "auto" are resolved from the checkpoint and the machine.

    model: folder with config.json, safetensors and tokenizer files (a text or a Path), or a Hugging Face id.
    device: "auto", "cpu", "cuda" or "cuda:N". dtype: "auto", "bfloat16", "float16" or "float32".
    max_num_seqs: maximum running sequences. max_num_batched_tokens: maximum tokens of one step. The defaults are in
    `startup/batch_limits.py`.
    block_size: tokens of one KV block. kv_cache_memory_bytes: size of the KV cache; on CPU it defaults to what
    max_num_seqs sequences of max_model_len tokens need, at most a quarter of the free memory.
    cpu_offload_gb: GB (10^9 bytes) of each GPU's weights of layers to keep in host memory, rounded up to whole layers;
    each step copies them to the GPU, see `pipeline/model/offload.py`. The draft model's weights stay on the GPU.
    kv_cache_dtype: "auto", the compute dtype, or "fp8": 8 bits and a scale for each token and KV head, also in the
    draft model's cache (see kernels/cache.py).
    kernels: "auto", "cpu" (numba, oneDNN), "triton" (NVIDIA GPUs) or "reference" (plain torch, slow).
    activation_dtype: "auto" is `dtype`; "fp8" rounds the inputs of 4-bit and fp8 linears to float8_e4m3fn, which can
    change tokens (see `kernels/activations/fp8.py`): it is faster on NVIDIA GPUs from compute capability 8.9 and slower
    elsewhere, where it only serves to check its effect on outputs. "fp8-per-token" rounds them more coarsely, and all
    quantized weights too (see `kernels/activations/fp8.py`). "int8" rounds those of 4-bit linears to 8-bit integers
    (see `kernels/activations/int8.py`): it is faster on processors with AVX2.
    deterministic: a row's logits, and so its tokens, are bitwise equal whatever else is in a step, however its prompt
    is chunked, shared or recomputed, and whether drafts were verified. Slower; on CPU in float32 only. See
    `kernels/triton/batch_invariant.py` and `kernels/cpu/invariant.py` for the cost. With a draft model fewer sampled
    drafts are accepted, because rejection sampling would make tokens depend on them.
    quantization: "int8", "int4-rtn" or "nf4" quantizes the linears of a 16- or 32-bit checkpoint while loading, by
    rounding; "none" keeps the stored weights, quantized or not.
    speculation: a `SpeculationConfig`, its method alone ("off", or False), or a mapping of its fields.
    num_threads: CPU threads of this engine while it computes, at most one per processor; None: torch's current number.
    tensor_parallel_size: number of GPUs that compute each step together, each with a share of every layer; on a CPU,
    number of processes. See `engine/parallel/`. With `device` cuda:N they are cuda:N and the following ones. Sums are
    split, so rounding differs from that of one GPU. On GPUs this process ends if one of the others does.
    adapters: LoRA adapters that requests may use, by name: folders in PEFT's layout (texts or Paths), or Hugging Face
    ids. The draft model proposes without them.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    cpu_offload_gb: float = 0.0
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    kernels: str = "auto"
    deterministic: bool = False
    quantization: str = "none"
    speculation: SpeculationConfig | SpeculationMethod | bool | Mapping[str, Any] = "auto"
    seed: int = 0
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the options that `startup/resolve.py` uses unchanged; it checks the others."""
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if isinstance(self.adapters, Mapping):
            paths = {name: os.fspath(p) if isinstance(p, os.PathLike) else p for name, p in self.adapters.items()}
            object.__setattr__(self, "adapters", paths)
        object.__setattr__(self, "speculation", SpeculationConfig.from_value(self.speculation))
        for name, ok, expected in (
            ("model", isinstance(self.model, str), "a folder or a Hugging Face id"),
            (
                "adapters",
                isinstance(self.adapters, Mapping)
                and all(isinstance(text, str) for pair in self.adapters.items() for text in pair),
                "a mapping of names to folders",
            ),
            ("device", isinstance(self.device, str), "auto, cpu, cuda or cuda:N"),
            ("enable_prefix_caching", isinstance(self.enable_prefix_caching, bool), "true or false"),
            ("deterministic", isinstance(self.deterministic, bool), "true or false"),
            ("gpu_memory_utilization", _is_finite(self.gpu_memory_utilization), "a number in (0, 1]"),
            (
                "kv_cache_memory_bytes",
                self.kv_cache_memory_bytes is None or _is_int(self.kv_cache_memory_bytes),
                "an integer of bytes, or none",
            ),
            ("cpu_offload_gb", _is_finite(self.cpu_offload_gb) and self.cpu_offload_gb >= 0, "a number of at least 0"),
            ("seed", _is_int(self.seed), "an integer"),
            ("num_threads", self.num_threads is None or _is_int(self.num_threads), "an integer of at least 1, or none"),
            (
                "tensor_parallel_size",
                _is_int(self.tensor_parallel_size) and self.tensor_parallel_size >= 1,
                "an integer of at least 1",
            ),
        ):
            if not ok:
                raise ConfigError(f"engine.{name} = {getattr(self, name)!r:.80}: expected {expected}")

    @property
    def speculation_config(self) -> SpeculationConfig:
        """The value of `speculation` as a SpeculationConfig."""
        assert isinstance(self.speculation, SpeculationConfig)
        return self.speculation


@dataclass(frozen=True)
class QualitySample:
    """Request to compare a row's completion with a reference model (`engine/quality/`). expected: the right answer, if
    the job knows it."""

    expected: str | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to complete. `row_id` belongs to the caller and is returned unchanged on the completion. task: a task
    instead of a completion; nothing is generated then, and `params` are ignored. adapter: a name from
    `EngineConfig.adapters`; None: the base model."""

    row_id: object
    prompt_token_ids: list[int]
    params: SamplingParams
    quality: QualitySample | None = None
    task: Task | None = None
    adapter: str | None = None

    @property
    def max_tokens(self) -> int:
        """Maximum number of generated tokens."""
        return self.params.max_tokens if self.task is None else 0


@dataclass(frozen=True)
class RowQuality:
    """Comparison of a completion with a reference model. tokens: number of generated tokens. agreed: how many of them
    the reference chose too when it read the same text: its most likely token is compared with the generated one, or, in
    rows that are sampled or constrained by a grammar or a budget, with the served model's most likely one.
    kl_nanonats: KL(reference || served) summed over the same positions, in 1e-9 nats. same_text: whether the
    reference's own completion is identical. served_right, reference_right: whether each equals the expected answer,
    ignoring surrounding whitespace; None without an expected answer. why_not: why nothing could be measured; all other
    fields are meaningless then.
    """

    tokens: int = 0
    agreed: int = 0
    kl_nanonats: int = 0
    same_text: bool = False
    served_right: bool | None = None
    reference_right: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class Completion:
    """Result of a request. `token_ids` includes a generated EOS; `text` leaves special tokens out.

    finish_reason "stop": EOS, a stop string or a stop token id; "length": max_tokens or the end of the context;
    "length_loop": it repeated itself (`repetition_detection`);
    "error": `error` holds a RowError code and `error_message` the reason; text and token_ids are then empty.
    num_cached_tokens: prompt tokens served from shared KV blocks.
    num_lost_prompt_tokens, num_lost_generated_tokens: tokens computed for an error row in vain (its whole prompt, once
    it had begun).
    queued_us, first_token_us, last_token_us: when the request was added, and when its first and last token were
    generated, on this machine's monotonic clock in microseconds; 0 if never (an error keeps what is known).
    quality: set for rows that were compared with a reference model.
    reasoning: with `SamplingParams.reasoning` the text before the answer, stripped, and `text` is the answer alone,
    without leading whitespace; None if there was none, or only whitespace.
    num_reasoning_tokens: its tokens, without markers.
    token_count: number of generated tokens, if only a server knows their ids; None: that of token_ids.
    tool_calls: the server's list of tool calls, as JSON.
    prompt_logprobs: log-probabilities of the prompt's tokens from the second on.
    result: result of the request's task. finish_reason is "stop" then, text and token_ids are empty.
    samples: with `SamplingParams.n` above 1, the n completions in order. The other fields are then those of sample 0,
    except first_token_us and last_token_us, which are the minimum and maximum over all samples; an error applies to the
    whole request.
    """

    row_id: object
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_message: str | None = None
    queued_us: int = 0
    first_token_us: int = 0
    last_token_us: int = 0
    num_lost_prompt_tokens: int = 0
    num_lost_generated_tokens: int = 0
    quality: RowQuality | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    result: TaskResult | None = None
    samples: tuple["Completion", ...] = ()
    reasoning: str | None = None
    num_reasoning_tokens: int = 0
    token_count: int | None = None
    tool_calls: str | None = None

    @property
    def num_tokens(self) -> int:
        """Generated tokens of this sample."""
        return len(self.token_ids) if self.token_count is None else self.token_count

    @property
    def each(self) -> tuple["Completion", ...]:
        """Return its samples, or itself without samples."""
        return self.samples or (self,)

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens of all samples."""
        return sum(one.num_tokens for one in self.each)

    @property
    def num_thought_tokens(self) -> int:
        """`num_reasoning_tokens` of all samples."""
        return sum(one.num_reasoning_tokens for one in self.each)
