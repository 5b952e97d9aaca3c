"""The requests of one caller."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import SamplingParams


@dataclass(eq=False)
class RequestStream:
    """Requests of one caller: of one call of `Engine.stream`, or of all calls of `Engine.add`. Compared by identity:
    callers may use the same row ids. check: the final check of completions with structured outputs."""

    check: Callable[[Completion, SamplingParams], Completion] = lambda completion, params: completion
    num_submitted: int = 0  # requests so far, and so the index of the next one
    num_unfinished: int = 0  # requests in the engine that have not ended
    ended: list[Completion] = field(default_factory=list)  # not returned yet

    def end(self, completion: Completion, params: SamplingParams) -> None:
        """Record the end of one of its requests, which has these parameters."""
        self.num_unfinished -= 1
        self.ended.append(completion if params.structured_outputs is None else self.check(completion, params))

    def drain(self) -> list[Completion]:
        """Return the completions since the last call."""
        ended, self.ended = self.ended, []
        return ended
