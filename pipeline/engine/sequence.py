"""A running request: a `Sequence` for the cold facts, slot-indexed arrays for the counters of every step. No torch.

Planning a step reads and writes only the arrays, so it costs no Python per sequence; a `Sequence` is touched when it is
admitted, when it crosses a block border and when it ends. For every occupied slot, while it runs:

    0 <= num_computed < num_known <= limit        num_blocks * block_size >= num_computed
"""

from dataclasses import dataclass, field

import numpy as np

from pipeline.engine.block_pool import ROOT, chain_hash
from pipeline.engine.detokenizer import StopChecker
from pipeline.engine.params import Request, TokenLogprobs


@dataclass
class Sequence:
    """One request on its way. `token_ids` is the prompt and, after a preemption, what was generated too."""

    request: Request
    token_ids: np.ndarray  # int32
    order: int  # of arrival; older sequences are served first
    seed: int = 0  # of its random numbers, with the position
    queued_us: int = 0  # when it was added, on the machine's monotonic clock
    first_token_us: int = 0  # when its first token was appended, whatever happened later; 0: not yet
    slot: int = -1  # -1: not running
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # chain hashes of full blocks of known tokens, as far as needed
    num_prompt: int = 0
    num_cached: int = -1  # prompt tokens found in shared blocks at the first admission; -1: not admitted yet
    high_water: int = 0  # tokens computed before a preemption; computing them again is repeated work
    logprobs: list[TokenLogprobs] | None = None
    stop_checker: StopChecker | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_token_ids)
        if self.request.params.logprobs is not None:
            self.logprobs = []

    def extend_hashes(self, token_ids: np.ndarray, num_blocks: int, block_size: int) -> None:
        """Make `hashes` cover the first `num_blocks` full blocks of `token_ids`."""
        for index in range(len(self.hashes), num_blocks):
            parent = self.hashes[-1] if self.hashes else ROOT
            self.hashes.append(chain_hash(parent, token_ids[index * block_size : (index + 1) * block_size]))


class SlotTable:
    """The counters of all running sequences, indexed by slot. Memory pages are touched only when used."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.num_slots, self.max_model_len, self.block_size = num_slots, max_model_len, block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(num_slots, dtype=np.int64)
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.num_computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.limit = np.zeros(
            num_slots, dtype=np.int64
        )  # most tokens it may come to: prompt + max_tokens, or the context
        self.repeat_until = np.zeros(num_slots, dtype=np.int64)
        self.stops_at_eos = np.zeros(num_slots, dtype=bool)
        self.min_known = np.zeros(num_slots, dtype=np.int64)  # no stop condition before this many known tokens
        self.has_stops = np.zeros(num_slots, dtype=bool)  # stop strings or stop token ids: looked at one by one
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.last_step = np.zeros(num_slots, dtype=np.int64)  # number of the last step that computed some of it
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def occupy(self, sequence: Sequence) -> int:
        """Give `sequence` a slot; its counters start at zero computed tokens and no blocks."""
        slot = self._free_slots.pop()
        params, known = sequence.request.params, len(sequence.token_ids)
        self.sequences[slot], sequence.slot = sequence, slot
        self.token_ids[slot, :known] = sequence.token_ids
        self.num_known[slot], self.num_computed[slot], self.num_blocks[slot] = known, 0, 0
        self.num_prompt[slot] = sequence.num_prompt
        self.limit[slot] = min(sequence.num_prompt + params.max_tokens, self.max_model_len)
        self.repeat_until[slot] = sequence.high_water
        self.stops_at_eos[slot] = not params.ignore_eos
        self.min_known[slot] = sequence.num_prompt + params.min_tokens
        self.has_stops[slot] = bool(params.stop or params.stop_token_ids)
        self.seed[slot] = sequence.seed & 0xFFFFFFFFFFFFFFFF
        self.last_step[slot] = 0
        return slot

    def append_blocks(self, slot: int, blocks: list[int]) -> None:
        sequence = self.at(slot)
        first = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        self.block_table[slot, first : first + len(blocks)] = blocks
        self.num_blocks[slot] = first + len(blocks)

    def drop_uncomputed_blocks(self, slot: int) -> list[int]:
        """Take the blocks that hold no computed token off the sequence; they are the caller's to release."""
        sequence = self.at(slot)
        kept = -(-int(self.num_computed[slot]) // self.block_size)
        dropped, sequence.blocks = sequence.blocks[kept:], sequence.blocks[:kept]
        self.num_blocks[slot] = kept
        return dropped

    def vacate(self, slot: int) -> Sequence:
        """Free the slot and give the sequence its known tokens back. Its blocks are the caller's to release."""
        sequence = self.at(slot)
        sequence.token_ids = self.token_ids[slot, : self.num_known[slot]].copy()
        sequence.slot = -1
        self.sequences[slot] = None
        self._free_slots.append(slot)
        return sequence

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence
