"""The peak of the blocks that sequences hold, against a count of each step to the end."""

import numpy as np
import pytest

from pipeline.engine.schedule.admission import BlockDemand


def counted_peak(known_S, end_S, held_S, freed_S, size: int) -> float:
    """Step by step: each that runs holds its tokens' blocks and half a one, one that has ended gave back its own."""
    most = -np.inf
    for steps in range(1, int((end_S - known_S).max(initial=1)) + 1):
        runs_S = np.maximum(end_S - known_S, 1) >= steps
        most = max(most, np.where(runs_S, (known_S + steps) / size + 0.5 - held_S, -freed_S).sum())
    return float(most)


def some(rng: np.random.Generator, count: int, size: int):
    known_S = rng.integers(1, 60, count)
    end_S = known_S + 2 + rng.permutation(80)[:count]  # each at another step
    end_S[:1] = known_S[:1] - 3  # has passed
    held_S = -(-known_S // size)
    return known_S, end_S, held_S, held_S - rng.integers(0, held_S + 1)


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_most_of_any_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 4, 16]))
    of = some(rng, int(rng.integers(1, 12)), size)
    assert BlockDemand.of(*of, size).peak == pytest.approx(counted_peak(*of, size))


@pytest.mark.parametrize("seed", range(20))
def test_sequences_added_count_as_if_they_had_been_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, count = int(rng.choice([1, 4, 16])), int(rng.integers(0, 6))
    known_S, end_S, held_S, freed_S = some(rng, count + 4, size)
    held_S[count:], freed_S[count:] = rng.integers(0, held_S[count:] + 1), 0  # of others, so not free after its end
    demand = BlockDemand.of(known_S[:count], end_S[:count], held_S[:count], freed_S[:count], size)
    for s in range(count, count + 4):
        demand = demand.add(int(known_S[s]), int(end_S[s]), int(held_S[s]))
        of = (known_S[: s + 1], end_S[: s + 1], held_S[: s + 1], freed_S[: s + 1], size)
        assert demand.peak == pytest.approx(BlockDemand.of(*of).peak) == pytest.approx(counted_peak(*of))


def test_where_several_end_at_once_it_is_no_less_and_hardly_more() -> None:
    rng = np.random.default_rng(7)
    for _ in range(50):
        known_S, end_S, held_S, freed_S = some(rng, 8, 16)
        end_S = known_S + rng.integers(1, 4, 8)
        found = BlockDemand.of(known_S, end_S, held_S, freed_S, 16).peak
        counted = counted_peak(known_S, end_S, held_S, freed_S, 16)
        assert counted - 1e-6 <= found <= counted + 8 * 0.5
