"""What a model makes of known texts: its logits after every token of them, computed by the engine's own runner.

Rows are packed into steps of bounded size, a long row into several, so that the logits of a large vocabulary never lie
in memory for a whole text. Two engines given the same rows and the same bound cut them alike, so that their chunks can
be compared one by one.

Shape suffixes: S pieces of a step, T tokens of a step, R tokens of a piece, M most blocks of a row, V vocabulary.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pipeline.engine.forward.runner import Runner
from pipeline.engine.schedule.sequence import ranges
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """Tokens start <= i < stop of row `row`."""

    row: int
    start: int
    stop: int


class Blocks(Protocol):
    """Where blocks are borrowed: a `BlockPool`, or `ReservedBlocks`."""

    block_size: int

    @property
    def num_free(self) -> int: ...
    def allocate(self, count: int) -> list[int]: ...
    def release(self, blocks: Sequence[int]) -> None: ...


class ReservedBlocks:
    """The blocks `first` to `first + count - 1` of a KV cache, which no request gets."""

    def __init__(self, first: int, count: int, block_size: int) -> None:
        self.block_size, self._free = block_size, list(range(first, first + count))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self._free), "allocate more blocks than are free"
        blocks, self._free = self._free[:count], self._free[count:]
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        self._free += blocks


def prompt_logits(
    runner: Runner, pool: Blocks, rows: Sequence[Sequence[int]], max_tokens: int
) -> Generator[tuple[Piece, torch.Tensor], None, None]:
    """Each piece of each row, in order, with the logits (R, V) in float32 after its tokens; at most `max_tokens`
    tokens are computed at once.

    Blocks are borrowed from `pool` and given back. Raises ConfigError when a row needs more than there are.
    """
    blocks: dict[int, list[int]] = {}
    try:
        for step in _steps(rows, max_tokens, pool.block_size, pool.num_free):
            for piece in step:
                if piece.start == 0:
                    blocks[piece.row] = pool.allocate(-(-len(rows[piece.row]) // pool.block_size))
            logits_TV = runner.execute(_input_of(step, rows, blocks, pool.block_size))
            end = 0
            for piece in step:
                begin, end = end, end + piece.stop - piece.start
                yield piece, logits_TV[begin:end].float()
                if piece.stop == len(rows[piece.row]):
                    pool.release(blocks.pop(piece.row))
    finally:
        for held in blocks.values():
            pool.release(held)


def _steps(rows: Sequence[Sequence[int]], max_tokens: int, block_size: int, num_free: int) -> Iterator[list[Piece]]:
    """Pieces of the rows in order: as many as fit `max_tokens` tokens and, whole rows, `num_free` blocks."""
    step: list[Piece] = []
    room, free = max_tokens, num_free
    for row, token_ids in enumerate(rows):
        need = -(-len(token_ids) // block_size)
        if need > num_free:
            raise ConfigError(
                f"a row of {len(token_ids)} tokens needs {need} KV blocks of {block_size}, and {num_free} are free; "
                "raise engine.kv_cache_memory_bytes or lower engine.max_model_len"
            )
        if need > free and step:
            yield step
            step, room, free = [], max_tokens, num_free
        free -= need
        for start in _cuts(len(token_ids), room, max_tokens):
            stop = min(len(token_ids), start + room)
            step.append(Piece(row, start, stop))
            room -= stop - start
            if room == 0:
                yield step
                step, room, free = [], max_tokens, num_free - (need if stop < len(token_ids) else 0)
    if step:
        yield step


def _cuts(length: int, first: int, rest: int) -> range | list[int]:
    """Where the pieces of a row begin, when the first has room for `first` tokens and the others for `rest`."""
    return [0, *range(first, length, rest)] if length > 0 else []


def _input_of(
    step: list[Piece], rows: Sequence[Sequence[int]], blocks: dict[int, list[int]], block_size: int
) -> StepInput:
    start_S = np.array([piece.start for piece in step])
    stop_S = np.array([piece.stop for piece in step])
    count_S = stop_S - start_S
    position_T = ranges(start_S, count_S)
    piece_T = np.repeat(np.arange(len(step)), count_S)
    block_table_SM = np.zeros((len(step), max(len(blocks[piece.row]) for piece in step)), dtype=np.int32)
    for s, piece in enumerate(step):
        block_table_SM[s, : len(blocks[piece.row])] = blocks[piece.row]
    return StepInput(
        token_id_T=np.concatenate([np.array(rows[p.row][p.start : p.stop], dtype=np.int64) for p in step]),
        position_T=position_T,
        slot_mapping_T=block_table_SM[piece_T, position_T // block_size].astype(np.int64) * block_size
        + position_T % block_size,
        query_start_S1=np.concatenate([[0], np.cumsum(count_S)]).astype(np.int32),
        context_len_S=stop_S.astype(np.int32),
        block_table_SM=block_table_SM,
        logit_row_R=np.arange(len(position_T)),
    )
