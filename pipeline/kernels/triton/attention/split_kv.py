"""Work dealt equally to a fixed number of programs, and the numbers that programs are told, in one device tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNED = 4  # numbers of 4 bytes: see `Launch`


@dataclass(frozen=True)
class Cut:
    """Runs of tiles, cut into items I in the order of the lanes that take them.

    Item i is the tiles begin_I[i] to end_I[i] of run of_I[i], which is cut into pieces_S[of_I[i]] items; lane l takes
    the items lane_start[l] to lane_start[l + 1].
    """

    of_I: np.ndarray
    begin_I: np.ndarray
    end_I: np.ndarray
    pieces_S: np.ndarray
    lane_start: np.ndarray


def cut(begin_S: np.ndarray, end_S: np.ndarray, num_lanes: int) -> Cut:
    """Deal the tiles begin_S to end_S (at least one) of each run to `num_lanes` lanes.

    Each lane takes as many tiles as any other, or up to as many in the last ones.
    """
    count_S = (end_S - begin_S).astype(np.int64)
    start_S = np.cumsum(count_S) - count_S
    total = int(count_S.sum())
    per_lane = max(1, -(-total // num_lanes))
    lane_begin = np.minimum(np.arange(num_lanes + 1) * per_lane, total)
    start_I = np.union1d(start_S, lane_begin[:-1][lane_begin[:-1] < total])
    pieces_S = np.diff(np.searchsorted(start_I, np.append(start_S, total)))
    of_I = np.repeat(np.arange(len(count_S)), pieces_S)
    shift_I = begin_S[of_I] - start_S[of_I]
    stop_I = np.append(start_I[1:], total)
    return Cut(of_I, start_I + shift_I, stop_I + shift_I, pieces_S, np.searchsorted(start_I, lane_begin))


class Numbers:
    """Views of one int32 tensor, each aligned, which one copy fills."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        self.tensor = torch.zeros(sum(self._padded), dtype=torch.int32, device=device)
        self.views = [part[:size] for part, size in zip(self.tensor.split(self._padded), sizes)]

    def fill(self, values: Sequence[np.ndarray]) -> None:
        """Overwrite the first of each view. The copy is queued on the current stream and waits for nothing."""
        staged = staging(self.tensor.shape, self.tensor.device)
        filled, offset = staged.numpy(), 0
        for some, view, padded in zip(values, self.views, self._padded, strict=True):
            assert some.size <= view.numel(), "more than the work was allocated for"
            filled[offset : offset + some.size] = some.ravel()
            offset += padded
        self.tensor.copy_(staged, non_blocking=True)


def staging(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 memory on the host, pinned where a GPU copies from it. torch keeps it until its copy is done."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
