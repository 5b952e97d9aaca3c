"""Who gets the completions of sequences: the call that asked, and in between the group of a request of several.

    sequence -> Group, where its request became several sequences -> Call -> the caller

The scheduler knows sequences alone. A group is never part-way: its sequences are queued together, and aborted together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pipeline.engine.params import Completion


@dataclass(eq=False)
class Call:
    """Whose requests they are: one call of `Engine.stream`, or all calls of `Engine.add` together. Compared by
    identity: callers may use the same row ids."""

    num_given: int = 0  # requests so far, and so the position of the next one
    num_open: int = 0  # of these, the ones that are in the engine and have not ended
    ended: list[Completion] = field(default_factory=list)  # not handed over yet

    def end(self, completion: Completion) -> None:
        """One of its requests has ended."""
        self.num_open -= 1
        self.ended.append(completion)

    def take(self) -> list[Completion]:
        """The completions since the last time."""
        ended, self.ended = self.ended, []
        return ended


class Group:
    """The sequences of one request that became several. Their completions become one when the last has ended: none is
    aborted because another failed. Compared by identity."""

    def __init__(self, size: int, join: Callable[[Sequence[Completion]], Completion]) -> None:
        """join: makes the request's completion of those of its sequences, in their order."""
        self._join = join
        self._ended: dict[int, Completion] = {}  # by place
        self._size = size

    def end(self, place: int, completion: Completion) -> Completion | None:
        """The sequence in this place has ended. The request's completion, if it was the last one."""
        self._ended[place] = completion
        if len(self._ended) < self._size:
            return None
        return self._join([self._ended[place] for place in range(self._size)])
