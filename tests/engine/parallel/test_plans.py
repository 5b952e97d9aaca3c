"""Arrays of steps in shared memory."""

import numpy as np

from pipeline.engine.parallel.plans import PlanMemory


def test_arrays_arrive_as_they_were() -> None:
    """The leader and the rank map the memory separately."""
    fd = PlanMemory.create(1 << 20)
    leader, rank = PlanMemory(fd), PlanMemory(fd)
    sent = [np.array([-1, 1 << 40]), None, np.arange(6, dtype=np.int32).reshape(2, 3)[:, 1:], np.array([], dtype=bool)]
    for _ in range(2):
        method, found = rank.read(leader.write("execute", sent))
        assert method == "execute"
        assert found[1] is None
        for one, other in zip(sent, found, strict=True):
            if one is not None:
                assert other is not None
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert np.array_equal(one, other)
        sent.reverse()
        sent[1], sent[2] = sent[2], sent[1]
