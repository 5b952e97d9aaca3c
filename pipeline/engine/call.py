"""Whose requests they are: several callers may share one engine, and each gets the completions of its own."""

from dataclasses import dataclass, field

from pipeline.engine.params import Completion


@dataclass(eq=False)
class Call:
    """One call of `Engine.stream`, or all calls of `Engine.add` together. Compared by identity: callers may use the
    same row ids."""

    num_given: int = 0  # requests so far, and so the position of the next one
    num_open: int = 0  # of these, the ones that are in the engine and have not ended
    ended: list[Completion] = field(default_factory=list)  # that are still to be handed over

    def end(self, completion: Completion) -> None:
        """One of its requests has ended."""
        self.num_open -= 1
        self.ended.append(completion)

    def take(self) -> list[Completion]:
        """The completions since the last time."""
        ended, self.ended = self.ended, []
        return ended
