"""Bookkeeping of the paged KV cache: free blocks, shared blocks, and blocks of known prefixes. No torch.

A block here is what is allocated: a page, if layers share them (`roofline/kv_pages.py`).

A block is in exactly one of two states: held (reference count above 0) or free (in the LRU queue). A free block keeps
its content and its hash until it is allocated again, so an unused prefix can still be found. All operations are O(1)
per block. They are loops of a few cheap operations: the blocks of a sequence were last touched long before, so each
object access is a cache miss of the processor, and array operations cost more than a dozen blocks do.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from pipeline.roofline.kv_pages import KVPages

ROOT = b""


def chain_root(adapter: str | None) -> bytes:
    """Return the parent of the first blocks of a text: adapters compute other keys and values, so those with different
    adapters share no block."""
    return ROOT if adapter is None else blake2b(adapter.encode(), digest_size=16).digest()


def chain_hashes(parent: bytes, token_ids: np.ndarray, block_size: int) -> list[bytes]:
    """Return the hashes of the full blocks of `token_ids`: each covers a block's tokens and everything before it
    (16 bytes of BLAKE2b)."""
    content, width = token_ids.astype(np.int32, copy=False).tobytes(), 4 * block_size
    hashes = []
    for offset in range(0, len(content), width):
        parent = blake2b(parent + content[offset : offset + width], digest_size=16).digest()
        hashes.append(parent)
    return hashes


def window_hashes(hashes: Sequence[bytes], blocks: Iterable[int], blocks_per_page: int) -> list[bytes]:
    """Return the keys of these blocks of the layers with a window. hashes: of the pages of the other layers, which
    contain the same tokens."""
    return [hashes[block // blocks_per_page] + (block % blocks_per_page).to_bytes(4) for block in blocks]


class BlockPool:
    """Blocks 0..num_blocks-1 with reference counts, a prefix index by chain hash, and LRU reuse."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.generation = np.zeros(num_blocks, dtype=np.int64)  # number of the last allocation that returned each block
        self._num_allocations = 0
        self._ref_count = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # invariant: _hash[_block_of[h]] == h
        # Free blocks, least recently used first. Sharing a free block leaves a stale queue entry;
        # `_num_stale[block]` counts how many of its entries to skip.
        self._queue = deque(range(num_blocks))
        self._num_stale = [0] * num_blocks
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        return self.num_blocks - self._num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks and drop their hashes. The caller has checked `num_free`."""
        assert count <= self._num_free, "allocate more blocks than are free"
        ref_count, hashes, block_of, num_stale = self._ref_count, self._hash, self._block_of, self._num_stale
        blocks = []
        while len(blocks) < count:
            block = self._queue.popleft()
            if num_stale[block]:
                num_stale[block] -= 1
                continue
            blocks.append(block)
            ref_count[block] = 1
            key = hashes[block]
            if key is not None:
                del block_of[key]
                hashes[block] = None
        self._num_free -= count
        self._num_allocations += 1
        self.generation[blocks] = self._num_allocations
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of a hash chain."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find_window(self, hashes: Sequence[bytes], pages: KVPages) -> tuple[int, list[int]]:
        """Return the longest prefix of a hash chain, in hashes, with all blocks that its next query sees in layers with
        a window, and these blocks."""
        per_page = pages.blocks_per_page
        end, block = len(hashes), len(hashes) * per_page
        found: list[int] = []
        while end:
            begin = int(pages.first_seen(end * pages.page_size))
            if block <= begin:
                return end, found[: end * per_page - begin][::-1]
            block -= 1
            (key,) = window_hashes(hashes, [block], per_page)
            page = self._block_of.get(key)
            if page is None:  # no prefix that sees this block
                end = block // per_page
                found, block = [], end * per_page
            else:
                found.append(page)
        return 0, []

    def findable(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return those of `blocks` that are the registered ones of their prefix, and the others."""
        found, others = [], []
        for block in blocks:
            (others if self._hash[block] is None else found).append(block)
        return found, others

    def num_free_of(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are free."""
        ref_count = self._ref_count
        return sum([ref_count[block] == 0 for block in blocks])

    def held_once(self, blocks: Iterable[int]) -> list[int]:
        """Return those of `blocks` that have a single holder."""
        return [block for block in blocks if self._ref_count[block] == 1]

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, removing it from the free queue if needed."""
        for block in blocks:
            if self._ref_count[block] == 0:
                self._num_stale[block] += 1
                self._num_free -= 1
            self._ref_count[block] += 1
        if len(self._queue) > 2 * self.num_blocks:
            self._queue, self._num_stale = deque(self._free_blocks()), [0] * self.num_blocks

    def register(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Make full blocks findable. If a prefix is known already, its first block stays registered."""
        ref_count, hashes, block_of = self._ref_count, self._hash, self._block_of
        for block, key in zip(blocks, keys):
            assert ref_count[block] > 0, "register a free block"
            if hashes[block] is None and block_of.setdefault(key, block) == block:
                hashes[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in order; the last ones are reused first."""
        ref_count, hashes, queue, num_freed = self._ref_count, self._hash, self._queue, 0
        for block in reversed(blocks):
            count = ref_count[block] = ref_count[block] - 1
            assert count >= 0, "release a free block"
            if count == 0:
                num_freed += 1
                if hashes[block] is not None:
                    queue.append(block)
                    continue
                while self._num_stale[block]:  # was findable once and was forgotten: rare
                    queue.remove(block)
                    self._num_stale[block] -= 1
                queue.appendleft(block)
        self._num_free += num_freed

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable because their content is not valid."""
        for block in blocks:
            key = self._hash[block]
            if key is not None:
                del self._block_of[key]
                self._hash[block] = None

    def _free_blocks(self) -> list[int]:
        """Return the free blocks in queue order."""
        num_stale, free = self._num_stale.copy(), []
        for block in self._queue:
            if num_stale[block]:
                num_stale[block] -= 1
            else:
                free.append(block)
        return free

    def check(self) -> None:
        """Assert every invariant; O(num_blocks), for tests."""
        free = self._free_blocks()
        assert len(free) == len(set(free)) == self._num_free, "the queue must hold each free block once"
        free = set(free)
        for block in range(self.num_blocks):
            assert self._ref_count[block] >= 0
            assert (self._ref_count[block] == 0) == (block in free), f"block {block} is both held and free, or neither"
            key = self._hash[block]
            assert key is None or self._block_of[key] == block, f"block {block} and its hash disagree"
        for key, block in self._block_of.items():
            assert self._hash[block] == key
