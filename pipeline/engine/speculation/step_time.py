"""Time and yield of steps with drafts, or of plain ones. No torch.

Prompts share steps with decoding, and more often if drafts end rows sooner. The time of their tokens is subtracted:
`PrefillCost` is the slope of step time over prompt tokens, among steps that are otherwise alike.
"""

from collections import deque
from math import hypot, sqrt
from typing import NamedTuple

WINDOW = 32  # number of recent steps
OUTLIER = 2.0  # cap on a step's time, in medians, to ignore unrelated stalls
DRAFT_PRIOR = 2.0  # drafts squared
SHARED_DRAFTS = 4.0  # the fixed cost of drafting is spread over at least this many drafts
_DECAY = 0.98
_PRIOR = 0.02


class Sample(NamedTuple):
    seconds: float
    num_prefill: int
    tokens: float  # per sequence
    drafts: float  # per sequence


class PrefillCost:
    """Seconds that a prompt token adds to a step."""

    def __init__(self) -> None:
        self._xx = self._xy = 0.0
        self.token_s = 0.0

    def add(self, window: "StepWindow", seconds: float, num_prefill: int, num_sequences: int) -> None:
        """Record a step of the same kind as those in the window."""
        if not num_prefill and not window.sum_prefill:
            return
        mean_s, mean_prefill = window.means()
        seconds = min(seconds, 2.0 * OUTLIER * mean_s)
        x, y = num_prefill - mean_prefill, seconds - mean_s
        # If all steps have about as many prompt tokens, assume that all tokens of a step take the same time.
        prior = _PRIOR * num_prefill**2
        self._xx = _DECAY * self._xx + x * x + prior
        self._xy = _DECAY * self._xy + x * y + prior * seconds / (num_prefill + num_sequences)
        if self._xx > 0.0:
            self.token_s = max(self._xy / self._xx, 0.0)


class Rate(NamedTuple):
    """Mean step of a window. step_s: its time without prompts. tokens, drafts: per sequence. weight: effective number
    of steps. step_error, tokens_error: relative standard errors of the first two. draft_s: time of one more draft for
    each sequence, from the variation among these steps; draft_weight: the sum of squared deviations behind it."""

    step_s: float
    tokens: float
    drafts: float
    weight: float
    step_error: float
    tokens_error: float
    draft_s: float
    draft_weight: float

    @property
    def token_s(self) -> float:
        """Seconds per generated token of each sequence."""
        return self.step_s / self.tokens

    @property
    def error(self) -> float:
        """Relative standard error of `token_s`."""
        return hypot(self.step_error, self.tokens_error)

    def draft_cost(self, off_s: float | None) -> float:
        """Return the time of a draft, in tokens generated in that time. off_s: time of a plain step; time is assumed to
        grow linearly from it to this step while the number of drafts has hardly varied."""
        if off_s is None:
            off_s = self.step_s / (1.0 + self.drafts)
        even_s = max(self.step_s - off_s, 0.0) / max(self.drafts, SHARED_DRAFTS)
        draft_s = (self.draft_weight * self.draft_s + DRAFT_PRIOR * even_s) / (self.draft_weight + DRAFT_PRIOR)
        return max(draft_s, 0.0) * self.tokens / self.step_s


class StepWindow:
    """Last steps with drafts, or last plain ones, at one batch size."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        self._samples.clear()
        self._sum_s, self.sum_prefill = 0.0, 0
        self._rate: Rate | None = None
        self._num_new = 0  # since the rate was computed

    def add(self, seconds: float, num_prefill: int, tokens: float, drafts: float) -> None:
        self._samples.append(Sample(seconds, num_prefill, tokens, drafts))
        self._sum_s, self.sum_prefill = self._sum_s + seconds, self.sum_prefill + num_prefill
        self._num_new += 1
        if len(self._samples) > WINDOW:
            oldest = self._samples.popleft()
            self._sum_s, self.sum_prefill = self._sum_s - oldest.seconds, self.sum_prefill - oldest.num_prefill

    def means(self) -> tuple[float, float]:
        num = len(self._samples)
        return self._sum_s / num, self.sum_prefill / num

    def rate(self, prefill_token_s: float) -> Rate | None:
        """Return the rate; None if no step was timed. Recomputed once half of the steps are new; takes some 30 us."""
        if self._num_new and 2 * self._num_new >= len(self._samples):
            self._rate, self._num_new = self._computed(prefill_token_s), 0
        return self._rate

    def _computed(self, prefill_token_s: float) -> Rate:
        seconds_N, prefill_N, tokens_N, drafts_N = zip(*self._samples)
        num, fastest_s = len(seconds_N), max(min(seconds_N), 1e-9)
        prompts_N = [prefill_token_s * each for each in prefill_N]
        own_N = [seconds - prompts for seconds, prompts in zip(seconds_N, prompts_N)]
        # Steps with many prompt tokens get less weight, because the prompts' time varies.
        weight_N = [1.0 / (1.0 + (prompts / fastest_s) ** 2) for prompts in prompts_N]
        slowest_s = OUTLIER * max(sorted(own_N)[num // 2], 0.0)
        own_N = [min(max(seconds, 0.0), slowest_s) for seconds in own_N]
        weight = sum(weight_N)
        mean_s = max(sum([w * s for w, s in zip(weight_N, own_N)]) / weight, 1e-9)
        spread = sum([w * (s - mean_s) ** 2 for w, s in zip(weight_N, own_N)]) / weight
        mean_drafts = sum([w * d for w, d in zip(weight_N, drafts_N)]) / weight
        deviation_N = [d - mean_drafts for d in drafts_N]
        draft_xx = sum([w * d * d for w, d in zip(weight_N, deviation_N)])
        draft_xy = sum([w * d * (s - mean_s) for w, d, s in zip(weight_N, deviation_N, own_N)])
        tokens = sum(tokens_N) / num
        tokens_spread = sum([(each - tokens) ** 2 for each in tokens_N]) / num
        errors = sqrt(spread / weight) / mean_s, sqrt(tokens_spread / num) / tokens
        draft_s = draft_xy / draft_xx if draft_xx > 0.0 else 0.0
        return Rate(mean_s, tokens, sum(drafts_N) / num, weight, *errors, draft_s, draft_xx)
