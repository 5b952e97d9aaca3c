"""Blocks of prompts that a request is about to continue. They are held only while no running row lacks blocks.

If all blocks are in use, those of a row that ends would be given to the next waiting row before the follow-up of the
first arrives. They are held until then, for a limited number of steps.

Layers with a window release the blocks at the end of a prefix while rows with this prefix still run. Those that the
next waiting row will see are held until it is admitted: if one is missing, the row computes its whole prefix.
"""

from collections.abc import Iterable

from pipeline.engine.schedule.block_pool import BlockPool

# A follow-up arrives within a few steps. Later the least recently used blocks are reused first, as always: a row may
# also end without one, and its blocks must not keep others waiting.
MAX_STEPS = 16


class HeldPrompts:
    """References to the findable blocks of ended prompts. Empty unless requests expect follow-ups."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.prompts: dict[int, tuple[int, list[int]]] = {}
        """By its last block: the step until which it is held, and its blocks. The oldest first."""
        self._window: list[int] = []  # of the next waiting row

    @property
    def holds_any(self) -> bool:
        return bool(self.prompts or self._window)

    def hold_window(self, blocks: list[int]) -> None:
        """Hold these blocks of layers with a window for the next waiting row, instead of those held before."""
        if blocks != self._window:
            self._pool.share(blocks)
            self._pool.release(self._window)
            self._window = blocks

    def hold(self, blocks: list[int], step: int) -> None:
        """Take over the caller's references to the blocks of a sequence that ended in this step."""
        found, others = self._pool.findable(blocks)
        self._pool.release(others)
        if found and found[-1] not in self.prompts:
            self.prompts[found[-1]] = step + MAX_STEPS, found
        else:
            self._pool.release(found)

    def expire(self, step: int) -> None:
        """Release the prompts without a follow-up until this step."""
        for last, (until, _) in list(self.prompts.items()):
            if until > step:
                break
            self._release(last)

    def continued(self, blocks: Iterable[int]) -> None:
        """Release the prompts with these blocks, which a follow-up holds now."""
        for block in blocks:
            if block in self.prompts:
                self._release(block)

    def release_all(self) -> None:
        self.hold_window([])
        for last in list(self.prompts):
            self._release(last)

    def _release(self, last: int) -> None:
        self._pool.release(self.prompts.pop(last)[1])
