"""The block pool against a plain model, after every random operation."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.engine.schedule.block_pool import ROOT, BlockPool, chain_hashes


class PoolMachine(RuleBasedStateMachine):
    """Sequences allocate, share, register and release; a model of sets and lists says what must hold."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 4)
        self.held: list[list[int]] = []  # blocks of each living sequence, in order
        self.known: dict[bytes, int] = {}  # what must be findable
        self.lru = list(range(num_blocks))  # free blocks, next to be handed out first

    @precondition(lambda self: self.lru)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.lru)))
        expected, self.lru = self.lru[:count], self.lru[count:]
        self.known = {key: block for key, block in self.known.items() if block not in expected}
        assert self.pool.allocate(count) == expected
        self.held.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 3))
    def register(self, data: st.DataObject, token: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        (key,) = chain_hashes(ROOT, np.array([token] * 4), 4)
        self.pool.register([block], [key])
        if key not in self.known and block not in self.known.values():
            self.known[key] = block

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.forget(blocks)
        self.known = {key: block for key, block in self.known.items() if block not in blocks}

    @precondition(lambda self: self.known)
    @rule(data=st.data(), times=st.integers(1, 40))
    def share_and_release(self, data: st.DataObject, times: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        for _ in range(times):
            block = self.known[key]
            self.pool.share([block])
            self.pool.release([block])
        if block in self.lru:
            self.lru.remove(block)
            self.lru.append(block)
        assert len(self.pool._queue) <= 2 * self.pool.num_blocks + 1, "entries that are left behind pile up"

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        found = self.pool.find([key, b"unknown"])
        assert found == [self.known[key]]
        self.pool.share(found)
        self.lru = [b for b in self.lru if b not in found]
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if not any(block in others for others in self.held):
                if block in self.known.values():
                    self.lru.append(block)
                else:
                    self.lru.insert(0, block)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == len(self.lru)
        assert self.pool.num_held == len({b for blocks in self.held for b in blocks})
        for key, block in self.known.items():
            assert self.pool.find([key]) == [block]


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_hash_depends_on_its_block_and_everything_before() -> None:
    first, second = np.array([1, 2]), np.array([3, 4])
    (of_first,), (of_second,) = chain_hashes(ROOT, first, 2), chain_hashes(ROOT, second, 2)
    assert chain_hashes(of_first, second, 2) != chain_hashes(of_second, second, 2)
    both = chain_hashes(ROOT, np.array([1, 2, 3, 4], dtype=np.int32), 2)
    assert both == [of_first, *chain_hashes(of_first, second, 2)]
    assert chain_hashes(ROOT, np.array([1, 2, 3, 5]), 2) == [of_first, *chain_hashes(of_first, np.array([3, 5]), 2)]
    assert chain_hashes(ROOT, first[:0], 2) == []


def test_releasing_what_nobody_holds_is_caught() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="free block"):
        pool.release(blocks)
