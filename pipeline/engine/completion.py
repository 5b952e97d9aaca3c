"""Results of requests."""

from dataclasses import dataclass
from typing import Literal

from pipeline.engine.tasks import TaskResult, TokenLogprobs

FinishReason = Literal["stop", "length", "length_loop", "error"]


@dataclass(frozen=True)
class RowQuality:
    """Comparison of a completion with a reference model. tokens: number of generated tokens. agreed: how many of them
    the reference chose too when it read the same text: its most likely token is compared with the generated one, or, in
    rows that are sampled or constrained by a grammar or a budget, with the served model's most likely one.
    kl_nanonats: KL(reference || served) summed over the same positions, in 1e-9 nats. same_text: whether the
    reference's own completion is identical. served_right, reference_right: whether each equals the expected answer,
    ignoring surrounding whitespace; None without an expected answer. reason: why nothing could be measured; all other
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
    is_copy: copied from an equal row, which was computed.
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
    is_copy: bool = False

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
