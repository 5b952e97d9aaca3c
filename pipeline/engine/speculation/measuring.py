"""Times of steps by kind, context and number of tokens, taken at start-up: what the cost table is made of. No torch.

K: kinds of steps, C: contexts, G: points of the token grid.
"""

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline.engine.speculation.grid import next_point, token_grid

PLAIN, SHALLOW, DEEP = 0, 1, 2
TOKENS_PER_SEQUENCE = (1, 2, 8)  # of these kinds of steps
SHORT, LONG = 0, 1

RunStep = Callable[[int, int, int], None]
"""Runs one step of (num_tokens, num_sequences, context_len), tokens spread evenly over the sequences, each with
`context_len` tokens in the KV cache, logits computed for every token; returns when the device is done. All sequences
may read the same blocks. What is in them does not matter."""


class TimedSteps:
    """Each time is that of a step right behind one of its own kind and size, since behind another it would take longer;
    the fastest of several counts, since what disturbs a machine only ever takes time."""

    def __init__(
        self,
        run_step: RunStep,
        contexts: tuple[int, int],
        budget_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run_step, self._contexts = run_step, contexts
        self._budget_s, self._clock, self._begun = budget_s, clock, clock()
        seen = (SHORT, LONG) if contexts[SHORT] != contexts[LONG] else (SHORT,)
        self._kinds = [(kind, context) for context in seen for kind in (PLAIN, SHALLOW, DEEP)]
        self.num_tokens_G: list[int] = []
        self.seconds_KCG = np.zeros((3, 2, 0))

    def measure(self, max_tokens: int, padded_to: Sequence[int], repeats: int) -> None:
        """The smallest steps first, since small batches are where drafts pay: the two smallest in any case, others
        while the budget lasts. Then all of them again in turn, because a disturbance of some milliseconds would else
        have all repeats of one point; and after a second time what lies where lines between the points are wrong.

        It takes the budget and the step in which that ends, at least a step of each of the two smallest sizes."""
        for at, num_tokens in enumerate(token_grid(max_tokens, padded_to)):
            if at < 2 or self._has_time:
                self._add(num_tokens, is_needed=at < 2)
        self._again(range(len(self.num_tokens_G)))
        while self._has_time:
            between = next_point(self.num_tokens_G, self.seconds_KCG[DEEP, SHORT], padded_to)
            if between is None:
                break
            if self._add(between):
                self._again([self.num_tokens_G.index(between)])
        for _ in range(repeats - 2):
            self._again(range(len(self.num_tokens_G)))

    @property
    def _has_time(self) -> bool:
        return self._clock() - self._begun <= self._budget_s

    def _add(self, num_tokens: int, is_needed: bool = False) -> bool:
        """Time a new point; false where there was no time for all of its kinds. If it is needed all the same, those
        take as long as the kind or the context before."""
        seconds_KC = np.zeros((3, 2))
        for kind, context in self._kinds:
            if self._has_time or (is_needed and (kind, context) == (PLAIN, SHORT)):
                seconds_KC[kind, context:] = self._time(kind, context, num_tokens)
            elif not is_needed:
                return False
            elif context == SHORT:
                seconds_KC[kind] = seconds_KC[kind - 1]
        g = bisect_left(self.num_tokens_G, num_tokens)
        self.num_tokens_G.insert(g, num_tokens)
        self.seconds_KCG = np.insert(self.seconds_KCG, g, seconds_KC, axis=2)
        return True

    def _again(self, points: Iterable[int]) -> None:
        for g, (kind, context) in itertools.product(points, self._kinds):
            if not self._has_time:
                return
            seconds = self._time(kind, context, self.num_tokens_G[g])
            until = LONG + 1 if len(self._kinds) == 3 else context + 1
            self.seconds_KCG[kind, context:until, g] = min(seconds, self.seconds_KCG[kind, context, g])

    def _time(self, kind: int, context: int, num_tokens: int) -> float:
        sequences = max(num_tokens // TOKENS_PER_SEQUENCE[kind], 1)
        for _ in range(2):
            begun = self._clock()
            self._run_step(num_tokens, sequences, self._contexts[context])
            seconds = max(self._clock() - begun, 1e-9)
            if not self._has_time:
                break
        return seconds
