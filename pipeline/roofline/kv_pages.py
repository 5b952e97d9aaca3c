"""Pages of the KV cache, which layers with and without a sliding window share. No torch.

A query of a layer with a window W sees the last W tokens only, so blocks before them can be freed. A page is what the
pool allocates: it holds one block of all layers with a window, or `blocks_per_page` consecutive blocks of all layers
without one, whichever a sequence asks for. So memory moves between the two kinds as the lengths of a job require, and
each kind has one block table. All layers are in one buffer. A layer's view of it begins with its block of page 0, so a
block has the same id in all layers of its kind:

    all tokens:  p * stride + j * num_layers    for block j < blocks_per_page of page p
    window:      p * window_stride
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class KVPages:
    """Division of the KV cache into pages.

    block_size: tokens of a block. page_bytes: of all layers. window: W, the largest of the layers'; None: all layers
    keep all tokens, and a page is one block of each. num_layers: that keep all tokens. The strides are blocks in a
    page, used or not.
    """

    block_size: int
    page_bytes: int
    window: int | None = None
    blocks_per_page: int = 1
    num_layers: int = 1
    stride: int = 1
    window_stride: int = 1

    @property
    def page_size(self) -> int:
        """Tokens in a page of the layers that keep all of them."""
        return self.block_size * self.blocks_per_page

    def num_pages(self, num_tokens: int, num_new: int = 1) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds in the step that computes the last
        `num_new` of them."""
        pages = -(-num_tokens // self.page_size)
        if self.window is not None:
            seen = -(-(self.window + num_new - 2) // self.block_size) + 1
            pages += min(-(-num_tokens // self.block_size), seen)
        return pages

    def num_new(self, num_computed: int, num_new: int) -> tuple[int, int]:
        """Return the pages of both kinds to add for the next `num_new` tokens of a sequence whose first `num_computed`
        tokens, whole pages, have theirs."""
        end = num_computed + num_new
        window_blocks = 0 if self.window is None else -(-end // self.block_size) - num_computed // self.block_size
        return -(-end // self.page_size) - num_computed // self.page_size, window_blocks

    def max_tokens(self, num_pages: int) -> int:
        """Return the length of the longest sequence that `num_pages` pages hold."""
        if self.window is None:
            return num_pages * self.page_size
        fits, over = 0, num_pages * self.page_size + 1
        while over - fits > 1:
            middle = (fits + over) // 2
            fits, over = (middle, over) if self.num_pages(middle) <= num_pages else (fits, middle)
        return fits

    def block_ids(self, page_P: np.ndarray, windowed: bool) -> np.ndarray:
        """Return the ids of the blocks in each of these pages, in order."""
        if windowed:
            return page_P * self.window_stride
        if self.window is None:
            return page_P
        return (page_P[:, None] * self.stride + np.arange(self.blocks_per_page) * self.num_layers).ravel()

    def first_seen(self, position_S: NDArray[np.integer] | int) -> Any:
        """Return the first block that queries from these positions on see in layers with a window."""
        assert self.window is not None
        return np.maximum(position_S - self.window + 1, 0) // self.block_size

    def growth(self, known_S: np.ndarray, end_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean number of pages of sequences of known_S tokens that will have end_S, and how many each takes
        per token on the way. Half of each last page is empty on average.

        A window that a sequence fills on the way counts as full from the beginning.
        """
        num_S, rate_S = known_S / self.page_size + 0.5, np.full(len(known_S), 1 / self.page_size)
        if self.window is None:
            return num_S, rate_S
        fills_S = end_S > self.window
        num_S += np.where(fills_S, self.window / self.block_size + 1.0, known_S / self.block_size + 0.5)
        return num_S, rate_S + np.where(fills_S, 0.0, 1 / self.block_size)

    def growth_of(self, known: int, end: int) -> tuple[float, float]:
        """Do the same as `growth` for one sequence, without arrays, which take longer for one element."""
        num, rate = known / self.page_size + 0.5, 1 / self.page_size
        if self.window is None:
            return num, rate
        if end > self.window:
            return num + self.window / self.block_size + 1.0, rate
        return num + known / self.block_size + 0.5, rate + 1 / self.block_size
