"""What the steps of an arm take, and what they yield, by the clock. No torch.

Prompts share steps with decoding, and more often so where drafts end rows sooner. What their tokens add is taken off:
`PrefillCost` is the slope of step times by prompt tokens, among steps that are alike otherwise.
"""

from collections import deque
from collections.abc import Collection
from math import hypot, sqrt
from typing import NamedTuple

WINDOW = 32  # steps that are remembered of an arm
OUTLIER = 2.0  # a step counts at most so many times the median of its kind: the machine was busy with something else
EVERY, SELDOM = 4, 16  # steps after which a rate is worked out anew, which takes some 30 us; as many of a long window
DRAFT_PRIOR = 2.0  # so many drafts squared
SHARED = 4.0  # what drafting takes besides its tokens is nobody's own: few drafts have no more of it than so many
_DECAY = 0.98
_PRIOR = 0.02


class Sample(NamedTuple):
    seconds: float
    num_prefill: int
    tokens: float  # of each sequence
    drafts: float  # of each sequence


class PrefillCost:
    """Seconds a prompt token takes beside decoding."""

    def __init__(self) -> None:
        self._xx = self._xy = 0.0
        self.token_s = 0.0

    def add(self, window: "Window", seconds: float, num_prefill: int, num_sequences: int) -> None:
        """A step of the same kind as those in the window."""
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
        """Of a draft, in tokens that come in the same time. off_s: what a plain step takes; between that and this step
        time is taken to grow evenly, as long as the number of drafts has hardly changed."""
        if off_s is None:
            off_s = self.step_s / (1.0 + self.drafts)
        even_s = max(self.step_s - off_s, 0.0) / max(self.drafts, SHARED)
        draft_s = (self.draft_weight * self.draft_s + DRAFT_PRIOR * even_s) / (self.draft_weight + DRAFT_PRIOR)
        return max(draft_s, 0.0) * self.tokens / self.step_s


class Window:
    """The last steps of an arm at one size of batch."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._sum_s, self.sum_prefill = 0.0, 0
        self._rate: Rate | None = None
        self._age = 0  # steps since it was worked out

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        self.__init__()

    def add(self, seconds: float, num_prefill: int, tokens: float, drafts: float) -> None:
        self._samples.append(Sample(seconds, num_prefill, tokens, drafts))
        self._sum_s, self.sum_prefill = self._sum_s + seconds, self.sum_prefill + num_prefill
        self._age += 1
        if len(self._samples) > WINDOW:
            gone = self._samples.popleft()
            self._sum_s, self.sum_prefill = self._sum_s - gone.seconds, self.sum_prefill - gone.num_prefill

    def means(self) -> tuple[float, float]:
        num = len(self._samples)
        return self._sum_s / num, self.sum_prefill / num

    def rate(self, prefill_token_s: float) -> Rate | None:
        """None where no step says anything. Worked out anew every few steps."""
        if self._age >= min(len(self._samples), EVERY if len(self._samples) < WINDOW else SELDOM):
            self._rate, self._age = self._work_out(prefill_token_s), 0
        return self._rate

    def _work_out(self, prefill_token_s: float) -> Rate | None:
        num = len(self._samples)
        if not num:
            return None
        seconds_N, _, tokens_N, drafts_N = zip(*self._samples)
        least_s = max(min(seconds_N), 1e-9)
        drafted = [s for s in self._samples if s.drafts > 0.0] if max(drafts_N) > 0.0 else []
        plain = [s for s in self._samples if s.drafts <= 0.0] if drafted else self._samples
        total_s = weight = spread = draft_xx = draft_xy = 0.0
        for own in (plain, drafted):
            if own:
                own_s, weights = _without_prompts(own, prefill_token_s, least_s)
                own_weight = sum(weights)
                mean_s = sum([w * s for s, w in zip(own_s, weights)]) / own_weight
                spread += sum([w * (s - mean_s) ** 2 for s, w in zip(own_s, weights)]) * len(own) / own_weight
                # Each kind counts by how often it came, and not by how many prompts came beside it.
                total_s += mean_s * len(own)
                weight += own_weight
                if own is drafted:
                    mean_drafts = sum([w * s.drafts for s, w in zip(own, weights)]) / own_weight
                    more = [s.drafts - mean_drafts for s in own]
                    draft_xx = sum([w * d**2 for d, w in zip(more, weights)])
                    draft_xy = sum([w * d * (s - mean_s) for d, s, w in zip(more, own_s, weights)])
        step_s, tokens = max(total_s / num, 1e-9), sum(tokens_N) / num
        tokens_spread = sum([(each - tokens) ** 2 for each in tokens_N]) / num
        errors = sqrt(spread / num / weight) / step_s, sqrt(tokens_spread / num) / tokens
        draft_s = draft_xy / draft_xx if draft_xx > 0.0 else 0.0
        return Rate(step_s, tokens, sum(drafts_N) / num, weight, *errors, draft_s, draft_xx)


def _without_prompts(
    samples: Collection[Sample], prefill_token_s: float, least_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of such steps without prompts, and what each counts: those with many prompt tokens say little, as these
    have a spread."""
    beside_s = [prefill_token_s * s.num_prefill for s in samples]
    own_s = [s.seconds - b for s, b in zip(samples, beside_s)]
    sorted_s, half = sorted(own_s), len(own_s) // 2
    most_s = OUTLIER * (sorted_s[half] if len(own_s) % 2 else (sorted_s[half - 1] + sorted_s[half]) / 2)
    if sorted_s[0] < 0.0 or sorted_s[-1] > most_s:
        own_s = [min(max(s, 0.0), most_s) for s in own_s]
    weights = [1.0 / (1.0 + (b / least_s) ** 2) for b in beside_s] if any(beside_s) else [1.0] * len(own_s)
    return own_s, weights
