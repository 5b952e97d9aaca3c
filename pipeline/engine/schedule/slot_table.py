"""Counters of running sequences in arrays indexed by slot. No torch.

Planning a step reads and writes only these arrays, so it needs no Python per sequence. Each occupied slot satisfies:

    0 <= num_computed < num_known <= limit        num_pages * page_size >= num_computed

A sequence that generates nothing (engine/reading/) is removed by the step that computes its last token.

Suffixes: S sequences, N any items.
"""

from collections.abc import Collection
from typing import Protocol

import numpy as np

from pipeline.engine.reasoning.channels import ChannelReasoning
from pipeline.engine.reasoning.tracking import RowReasoning
from pipeline.engine.schedule.sampling_options import SAMPLING_OPTIONS, is_plain, sampling_options
from pipeline.engine.schedule.sequence import Sequence
from pipeline.roofline.kv_pages import KVPages

PLACEHOLDER_TOKEN = -1  # in the table for a token that is still in flight
_LARGEST = np.iinfo(np.int64).max


class SlotWatcher(Protocol):
    """Observer of sequences that enter and leave slots: see `Proposer`."""

    def admitted(self, slot: int) -> None: ...
    def on_evicted(self, slot: int, finished: bool) -> None: ...


class SlotTable:
    """Counters of all running sequences, indexed by slot. The OS commits memory pages only when they are used."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        pages: KVPages,
        adapters: Collection[str] = (),
        has_states: bool = False,
    ) -> None:
        """adapters: names that requests may use, in the order of their indices. has_states: each slot also has the
        states of layers without keys and values (`kernels/delta_net.py`)."""
        self.adapter_index = {name: index for index, name in enumerate(adapters)}
        self.num_slots, self.max_model_len, self.pages, self.has_states = num_slots, max_model_len, pages, has_states
        max_blocks = -(-max_model_len // pages.page_size) * pages.blocks_per_page
        self.token_ids = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_pages = np.zeros(num_slots, dtype=np.int64)  # of the layers that keep all tokens
        self.num_shared_pages = np.zeros(num_slots, dtype=np.int64)  # the first ones, which came from the prefix cache
        # Blocks of the layers that keep only the last tokens, and which of them are held: one page each.
        self.window_block_table: np.ndarray | None = None
        if pages.window is not None:
            self.window_block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.window_begin = np.zeros(num_slots, dtype=np.int64)
        self.window_end = np.zeros(num_slots, dtype=np.int64)
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.num_computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.num_applied = np.zeros(num_slots, dtype=np.int64)  # tokens that the states contain
        self.cut = np.full(num_slots, _LARGEST)  # position that no step crosses, so that states can be copied or kept
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

    def occupy(
        self, sequence: Sequence, pages: list[int], num_computed: int = 0, window_pages: Collection[int] = ()
    ) -> int:
        """Assign `sequence` a slot and these pages, which hold its first num_computed tokens. Return the slot.

        window_pages: of the layers that keep only the last tokens, from the first block that the next query sees.
        """
        slot = self._free_slots.pop()
        params, known = sequence.request.params, len(sequence.token_ids)
        self.sequences[slot], sequence.slot = sequence, slot
        self.token_ids[slot, :known] = sequence.token_ids
        self.num_known[slot], self.num_computed[slot] = known, num_computed
        self.num_pages[slot] = len(pages)
        self.num_shared_pages[slot] = num_computed // self.pages.page_size
        if self.window_block_table is None:  # a page is a block
            self.block_table[slot, : len(pages)] = pages
        else:
            ids = self.pages.block_ids(np.array(pages, dtype=np.int64), windowed=False)
            self.block_table[slot, : len(ids)] = ids
            self.window_begin[slot] = self.window_end[slot] = self.pages.first_seen(num_computed)
            self.append_window_pages(np.array([slot]), np.array([len(window_pages)]), window_pages)
            self._hide_passed(slot)
        self.num_prompt[slot] = sequence.num_prompt
        self.num_applied[slot] = num_computed
        self.set_cut(slot, None)
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

    def set_cut(self, slot: int, shared: int | None) -> None:
        """Set the position that no step crosses: the end of a prefix, or that of a prompt after which several texts are
        read."""
        end = self.end_of_chunk(self.at(slot)) if shared is None else shared
        self.cut[slot] = end if self.num_computed[slot] < end < self.num_known[slot] else _LARGEST

    def _set_thinking(self, slot: int, sequence: Sequence) -> None:
        reasoning, num_prompt = sequence.reasoning, sequence.num_prompt
        self.thinking[slot], self.thinking_deadline[slot] = 0, _LARGEST
        if isinstance(reasoning, RowReasoning):
            self.thinking[slot] = reasoning.thinking(sequence.token_ids[num_prompt:])
            latest = reasoning.thinking_deadline(num_prompt)
            self.thinking_deadline[slot] = _LARGEST if latest is None else min(latest, _LARGEST)
            self.start_id[slot], self.end_id[slot] = reasoning.markers.start_id, reasoning.markers.end_id
            self.has_channels[slot] = isinstance(reasoning, ChannelReasoning)

    def end_of_chunk(self, sequence: Sequence) -> int:
        """Return the position at which a step must stop that begins this sequence: its known tokens, or less, see
        `set_cut`."""
        reads_on = self.has_states and sequence.reader is not None and sequence.reader.num_after > 0
        return sequence.num_prompt if reads_on else len(sequence.token_ids)

    def limit_of(self, sequence: Sequence) -> int:
        """Return the maximum number of tokens that it may reach."""
        if not sequence.generates:
            return sequence.num_prompt + (0 if sequence.reader is None else sequence.reader.num_after)
        return min(sequence.num_prompt + sequence.request.params.max_tokens, self.max_model_len)

    def append_pages(self, slot_S: np.ndarray, count_S: np.ndarray, pages: list[int]) -> None:
        """Append the first count_S[0] of `pages` to slot_S[0], the next count_S[1] to slot_S[1], and so on."""
        per_page = self.pages.blocks_per_page
        number_P = ranges(self.num_pages[slot_S] * per_page, count_S * per_page)
        ids = self.pages.block_ids(np.array(pages, dtype=np.int64), windowed=False)
        self.block_table[np.repeat(slot_S, count_S * per_page), number_P] = ids
        self.num_pages[slot_S] += count_S

    def append_window_pages(self, slot_S: np.ndarray, count_S: np.ndarray, pages: Collection[int]) -> None:
        """Do the same for the layers that keep only the last tokens."""
        assert self.window_block_table is not None
        ids = self.pages.block_ids(np.array(pages, dtype=np.int64), windowed=True)
        self.window_block_table[np.repeat(slot_S, count_S), ranges(self.window_end[slot_S], count_S)] = ids
        self.window_end[slot_S] += count_S

    def missing_pages(self, slot_S: np.ndarray, end_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many pages each sequence lacks for its first end_S tokens: of layers that keep all tokens, and of
        those that keep the last ones."""
        size = self.pages.page_size
        missing_S = np.maximum((end_S + (size - 1)) // size - self.num_pages[slot_S], 0)
        if self.window_block_table is None:
            return missing_S, np.zeros_like(missing_S)
        size = self.pages.block_size
        return missing_S, np.maximum((end_S + (size - 1)) // size - self.window_end[slot_S], 0)

    def room(self, slot_S: np.ndarray) -> np.ndarray:
        """Return how many tokens after the known ones fit into the pages of each sequence."""
        end_S = self.num_pages[slot_S] * self.pages.page_size
        if self.window_block_table is not None:
            end_S = np.minimum(end_S, self.window_end[slot_S] * self.pages.block_size)
        return end_S - self.num_known[slot_S]

    def first_pages(self, slot: int, count: int) -> list[int]:
        """Return its first `count` pages of the layers that keep all tokens."""
        per_page = self.pages.blocks_per_page
        return (self.block_table[slot, : count * per_page : per_page] // self.pages.stride).tolist()

    def window_pages(self, slot: int, begin: int, end: int) -> list[int]:
        """Return the pages with the blocks begin to end of the layers that keep only the last tokens."""
        assert self.window_block_table is not None
        return (self.window_block_table[slot, begin:end] // self.pages.window_stride).tolist()

    def pages_of(self, slot: int) -> list[int]:
        """Return all pages of the sequence in this slot; each kind is in order."""
        held = self.first_pages(slot, int(self.num_pages[slot]))
        if self.window_block_table is None:
            return held
        return self.window_pages(slot, int(self.window_begin[slot]), int(self.window_end[slot])) + held

    def drop_pages(self, slot: int, end: int) -> list[int]:
        """Detach the pages after the sequence's first `end` tokens and return them; the caller releases them."""
        num_kept = -(-end // self.pages.page_size)
        dropped = self.first_pages(slot, int(self.num_pages[slot]))[num_kept:]
        self.num_pages[slot] = min(num_kept, self.num_pages[slot])
        if self.window_block_table is not None:
            num_kept = -(-end // self.pages.block_size)
            dropped += self.window_pages(slot, num_kept, int(self.window_end[slot]))
            self.window_end[slot] = min(num_kept, self.window_end[slot])
        return dropped

    def drop_passed(self, slot_S: np.ndarray) -> list[int]:
        """Detach the pages that no later query of these sequences sees, and return them; the caller releases them."""
        if self.window_block_table is None:
            return []
        computed_S = self.num_computed[slot_S]
        if not self.generates[slot_S].all():  # a reader may continue the prompt again
            limit_S = np.where(self.generates[slot_S], _LARGEST, self.num_prompt[slot_S] - 1)
            computed_S = np.minimum(computed_S, limit_S)
        begin_S, dropped = self.pages.first_seen(computed_S), []
        passed = np.flatnonzero(begin_S > self.window_begin[slot_S])
        for slot, begin in zip(slot_S[passed].tolist(), begin_S[passed].tolist()):
            dropped += self.window_pages(slot, int(self.window_begin[slot]), begin)
            self.window_begin[slot] = begin
            self._hide_passed(slot)
        return dropped

    def _hide_passed(self, slot: int) -> None:
        """Replace blocks that the sequence no longer has by one that it has: kernels may read some keys before the
        window, and ignore them, but those of another sequence might not be finite."""
        assert self.window_block_table is not None
        begin = self.window_begin[slot]
        self.window_block_table[slot, :begin] = self.window_block_table[slot, begin]

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
        del sequence.hashes[first_position // self.pages.page_size :]
        self.num_known[slot], self.num_computed[slot] = end, first_position
        if self.has_states:  # those after the prompt are computed again, or all, if the states contain some of them
            num_prompt = sequence.num_prompt
            self.num_computed[slot] = num_prompt if self.num_applied[slot] <= num_prompt else 0
            self.set_cut(slot, None)
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
