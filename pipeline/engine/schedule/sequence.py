"""A request: a `Sequence` for the cold facts, slot-indexed arrays for the counters of every step. No torch.

Planning a step reads and writes only the arrays, so it costs no Python per sequence; a `Sequence` is touched when it is
admitted, when its blocks become findable and when it ends. For every occupied slot, while it runs:

    0 <= num_computed < num_known <= limit        num_blocks * block_size >= num_computed

A sequence that generates nothing (engine/reading/) is taken out by the step that computes its last token.

Suffixes: S sequences, B blocks, N any items.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any, Protocol

import numpy as np

from pipeline.engine.grammar.matcher import RowMatcher
from pipeline.engine.params import Completion, Request, SamplingParams
from pipeline.engine.reasoning.tracking import RowReasoning, TextReasoning
from pipeline.engine.samples import Group
from pipeline.engine.schedule.block_pool import ROOT, chain_hashes
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
        ("logprobs", np.int64),  # -1: none wanted
    ]
)
PLACEHOLDER_TOKEN = -1  # in the table for a token that is not known yet
_LARGEST = np.iinfo(np.int64).max


def sampling_options(params: SamplingParams) -> tuple[float | int, ...]:
    """The row of SAMPLING_OPTIONS that says how tokens are sampled; stop conditions are not in it."""
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
    """Which rows have a penalty that counts output tokens."""
    return (options["presence_penalty"] != 0.0) | (options["frequency_penalty"] != 0.0)


def adjusts_logits(options: Any, num_generated: np.ndarray | int = 0) -> Any:
    """Which rows have a penalty, or a mask after so many generated tokens: their logits change before sampling."""
    penalised = (options["repetition_penalty"] != 1.0) | counts_output(options)
    return penalised | (options["min_tokens"] > num_generated)


def is_greedy(options: Any) -> Any:
    """Which rows always take the best token of their logits as the model gives them. Takes one row as a dict too."""
    return np.logical_and(options["temperature"] == 0.0, np.logical_not(adjusts_logits(options)))


def is_plain(params: SamplingParams) -> bool:
    """Whether its rows are greedy and want no log-probabilities: each takes the best token that its grammar allows."""
    return params.logprobs is None and bool(is_greedy(vars(params)))


class Reader(Protocol):
    """Wants the hidden states at the positions first <= p < stop (engine/reading/)."""

    first: int
    stop: int
    num_after: int
    """Tokens after the prompt, at the most, of the texts that it wants to be computed."""

    @property
    def is_finite(self) -> bool:
        """Whether all that came are numbers; asked once all have come."""
        ...

    def next_text(self) -> tuple[int, tuple[int, ...]] | None:
        """Once all have come: which tokens are to stand from which position on, to be read next; `first` and `stop` are
        theirs then. None: it has all that it wants."""
        ...

    def result(self) -> TaskResult: ...


def given_ids(ids: Iterable[Any]) -> list[int]:
    """Ids of a text's tokens as plain integers, of which numpy and torch have their own. Raises ConfigError."""
    try:
        if isinstance(ids, bytes | bytearray):  # else each byte would be an id
            raise TypeError
        return [index(each) for each in ids]
    except TypeError:
        raise ConfigError(f"expected a string or the ids of its tokens (integers), found {ids!r:.80}") from None


def token_array(ids: Iterable[int]) -> np.ndarray:
    """Token ids in int32. What has no place there becomes something that no vocabulary has either. Raises ConfigError
    for what is no integer."""
    plain = given_ids(ids)
    try:
        return np.array(plain, dtype=np.int32)
    except OverflowError:
        return np.array([min(max(i, -1), np.iinfo(np.int32).max) for i in plain], dtype=np.int32)


@dataclass(eq=False)
class Call:
    """Whose requests they are: one call of `Engine.stream`, or all calls of `Engine.add` together. Compared by
    identity: callers may use the same row ids. check: what completions with structured outputs go through."""

    check: Callable[[Completion, SamplingParams], Completion] = lambda completion, params: completion
    num_given: int = 0  # requests so far, and so the position of the next one
    num_open: int = 0  # of these, the ones that are in the engine and have not ended
    ended: list[Completion] = field(default_factory=list)  # not handed over yet

    def end(self, completion: Completion, params: SamplingParams) -> None:
        """One of its requests, with these parameters, has ended."""
        self.num_open -= 1
        self.ended.append(completion if params.structured_outputs is None else self.check(completion, params))

    def take(self) -> list[Completion]:
        """The completions since the last time."""
        ended, self.ended = self.ended, []
        return ended


@dataclass
class Sequence:
    """One request on its way, or one of the several that it became. `token_ids` is the prompt and, after a preemption,
    what was generated too."""

    request: Request
    token_ids: np.ndarray  # int32
    order: int  # of arrival; older sequences are served first
    seed: int = 0  # of its random numbers, with the position
    call: Call = field(default_factory=Call)  # that gets its completion
    group: Group | None = None  # of its request's sequences, where there are several
    place: int = 0  # in the group
    queued_us: int = 0  # when it was added, on the machine's monotonic clock
    first_token_us: int = 0  # when its first token was appended, whatever happened later; 0: not yet
    slot: int = -1  # -1: not running
    hashes: list[bytes] = field(default_factory=list)  # chain hashes of full blocks of known tokens, as far as needed
    num_prompt: int = 0
    num_cached: int = -1  # prompt tokens found in shared blocks at the first admission; -1: not admitted yet
    high_water: int = 0  # tokens computed before a preemption; computing them again is repeated work
    logprobs: list[TokenLogprobs] | None = None
    stop_checker: StopChecker | None = None
    matcher: RowMatcher | None = None  # with structured_outputs, once a mask was asked for: after its generated tokens
    reasoning: RowReasoning | TextReasoning | None = None  # where the completion is to be divided
    reader: Reader | None = None  # who is told of its known tokens
    has_been_read: bool = False  # its reader has all that it wants
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
        """Whether it is read to compare models, and no row's work."""
        return isinstance(self.request.task, HiddenStates)

    @property
    def num_shareable(self) -> int:
        """Of its first known tokens, those that it need not compute itself where their blocks are there: the last
        one's logits are wanted, or a reader wants hidden states. What a reader puts after the prompt it writes over
        later, so those blocks are its own alone."""
        last = len(self.token_ids) - 1
        if self.reader is None or self.has_been_read:
            return last
        return min(last, self.reader.first, self.num_prompt)

    def end(self, completion: Completion) -> None:
        """It has ended. Its call gets the completion, in a group that of the request once all have ended."""
        whole = completion if self.group is None else self.group.end(self.place, completion)
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
            parent = self.hashes[-1] if self.hashes else ROOT
            self.hashes += chain_hashes(parent, token_ids[known * block_size : num_blocks * block_size], block_size)


class SlotWatcher(Protocol):
    """Is told who comes into the slots and who leaves them: see `Proposer`."""

    def admitted(self, slot: int) -> None: ...
    def left(self, slot: int, finished: bool) -> None: ...


class SlotTable:
    """The counters of all running sequences, indexed by slot. Memory pages are touched only when used."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        self.num_found = np.zeros(num_slots, dtype=np.int64)  # of its first blocks: those that it did not compute
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.num_computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.limit = np.zeros(num_slots, dtype=np.int64)  # most tokens it may come to: prompt + max_tokens, or context
        self.order = np.zeros(num_slots, dtype=np.int64)
        self.repeat_until = np.zeros(num_slots, dtype=np.int64)
        self.stops_at_eos = np.zeros(num_slots, dtype=bool)
        self.min_known = np.zeros(num_slots, dtype=np.int64)  # no stop condition before this many known tokens
        self.max_pattern = np.zeros(num_slots, dtype=np.int64)  # repetition detection; 0: off
        self.min_pattern = np.zeros(num_slots, dtype=np.int64)
        self.min_repeats = np.zeros(num_slots, dtype=np.int64)
        self.has_grammar = np.zeros(num_slots, dtype=bool)  # structured_outputs
        self.thinking = np.zeros(num_slots, dtype=np.int8)  # of `Thinking`
        self.latest_end = np.full(num_slots, _LARGEST)  # that still think with so many known tokens end thinking there
        self.start_id = np.zeros(num_slots, dtype=np.int64)  # the markers of those that may think
        self.end_id = np.zeros(num_slots, dtype=np.int64)
        self.has_stops = np.zeros(num_slots, dtype=bool)  # stop strings or ids: looked at one by one
        self.generates = np.ones(num_slots, dtype=bool)  # else it ends when all that it knows is computed
        self.is_compared = np.zeros(num_slots, dtype=bool)
        self.read_from = np.full(num_slots, _LARGEST)  # positions whose hidden states are wanted; none: _LARGEST
        self.read_to = np.zeros(num_slots, dtype=np.int64)
        self.num_readers = 0  # in the slots, of those that still want something
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.is_plain = np.zeros(num_slots, dtype=bool)  # `is_greedy`, no log-probabilities are wanted
        self.sampling = np.zeros(num_slots, dtype=SAMPLING_OPTIONS)
        self.ending_ids = np.full(num_slots, None, dtype=object)
        self.last_step = np.zeros(num_slots, dtype=np.int64)  # number of the last step that computed some of it
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.watcher: SlotWatcher | None = None

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def occupy(self, sequence: Sequence, blocks: list[int], num_computed: int = 0) -> int:
        """Give `sequence` a slot and these blocks, which hold its first num_computed tokens."""
        slot = self._free_slots.pop()
        params, known = sequence.request.params, len(sequence.token_ids)
        self.sequences[slot], sequence.slot = sequence, slot
        self.token_ids[slot, :known] = sequence.token_ids
        self.num_known[slot], self.num_computed[slot] = known, num_computed
        self.num_blocks[slot] = len(blocks)
        self.num_found[slot] = num_computed // self.block_size
        self.block_table[slot, : len(blocks)] = blocks
        self.num_prompt[slot] = sequence.num_prompt
        self.limit[slot] = self.limit_of(sequence)
        self.order[slot] = sequence.order
        self.repeat_until[slot] = sequence.high_water
        self.stops_at_eos[slot] = not params.ignore_eos
        self.min_known[slot] = min(sequence.num_prompt + params.min_tokens, _LARGEST)
        loop = params.repetition_detection
        self.max_pattern[slot] = 0 if loop is None else loop.max_pattern_size
        self.min_pattern[slot] = 0 if loop is None else loop.min_pattern_size
        self.min_repeats[slot] = 0 if loop is None else min(loop.min_count, _LARGEST)
        self.has_grammar[slot] = params.structured_outputs is not None
        self.has_stops[slot] = bool(params.stop or params.stop_token_ids)
        self._set_thinking(slot, sequence)
        self.generates[slot] = sequence.generates
        self.is_compared[slot] = sequence.is_compared
        self.read_from[slot] = _LARGEST
        if sequence.reader is not None and not (sequence.has_been_read and sequence.generates):
            self.num_readers += 1
            self.read_from[slot], self.read_to[slot] = sequence.reader.first, sequence.reader.stop
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
        self.thinking[slot], self.latest_end[slot] = 0, _LARGEST
        if isinstance(reasoning, RowReasoning):
            self.thinking[slot] = reasoning.thinking(sequence.token_ids[num_prompt:])
            latest = reasoning.latest_end(num_prompt)
            self.latest_end[slot] = _LARGEST if latest is None else min(latest, _LARGEST)
            self.start_id[slot], self.end_id[slot] = reasoning.markers.start_id, reasoning.markers.end_id

    def limit_of(self, sequence: Sequence) -> int:
        """The most tokens that it may come to."""
        if not sequence.generates:
            return sequence.num_prompt + (0 if sequence.reader is None else sequence.reader.num_after)
        return min(sequence.num_prompt + sequence.request.params.max_tokens, self.max_model_len)

    def append_blocks(self, slot_S: np.ndarray, count_S: np.ndarray, blocks: list[int]) -> None:
        """The first count_S[0] of `blocks` go to the end of slot_S[0], and so on."""
        self.block_table[np.repeat(slot_S, count_S), ranges(self.num_blocks[slot_S], count_S)] = blocks
        self.num_blocks[slot_S] += count_S

    def blocks_of(self, slot: int) -> list[int]:
        """The blocks that the sequence there holds, in order."""
        return self.block_table[slot, : self.num_blocks[slot]].tolist()

    def drop_blocks(self, slot: int, end: int) -> list[int]:
        """Take the blocks after its first `end` tokens off the sequence; they are the caller's to release."""
        kept = -(-end // self.block_size)
        dropped = self.block_table[slot, kept : self.num_blocks[slot]].tolist()
        self.num_blocks[slot] = kept
        return dropped

    def vacate(self, slot: int, finished: bool = False) -> Sequence:
        """Free the slot and give the sequence its known tokens back. Its blocks are the caller's to release."""
        sequence = self.at(slot)
        if self.watcher is not None and sequence.generates:
            self.watcher.left(slot, finished)
        self._leave_unread(slot)
        sequence.token_ids = self.token_ids[slot, : self.num_known[slot]].copy()
        sequence.slot = -1
        self.sequences[slot] = None
        self._free_slots.append(slot)
        return sequence

    def has_been_read(self, slot: int) -> None:
        """The reader of the sequence there has all that it wants. One that generates goes on as if it had none."""
        sequence = self.at(slot)
        sequence.has_been_read = True
        if sequence.generates:
            self._leave_unread(slot)

    def read_next(self, slot: int, place: int, token_ids: tuple[int, ...]) -> None:
        """The sequence there, which was read whole, is to be read anew with these tokens from `place` on."""
        sequence = self.at(slot)
        assert sequence.reader is not None
        sequence.has_been_read = False
        end = place + len(token_ids)
        self.token_ids[slot, place:end] = token_ids
        del sequence.hashes[place // self.block_size :]  # a preempted one has them of the tokens that stood there
        self.num_known[slot], self.num_computed[slot] = end, place
        self.read_from[slot], self.read_to[slot] = sequence.reader.first, sequence.reader.stop

    def _leave_unread(self, slot: int) -> None:
        self.num_readers -= int(self.read_from[slot] != _LARGEST)
        self.read_from[slot] = _LARGEST

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence


def ranges(first_N: np.ndarray, count_N: np.ndarray) -> np.ndarray:
    """first_N[0], first_N[0] + 1, ..., count_N[0] of them, then those of first_N[1], and so on."""
    if len(first_N) == 1:  # often, and in a fifth of the time
        return np.arange(first_N[0], first_N[0] + count_N[0])
    end_N = np.cumsum(count_N)
    return np.arange(int(end_N[-1]) if len(end_N) else 0) + np.repeat(first_N - end_N + count_N, count_N)
