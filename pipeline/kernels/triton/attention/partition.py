"""Partition of key tiles among a fixed number of programs: equal numbers of tiles, whatever the sequences' lengths."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Partition:
    """Runs of tiles, split into items I in the order of the programs that compute them.

    Item i is the tiles begin_I[i] to end_I[i] of run of_I[i], which is split into pieces_S[of_I[i]] items; program p
    computes the items program_start[p] to program_start[p + 1].
    """

    of_I: np.ndarray
    begin_I: np.ndarray
    end_I: np.ndarray
    pieces_S: np.ndarray
    program_start: np.ndarray


def partition(begin_S: np.ndarray, end_S: np.ndarray, num_programs: int, min_tiles: int = 1) -> Partition:
    """Split the tiles begin_S to end_S (at least one) of each run among `num_programs` programs.

    Each program computes the same number of tiles, at least `min_tiles`; the last programs may have fewer, or none.
    """
    count_S = (end_S - begin_S).astype(np.int64)
    start_S = np.cumsum(count_S) - count_S
    total = int(count_S.sum())
    per_program = max(min_tiles, -(-total // num_programs))
    program_begin = np.minimum(np.arange(num_programs + 1) * per_program, total)
    start_I = np.union1d(start_S, program_begin[:-1][program_begin[:-1] < total])
    pieces_S = np.diff(np.searchsorted(start_I, np.append(start_S, total)))
    of_I = np.repeat(np.arange(len(count_S)), pieces_S)
    shift_I = begin_S[of_I] - start_S[of_I]
    stop_I = np.append(start_I[1:], total)
    return Partition(of_I, start_I + shift_I, stop_I + shift_I, pieces_S, np.searchsorted(start_I, program_begin))
