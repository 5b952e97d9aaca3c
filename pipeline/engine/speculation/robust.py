"""A moving median: what a quantity is lately, whatever a disturbed machine says now and then."""

from collections import deque


class MovingMedian:
    """Of the last `size` values. Fewer than half may be wild; a lasting change is followed after half of them."""

    def __init__(self, size: int) -> None:
        assert size >= 1
        self._values: deque[float] = deque(maxlen=size)
        self.value = 0.0  # 0 before anything was added

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> float:
        """Take one value in and return the new median; O(size log size) with a size of tens."""
        self._values.append(value)
        ordered = sorted(self._values)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            self.value = ordered[middle]
        else:
            self.value = 0.5 * (ordered[middle - 1] + ordered[middle])
        return self.value
