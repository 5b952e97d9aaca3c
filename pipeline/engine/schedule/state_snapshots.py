"""Copies of states at the ends of prefixes that rows share, and the copies to make before the next step. No torch.

A layer with a state (`kernels/delta_net.py`) cannot continue a prefix from its KV blocks alone. So a row that begins a
prefix, of which the next waiting row has some pages too, stops at the end of these pages, and its states are copied to
a snapshot. Rows with this prefix wait for it, and begin with a copy of the snapshot. What they share beyond the last
whole page is computed by each.
"""

from collections.abc import Sequence


class StateSnapshots:
    """Snapshots by the hash of their prefix's last page, the least recently used one replaced first."""

    def __init__(self, first_slot: int, num_snapshots: int) -> None:
        """first_slot: of the snapshots' states, which follow those of the running sequences."""
        self._free = list(range(first_slot, first_slot + num_snapshots))
        self._slot_of: dict[bytes, int] = {}  # the least recently used one first
        self.copies: list[tuple[int, int]] = []
        """Slots from and to which states are copied before the next step, in this order."""

    def longest(self, hashes: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of a chain with a snapshot."""
        return next((end for end in range(len(hashes), 0, -1) if hashes[end - 1] in self._slot_of), 0)

    def save(self, key: bytes, slot: int) -> None:
        """Copy the states of a sequence to a snapshot, unless there is one."""
        known = self._slot_of.pop(key, None)
        if known is None and (self._free or self._slot_of):
            known = self._free.pop() if self._free else self._slot_of.pop(next(iter(self._slot_of)))
            self.copies.append((slot, known))
        if known is not None:
            self._slot_of[key] = known

    def restore(self, key: bytes, slot: int) -> None:
        """Copy a snapshot to the states of a sequence."""
        self._slot_of[key] = self._slot_of.pop(key)
        self.copies.append((self._slot_of[key], slot))
