"""What proposing costs, of one proposer. No torch.

Two parts, since they are paid at different moments. The lookup is paid for every sequence that is asked for candidates,
before anything is chosen (an n-gram index has only this part). A pass is paid for each draft position, once for all
sequences that go as deep; passes run one after the other. A draft model's lookup is its catching up with sequences that
it does not know yet: most take no time and some a lot, so there the mean counts, and elsewhere the median.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.engine.speculation.robust import MovingMedian

RECENT_STEPS = 15  # steps whose median corrects the expectation
PRIOR_STEPS = 2  # that what is expected at the start counts as
RECENT_LOOKUPS = 31  # lookups of a proposer with passes, whose mean is expected


class ProposingCost:
    """Seconds of lookups and passes; `observe` scales both to what proposing takes at present."""

    def __init__(
        self,
        lookup_s: float = 50e-6,
        lookup_per_sequence_s: float = 2e-6,
        pass_sequences_G: Sequence[int] = (),
        pass_s_G: Sequence[float] = (),
    ) -> None:
        """`pass_s_G`: seconds of one draft pass over as many sequences as `pass_sequences_G` says, which rises."""
        assert len(pass_sequences_G) == len(pass_s_G)
        self._lookup_s, self._lookup_per_sequence_s = lookup_s, lookup_per_sequence_s
        self.has_passes = len(pass_s_G) > 0
        sequences, seconds = [0.0, *map(float, pass_sequences_G)], [0.0, *map(float, pass_s_G)]
        if self.has_passes:  # beyond the last point, in proportion
            sequences.append(16 * sequences[-1])
            seconds.append(16 * seconds[-1])
        self._sequences_G, self._seconds_G = np.array(sequences), np.array(seconds)
        self._scale = MovingMedian(RECENT_STEPS)  # log of measured by expected
        for _ in range(PRIOR_STEPS):  # else the first step, a wild one perhaps, would be it
            self._scale.add(0.0)
        self._lookups_s: deque[float] = deque(maxlen=RECENT_LOOKUPS)  # for each sequence, where there are passes

    @classmethod
    def measure_passes(
        cls,
        run_pass: Callable[[int], None],
        max_sequences: int,
        repeats: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> "ProposingCost":
        """Time one draft pass over 1 to `max_sequences` sequences; the fastest of `repeats` counts."""
        counts = [1 << power for power in range(0, max_sequences.bit_length(), 2)]
        if counts[-1] != max_sequences:
            counts.append(max_sequences)
        seconds = []
        for count in counts:
            run_pass(count)
            times = []
            for _ in range(repeats):
                before = clock()
                run_pass(count)
                times.append(clock() - before)
            seconds.append(max(min(times), 1e-9))
        return cls(pass_sequences_G=counts, pass_s_G=seconds)

    @property
    def scale(self) -> float:
        return math.exp(self._scale.value)

    def lookup_s(self, num_sequences: int) -> float:
        """Seconds of asking for the candidates of so many sequences."""
        if self.has_passes:
            return sum(self._lookups_s) / max(len(self._lookups_s), 1) * num_sequences
        return (self._lookup_s + self._lookup_per_sequence_s * num_sequences) * self.scale

    def pass_s(self, num_sequences: np.ndarray) -> np.ndarray:
        """Seconds of one draft pass over each of these numbers of sequences; 0 for none."""
        return np.interp(num_sequences, self._sequences_G, self._seconds_G) * self.scale

    def observe(
        self,
        num_asked: int,
        drafts_S: np.ndarray,
        seconds: float,
        lookup_s: float = 0.0,
        is_after_pause: bool = False,
    ) -> None:
        """Asking `num_asked` sequences, and drafting so many tokens for each, took so long, of which `lookup_s` before
        anything was chosen. is_after_pause: it was not asked for a while, and has more than a step's tokens to catch
        up with; a lookup that says nothing of those to come."""
        expected_s = self._passes_s(drafts_S)
        if self.has_passes:
            self._lookups_s.append(lookup_s / max(num_asked, 1))
            seconds -= lookup_s
        elif not is_after_pause:
            expected_s = self.lookup_s(num_asked)
        if expected_s > 0.0 and seconds > 0.0:
            self._scale.add(self._scale.value + math.log(seconds / expected_s))

    def trusted_s(
        self, num_asked: int, drafts_S: np.ndarray, seconds: float, lookup_s: float, trust: float, is_after_pause: bool
    ) -> float:
        """`seconds` of `observe`, asked before it, but at most `trust` times above or below what is expected. What
        comes of catching up counts as it is."""
        if not self.has_passes and is_after_pause:
            return seconds
        as_it_is_s = lookup_s if self.has_passes else 0.0
        expected_s = self._passes_s(drafts_S) if self.has_passes else self.lookup_s(num_asked)
        return as_it_is_s + min(max(seconds - as_it_is_s, expected_s / trust), expected_s * trust)

    def _passes_s(self, drafts_S: np.ndarray) -> float:
        if not self.has_passes or not len(drafts_S):
            return 0.0
        deep_K = np.bincount(drafts_S)[::-1].cumsum()[::-1][1:]
        return float(self.pass_s(deep_K).sum())
