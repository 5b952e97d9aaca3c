"""Sequences: a `Sequence` holds the cold facts, slot-indexed arrays hold the counters of every step. No torch.

Planning a step reads and writes only the arrays, so it needs no Python per sequence. A `Sequence` is touched when it is
admitted, when its blocks become findable and when it ends. While it runs, each occupied slot satisfies:

    0 <= num_computed < num_known <= limit        num_blocks * block_size >= num_computed

A sequence that generates nothing (engine/reading/) is removed by the step that computes its last token.

Suffixes: S sequences, B blocks, N any items.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

import numpy as np

from pipeline.engine.completion import Completion
from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.engine.reasoning.channels import ChannelReasoning
from pipeline.engine.reasoning.tracking import RowReasoning, TextReasoning
from pipeline.engine.request import Request
from pipeline.engine.samples import ParentRequest
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.block_pool import chain_hashes, chain_root
from pipeline.engine.tasks import HiddenStates, TaskResult, TokenLogprobs
from pipeline.errors import ConfigError, RowError
from pipeline.tokenization.detokenizer import StopChecker

SAMPLING_OPTIONS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("top_k", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # -1: none
    ]
)
PLACEHOLDER_TOKEN = -1  # in the table for a token that is still in flight
_LARGEST = np.iinfo(np.int64).max


def sampling_options(params: SamplingParams) -> tuple[float | int, ...]:
    """Return the row of SAMPLING_OPTIONS for these parameters; it holds no stop conditions."""
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        min(params.top_k, _LARGEST),
        min(params.min_tokens, _LARGEST),
        -1 if params.logprobs is None else params.logprobs,
    )


def counts_output(options: Any) -> Any:
    """Return which rows have a penalty that counts output tokens."""
    return (options["presence_penalty"] != 0.0) | (options["frequency_penalty"] != 0.0)


def adjusts_logits(options: Any, num_generated: np.ndarray | int = 0) -> Any:
    """Return which rows have a penalty, or a mask after `num_generated` tokens: their logits change before sampling."""
    penalised = (options["repetition_penalty"] != 1.0) | counts_output(options)
    return penalised | (options["min_tokens"] > num_generated)


def is_greedy(options: Any) -> Any:
    """Return which rows always take the argmax of the model's raw logits. Accepts one row as a dict too."""
    return np.logical_and(options["temperature"] == 0.0, np.logical_not(adjusts_logits(options)))


def is_plain(params: SamplingParams) -> bool:
    """Return whether its rows are greedy without log-probabilities: each takes the best token its grammar allows."""
    return params.logprobs is None and bool(is_greedy(vars(params)))


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


def given_ids(ids: Iterable[Any]) -> list[int]:
    """Return token ids as plain ints, also from numpy or torch integers. Raises ConfigError."""
    try:
        if isinstance(ids, bytes | bytearray):  # else each byte would be an id
            raise TypeError
        return [index(each) for each in ids]
    except TypeError:
        raise ConfigError(f"expected a string or the ids of its tokens (integers), found {ids!r:.80}") from None


def token_array(ids: Iterable[int]) -> np.ndarray:
    """Return token ids as int32. Ids outside int32 are clamped to values that are invalid in every vocabulary. Raises
    ConfigError for other types."""
    plain = given_ids(ids)
    try:
        return np.array(plain, dtype=np.int32)
    except OverflowError:
        return np.array([min(max(i, -1), np.iinfo(np.int32).max) for i in plain], dtype=np.int32)


@dataclass(eq=False)
class RequestStream:
    """Requests of one caller: of one call of `Engine.stream`, or of all calls of `Engine.add`. Compared by identity:
    callers may use the same row ids. check: the final check of completions with structured outputs."""

    check: Callable[[Completion, SamplingParams], Completion] = lambda completion, params: completion
    num_submitted: int = 0  # requests so far, and so the index of the next one
    num_unfinished: int = 0  # requests in the engine that have not ended
    ended: list[Completion] = field(default_factory=list)  # not returned yet

    def end(self, completion: Completion, params: SamplingParams) -> None:
        """Record the end of one of its requests, which has these parameters."""
        self.num_unfinished -= 1
        self.ended.append(completion if params.structured_outputs is None else self.check(completion, params))

    def drain(self) -> list[Completion]:
        """Return the completions since the last call."""
        ended, self.ended = self.ended, []
        return ended


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


class SlotWatcher(Protocol):
    """Observer of sequences that enter and leave slots: see `Proposer`."""

    def admitted(self, slot: int) -> None: ...
    def on_evicted(self, slot: int, finished: bool) -> None: ...


class SlotTable:
    """Counters of all running sequences, indexed by slot. The OS commits memory pages only when they are used."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, adapters: Collection[str] = ()) -> None:
        """adapters: names that requests may use, in the order of their indices."""
        self.adapter_index = {name: index for index, name in enumerate(adapters)}
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        self.num_shared_blocks = np.zeros(num_slots, dtype=np.int64)  # leading blocks that came from the prefix cache
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.num_computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.limit = np.zeros(num_slots, dtype=np.int64)  # maximum tokens: prompt + max_tokens, or the context length
        self.order = np.zeros(num_slots, dtype=np.int64)
        self.recompute_until = np.zeros(num_slots, dtype=np.int64)
        self.stops_at_eos = np.zeros(num_slots, dtype=bool)
        self.min_known = np.zeros(num_slots, dtype=np.int64)  # no stop condition before this many known tokens
        self.max_pattern = np.zeros(num_slots, dtype=np.int64)  # repetition detection; 0: off
        self.min_pattern = np.zeros(num_slots, dtype=np.int64)
        self.min_repeats = np.zeros(num_slots, dtype=np.int64)
        self.has_grammar = np.zeros(num_slots, dtype=bool)  # structured_outputs
        self.thinking = np.zeros(num_slots, dtype=np.int8)  # of `Thinking`
        self.thinking_deadline = np.full(
            num_slots, _LARGEST
        )  # number of known tokens at which the thinking budget ends
        self.start_id = np.zeros(num_slots, dtype=np.int64)  # reasoning markers of the rows that may reason
        self.end_id = np.zeros(num_slots, dtype=np.int64)
        self.has_channels = np.zeros(num_slots, dtype=bool)  # `ChannelReasoning`: end_id alone does not end reasoning
        self.has_stops = np.zeros(num_slots, dtype=bool)  # stop strings or ids: checked row by row
        self.generates = np.ones(num_slots, dtype=bool)  # otherwise it ends when all its known tokens are computed
        self.is_compared = np.zeros(num_slots, dtype=bool)
        self.read_from = np.full(num_slots, _LARGEST)  # positions whose hidden states a reader needs; none: _LARGEST
        self.read_to = np.zeros(num_slots, dtype=np.int64)
        self.num_readers = 0  # slots whose reader is not complete
        self.adapter = np.full(num_slots, -1, dtype=np.int64)
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.is_plain = np.zeros(num_slots, dtype=bool)  # `is_greedy` and without log-probabilities
        self.sampling = np.zeros(num_slots, dtype=SAMPLING_OPTIONS)
        self.ending_ids = np.full(num_slots, None, dtype=object)
        self.last_step = np.zeros(num_slots, dtype=np.int64)  # number of the last step that computed tokens of it
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.watcher: SlotWatcher | None = None

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def occupy(self, sequence: Sequence, blocks: list[int], num_computed: int = 0) -> int:
        """Assign `sequence` a slot and these blocks, which hold its first num_computed tokens. Return the slot."""
        slot = self._free_slots.pop()
        params, known = sequence.request.params, len(sequence.token_ids)
        self.sequences[slot], sequence.slot = sequence, slot
        self.token_ids[slot, :known] = sequence.token_ids
        self.num_known[slot], self.num_computed[slot] = known, num_computed
        self.num_blocks[slot] = len(blocks)
        self.num_shared_blocks[slot] = num_computed // self.block_size
        self.block_table[slot, : len(blocks)] = blocks
        self.num_prompt[slot] = sequence.num_prompt
        self.limit[slot] = self.limit_of(sequence)
        self.order[slot] = sequence.order
        self.recompute_until[slot] = sequence.num_computed_before_preemption
        self.stops_at_eos[slot] = not params.ignore_eos
        self.min_known[slot] = min(sequence.num_prompt + params.min_tokens, _LARGEST)
        repetition = params.repetition_detection
        self.max_pattern[slot] = 0 if repetition is None else repetition.max_pattern_size
        self.min_pattern[slot] = 0 if repetition is None else repetition.min_pattern_size
        self.min_repeats[slot] = 0 if repetition is None else min(repetition.min_count, _LARGEST)
        self.has_grammar[slot] = params.structured_outputs is not None
        self.has_stops[slot] = bool(params.stop or params.stop_token_ids)
        self._set_thinking(slot, sequence)
        self.generates[slot] = sequence.generates
        self.is_compared[slot] = sequence.is_compared
        self.read_from[slot] = _LARGEST
        if sequence.reader is not None and not (sequence.has_been_read and sequence.generates):
            self.num_readers += 1
            self.read_from[slot], self.read_to[slot] = sequence.reader.first, sequence.reader.stop
        adapter = sequence.request.adapter
        self.adapter[slot] = -1 if adapter is None else self.adapter_index[adapter]
        self.seed[slot] = sequence.seed & 0xFFFFFFFFFFFFFFFF
        self.sampling[slot] = sampling_options(params)
        self.is_plain[slot] = is_plain(params)
        self.ending_ids[slot] = sequence.ending_ids
        self.last_step[slot] = 0
        if self.watcher is not None and sequence.generates:
            self.watcher.admitted(slot)
        return slot

    def _set_thinking(self, slot: int, sequence: Sequence) -> None:
        reasoning, num_prompt = sequence.reasoning, sequence.num_prompt
        self.thinking[slot], self.thinking_deadline[slot] = 0, _LARGEST
        if isinstance(reasoning, RowReasoning):
            self.thinking[slot] = reasoning.thinking(sequence.token_ids[num_prompt:])
            latest = reasoning.thinking_deadline(num_prompt)
            self.thinking_deadline[slot] = _LARGEST if latest is None else min(latest, _LARGEST)
            self.start_id[slot], self.end_id[slot] = reasoning.markers.start_id, reasoning.markers.end_id
            self.has_channels[slot] = isinstance(reasoning, ChannelReasoning)

    def limit_of(self, sequence: Sequence) -> int:
        """Return the maximum number of tokens that it may reach."""
        if not sequence.generates:
            return sequence.num_prompt + (0 if sequence.reader is None else sequence.reader.num_after)
        return min(sequence.num_prompt + sequence.request.params.max_tokens, self.max_model_len)

    def append_blocks(self, slot_S: np.ndarray, count_S: np.ndarray, blocks: list[int]) -> None:
        """Append the first count_S[0] of `blocks` to slot_S[0], the next count_S[1] to slot_S[1], and so on."""
        self.block_table[np.repeat(slot_S, count_S), ranges(self.num_blocks[slot_S], count_S)] = blocks
        self.num_blocks[slot_S] += count_S

    def blocks_of(self, slot: int) -> list[int]:
        """Return the blocks of the sequence in this slot, in order."""
        return self.block_table[slot, : self.num_blocks[slot]].tolist()

    def drop_blocks(self, slot: int, end: int) -> list[int]:
        """Detach the blocks after the sequence's first `end` tokens and return them; the caller releases them."""
        num_kept = -(-end // self.block_size)
        dropped = self.block_table[slot, num_kept : self.num_blocks[slot]].tolist()
        self.num_blocks[slot] = num_kept
        return dropped

    def vacate(self, slot: int, finished: bool = False) -> Sequence:
        """Free the slot and copy the known tokens back to the sequence. The caller releases its blocks."""
        sequence = self.at(slot)
        if self.watcher is not None and sequence.generates:
            self.watcher.on_evicted(slot, finished)
        self._leave_unread(slot)
        sequence.token_ids = self.token_ids[slot, : self.num_known[slot]].copy()
        sequence.slot = -1
        self.sequences[slot] = None
        self._free_slots.append(slot)
        return sequence

    def has_been_read(self, slot: int) -> None:
        """Mark the reader of this slot's sequence as complete. A sequence that generates continues without one."""
        sequence = self.at(slot)
        sequence.has_been_read = True
        if sequence.generates:
            self._leave_unread(slot)

    def read_next(self, slot: int, first_position: int, token_ids: tuple[int, ...]) -> None:
        """Restart reading of this slot's sequence with these tokens from position `first_position` on."""
        sequence = self.at(slot)
        assert sequence.reader is not None
        sequence.has_been_read = False
        end = first_position + len(token_ids)
        self.token_ids[slot, first_position:end] = token_ids
        # After a preemption these hashes belong to the overwritten tokens.
        del sequence.hashes[first_position // self.block_size :]
        self.num_known[slot], self.num_computed[slot] = end, first_position
        self.read_from[slot], self.read_to[slot] = sequence.reader.first, sequence.reader.stop

    def _leave_unread(self, slot: int) -> None:
        self.num_readers -= int(self.read_from[slot] != _LARGEST)
        self.read_from[slot] = _LARGEST

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence


def ranges(first_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
    """Concatenate the ranges first_N[i] .. first_N[i] + count_N[i] - 1."""
    if len(first_N) == 1:  # common, and 5 times faster
        return np.arange(first_N[0], first_N[0] + count_N[0])
    end_N = np.cumsum(count_N)
    return np.arange(int(end_N[-1]) if len(end_N) else 0) + np.repeat(first_N - end_N + count_N, count_N)
