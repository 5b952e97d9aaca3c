"""The paged KV cache's bookkeeping: which blocks are free, who shares them, which hold a known prefix. No torch.

A block is in exactly one of two states: held (reference count above 0) or free (in the LRU queue). A free block keeps
its content and its hash until it is handed out again, so a prefix that nobody holds can still be found. All operations
are O(1) a block.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

ROOT = b""


def chain_hashes(parent: bytes, token_ids: np.ndarray, block_size: int) -> list[bytes]:
    """The identities of the full blocks that `token_ids` fill: each is made of a block's tokens and of everything
    before it (16 bytes of BLAKE2b)."""
    content, width = token_ids.astype(np.int32, copy=False).tobytes(), 4 * block_size
    hashes = []
    for at in range(0, len(content), width):
        parent = blake2b(parent + content[at : at + width], digest_size=16).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """Blocks 0..num_blocks-1 with reference counts, a prefix index by chain hash, and LRU reuse."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.generation = np.zeros(num_blocks, dtype=np.int64)  # how often each was handed out anew
        self._ref_count = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}  # invariant: _hash[_block_of[h]] == h
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, forgetting what they held. The caller has checked `num_free`."""
        assert count <= len(self._free), "allocate more blocks than are free"
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._ref_count[block] = 1
        self.generation[blocks] += 1
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a hash chain. Changes nothing."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def is_free(self, block: int) -> bool:
        return self._ref_count[block] == 0

    def held_once(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that have a single holder."""
        return [block for block in blocks if self._ref_count[block] == 1]

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each, out of the free queue where need be."""
        for block in blocks:
            if self._ref_count[block] == 0:
                del self._free[block]
            self._ref_count[block] += 1

    def register(self, block: int, key: bytes) -> None:
        """Make a full block findable. Where the same prefix is known already, the first block stays the known one."""
        assert self._ref_count[block] > 0, "register a block nobody holds"
        if key not in self._block_of and self._hash[block] is None:
            self._block_of[key] = block
            self._hash[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each of a sequence's blocks, given in order; the last ones are reused first."""
        for block in reversed(blocks):
            self._ref_count[block] -= 1
            assert self._ref_count[block] >= 0, "release a block nobody holds"
            if self._ref_count[block] == 0:
                self._free[block] = None
                if self._hash[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable (their content is not to be trusted)."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._hash[block]
        if key is not None:
            del self._block_of[key]
            self._hash[block] = None

    def check(self) -> None:
        """Assert every invariant; O(num_blocks), for tests."""
        for block in range(self.num_blocks):
            assert self._ref_count[block] >= 0
            assert (self._ref_count[block] == 0) == (block in self._free), f"block {block} is in both states or none"
            key = self._hash[block]
            assert key is None or self._block_of[key] == block, f"block {block} is not where its hash points"
        for key, block in self._block_of.items():
            assert self._hash[block] == key
