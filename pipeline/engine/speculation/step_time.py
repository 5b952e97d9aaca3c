"""What the steps of an arm take, and what they yield, by the clock. No torch.

Prompts share steps with decoding, and more often so where drafts end rows sooner. What their tokens add is taken off:
`PrefillCost` is the slope of step times by prompt tokens, among steps that are alike otherwise.
"""

from collections import deque
from math import hypot, sqrt
from statistics import median
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
        mean_s, mean_prefill = window.means()
        if not num_prefill and not mean_prefill:
            return
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
        self._sum_s, self._sum_prefill = 0.0, 0
        self._rate: Rate | None = None
        self._age = 0  # steps since it was worked out

    def __len__(self) -> int:
        return len(self._samples)

    def clear(self) -> None:
        self.__init__()

    def add(self, seconds: float, num_prefill: int, tokens: float, drafts: float) -> None:
        self._samples.append(Sample(seconds, num_prefill, tokens, drafts))
        self._sum_s, self._sum_prefill = self._sum_s + seconds, self._sum_prefill + num_prefill
        self._age += 1
        if len(self._samples) > WINDOW:
            gone = self._samples.popleft()
            self._sum_s, self._sum_prefill = self._sum_s - gone.seconds, self._sum_prefill - gone.num_prefill

    def means(self) -> tuple[float, float]:
        num = len(self._samples)
        return self._sum_s / num, self._sum_prefill / num

    def rate(self, prefill_token_s: float) -> Rate | None:
        """None where no step says anything. Worked out anew every few steps."""
        if self._age >= min(len(self._samples), EVERY if len(self._samples) < WINDOW else SELDOM):
            self._rate, self._age = self._work_out(prefill_token_s), 0
        return self._rate

    def _work_out(self, prefill_token_s: float) -> Rate | None:
        """Steps with many prompt tokens say little, as these have a spread."""
        num = len(self._samples)
        if not num:
            return None
        least_s = max(min(s.seconds for s in self._samples), 1e-9)
        total_s = weight = spread = draft_xx = draft_xy = 0.0
        for is_drafted in (False, True):
            own = [
                (s.seconds - prefill_token_s * s.num_prefill, prefill_token_s * s.num_prefill / least_s, s.drafts)
                for s in self._samples
                if (s.drafts > 0.0) == is_drafted
            ]
            if own:
                most_s = OUTLIER * median(seconds for seconds, _, _ in own)
                own = [(min(max(s, 0.0), most_s), 1.0 / (1.0 + beside * beside), drafts) for s, beside, drafts in own]
                own_weight = sum(w for _, w, _ in own)
                mean_s = sum(w * seconds for seconds, w, _ in own) / own_weight
                spread += sum(w * (seconds - mean_s) ** 2 for seconds, w, _ in own) * len(own) / own_weight
                # Each kind counts by how often it came, and not by how many prompts came beside it.
                total_s += mean_s * len(own)
                weight += own_weight
                if is_drafted:
                    mean_drafts = sum(w * drafts for _, w, drafts in own) / own_weight
                    draft_xx = sum(w * (drafts - mean_drafts) ** 2 for _, w, drafts in own)
                    draft_xy = sum(w * (drafts - mean_drafts) * (seconds - mean_s) for seconds, w, drafts in own)
        step_s, tokens = max(total_s / num, 1e-9), sum(s.tokens for s in self._samples) / num
        tokens_spread = sum((s.tokens - tokens) ** 2 for s in self._samples) / num
        return Rate(
            step_s,
            tokens,
            sum(s.drafts for s in self._samples) / num,
            weight,
            sqrt(spread / num / weight) / step_s,
            sqrt(tokens_spread / num) / tokens,
            draft_xy / draft_xx if draft_xx > 0.0 else 0.0,
            draft_xx,
        )
