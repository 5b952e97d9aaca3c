"""Sequences: requests, or their samples, inside the engine. No torch.

A `Sequence` holds what changes rarely; `SlotTable` has the counters of every step. A `Sequence` is read and written
when it is admitted, when its blocks become findable and when it ends.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipeline.engine.completion import Completion
from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.engine.reasoning.tracking import RowReasoning, TextReasoning
from pipeline.engine.request import Request
from pipeline.engine.samples import ParentRequest
from pipeline.engine.schedule.block_pool import chain_hashes, chain_root
from pipeline.engine.schedule.request_stream import RequestStream
from pipeline.engine.tasks import HiddenStates, TaskResult, TokenLogprobs
from pipeline.errors import RowError
from pipeline.tokenization.detokenizer import StopChecker


class Reader(Protocol):
    """Consumer of the hidden states at positions first <= p < stop (engine/reading/)."""

    first: int
    stop: int
    num_after: int
    """Maximum number of tokens after the prompt in the texts that it needs computed."""

    @property
    def is_finite(self) -> bool:
        """True if all received states are finite; valid once all have been received."""
        ...

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the next text once all states were received: the position from which to write, and the tokens.
        `first` and `stop` then describe the new text. None: the reader is complete."""
        ...

    def result(self) -> TaskResult: ...


@dataclass
class Sequence:
    """A request, or one of its samples, inside the engine. `token_ids` is the prompt, plus the generated tokens after a
    preemption."""

    request: Request
    token_ids: np.ndarray  # int32
    order: int  # of arrival; older sequences are served first
    seed: int = 0  # of its random numbers, together with the position
    call: RequestStream = field(default_factory=RequestStream)  # receives its completion
    group: ParentRequest | None = None  # of a request with several samples
    sample_index: int = 0  # index in the group
    queued_us: int = 0  # when it was added, on the machine's monotonic clock
    first_token_us: int = 0  # when its first token was appended, kept over preemptions; 0: not yet
    slot: int = -1  # -1: not running
    hashes: list[bytes] = field(default_factory=list)  # chain hashes of its leading full blocks, extended on demand
    num_prompt: int = 0
    num_cached: int = -1  # prompt tokens found in shared blocks at the first admission; -1: not admitted yet
    num_computed_before_preemption: int = (
        0  # tokens computed before a preemption; computing them again counts as repeated work
    )
    logprobs: list[TokenLogprobs] | None = None
    stop_checker: StopChecker | None = None
    matcher: RowMatcher | None = None  # with structured_outputs, created by the first mask; advanced with its tokens
    reasoning: RowReasoning | TextReasoning | None = None  # if the completion is to be split
    reader: Reader | None = None  # receives hidden states of its known tokens
    has_been_read: bool = False  # its reader is complete
    ending_ids: np.ndarray | None = None  # int64, with min_tokens: tokens that would end it, masked until then

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        if self.request.params.logprobs is not None:
            self.logprobs = []

    @property
    def generates(self) -> bool:
        return self.request.task is None

    @property
    def is_compared(self) -> bool:
        """True if it is only read to compare models, so that its work counts for no row."""
        return isinstance(self.request.task, HiddenStates)

    @property
    def num_shareable(self) -> int:
        """Number of leading known tokens that shared blocks may provide. Not the last one, whose logits are needed, and
        none whose hidden states a reader needs. A reader overwrites the tokens after the prompt later, so those blocks
        are never shared."""
        last = len(self.token_ids) - 1
        if self.reader is None or self.has_been_read:
            return last
        return min(last, self.reader.first, self.num_prompt)

    def end(self, completion: Completion) -> None:
        """End with `completion`. The call receives it, or, in a group, the request's completion once all have ended."""
        whole = completion if self.group is None else self.group.end(self.sample_index, completion)
        if whole is not None:
            self.call.end(whole, self.request.params)

    def fail(self, error: RowError, message: str) -> None:
        """End with an error. It must hold no slot and no blocks."""
        has_begun = self.num_cached >= 0
        self.end(
            Completion(
                row_id=self.request.row_id,
                token_ids=[],
                text="",
                finish_reason="error",
                num_prompt_tokens=self.num_prompt,
                num_cached_tokens=max(self.num_cached, 0),
                error=error.value,
                error_message=message,
                queued_us=self.queued_us,
                first_token_us=self.first_token_us,
                num_lost_prompt_tokens=self.num_prompt - self.num_cached if has_begun else 0,
                num_lost_generated_tokens=len(self.token_ids) - self.num_prompt if self.generates else 0,
            )
        )

    def extend_hashes(self, token_ids: np.ndarray, num_blocks: int, block_size: int) -> None:
        """Make `hashes` cover the first `num_blocks` full blocks of `token_ids`."""
        known = len(self.hashes)
        if known < num_blocks:
            parent = self.hashes[-1] if self.hashes else chain_root(self.request.adapter)
            self.hashes += chain_hashes(parent, token_ids[known * block_size : num_blocks * block_size], block_size)
