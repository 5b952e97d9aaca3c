"""What steps with drafts, or plain ones, take and yield, by the clock. No torch.

Prompts share steps with decoding, and more often so where drafts end rows sooner. What their tokens add is taken off:
`PrefillCost` is the slope of step times by prompt tokens, among steps that are alike otherwise.
"""

from collections import deque
from math import hypot, sqrt
from typing import NamedTuple

WINDOW = 32  # steps that are remembered
OUTLIER = 2.0  # a step counts at most so many times the median: the machine was busy with something else
DRAFT_PRIOR = 2.0  # drafts squared
SHARED_DRAFTS = 4.0  # what drafting takes besides its tokens is spread over at least this many
_DECAY = 0.98
_PRIOR = 0.02


class Sample(NamedTuple):
    seconds: float
    num_prefill: int
    tokens: float  # of each sequence
    drafts: float  # of each sequence


class PrefillCost:
    """Seconds that a prompt token adds to a step."""

    def __init__(self) -> None:
        self._xx = self._xy = 0.0
        self.token_s = 0.0

    def add(self, window: "Window", seconds: float, num_prefill: int, num_sequences: int) -> None:
        """Take in a step of the same kind as those in the window."""
        if not num_prefill and not window.sum_prefill:
            return
        mean_s, mean_prefill = window.means()
        seconds = min(seconds, 2.0 * OUTLIER * mean_s)
        x, y = num_prefill - mean_prefill, seconds - mean_s
        # Where all steps have about as many, what such a step takes by its tokens.
        prior = _PRIOR * num_prefill**2
        self._xx = _DECAY * self._xx + x * x + prior
        self._xy = _DECAY * self._xy + x * y + prior * seconds / (num_prefill + num_sequences)
        if self._xx > 0.0:
            self.token_s = max(self._xy / self._xx, 0.0)


class Rate(NamedTuple):
    """step_s: of a step without prompts. tokens, drafts: of a sequence in it. weight: how many such steps say so. The
    relative standard errors of the first two. draft_s: what a draft more for each sequence adds, among these steps;
    draft_weight: the variance of drafts that says so, over all of them."""

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
        """Seconds until each sequence has one more token."""
        return self.step_s / self.tokens

    @property
    def error(self) -> float:
        """The relative standard error of `token_s`."""
        return hypot(self.step_error, self.tokens_error)

    def draft_cost(self, off_s: float | None) -> float:
        """Return what a draft takes, in tokens that come in the same time. off_s: what a plain step takes; between that
        and this step time is taken to grow evenly, as long as the number of drafts has hardly changed."""
        if off_s is None:
            off_s = self.step_s / (1.0 + self.drafts)
        even_s = max(self.step_s - off_s, 0.0) / max(self.drafts, SHARED_DRAFTS)
        draft_s = (self.draft_weight * self.draft_s + DRAFT_PRIOR * even_s) / (self.draft_weight + DRAFT_PRIOR)
        return max(draft_s, 0.0) * self.tokens / self.step_s


class Window:
    """The last steps with drafts, or the last plain ones, at one size of batch."""

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
            gone = self._samples.popleft()
            self._sum_s, self.sum_prefill = self._sum_s - gone.seconds, self.sum_prefill - gone.num_prefill

    def means(self) -> tuple[float, float]:
        num = len(self._samples)
        return self._sum_s / num, self.sum_prefill / num

    def rate(self, prefill_token_s: float) -> Rate | None:
        """Return None where no step was timed. Computed anew when half of the steps are new; that takes some 30 us."""
        if self._num_new and 2 * self._num_new >= len(self._samples):
            self._rate, self._num_new = self._computed(prefill_token_s), 0
        return self._rate

    def _computed(self, prefill_token_s: float) -> Rate:
        seconds_N, prefill_N, tokens_N, drafts_N = zip(*self._samples)
        num, fastest_s = len(seconds_N), max(min(seconds_N), 1e-9)
        prompts_N = [prefill_token_s * each for each in prefill_N]
        own_N = [seconds - prompts for seconds, prompts in zip(seconds_N, prompts_N)]
        # Steps with many prompt tokens say little, as these have a spread.
        weight_N = [1.0 / (1.0 + (prompts / fastest_s) ** 2) for prompts in prompts_N]
        slowest_s = OUTLIER * max(sorted(own_N)[num // 2], 0.0)
        own_N = [min(max(seconds, 0.0), slowest_s) for seconds in own_N]
        weight = sum(weight_N)
        mean_s = max(sum([w * s for w, s in zip(weight_N, own_N)]) / weight, 1e-9)
        spread = sum([w * (s - mean_s) ** 2 for w, s in zip(weight_N, own_N)]) / weight
        mean_drafts = sum([w * d for w, d in zip(weight_N, drafts_N)]) / weight
        more_N = [d - mean_drafts for d in drafts_N]
        draft_xx = sum([w * d * d for w, d in zip(weight_N, more_N)])
        draft_xy = sum([w * d * (s - mean_s) for w, d, s in zip(weight_N, more_N, own_N)])
        tokens = sum(tokens_N) / num
        tokens_spread = sum([(each - tokens) ** 2 for each in tokens_N]) / num
        errors = sqrt(spread / weight) / mean_s, sqrt(tokens_spread / num) / tokens
        draft_s = draft_xy / draft_xx if draft_xx > 0.0 else 0.0
        return Rate(mean_s, tokens, sum(drafts_N) / num, weight, *errors, draft_s, draft_xx)
