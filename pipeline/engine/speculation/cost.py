"""What a step costs: seconds by its tokens, its sequences and the KV tokens it reads. No torch.

Three kinds of steps are timed at start-up, each at a short and a long context: plain ones, where every sequence has
one token, and drafted ones, where each has a few or many (measuring.py). Between the points the time is interpolated:
over the tokens, over sequences per token and over the mean context. A step with fewer sequences per token than those
that were timed can only take less: it reads fewer contexts.

While running, each observed step refines the table in two ways. The machine's speed is common to all steps and moves
fast: the median of the last steps. The shape belongs to plain or to drafted steps and a number of tokens: the median of
what was seen there, on top of the speed, in the first steps after others, when the speed is still theirs. In a long row
of alike steps nothing tells the two apart, and they would drift; what two points deviate by from each other is only
seen where one follows the other. So a machine that is disturbed for a minute changes no decision, a point that start-up
measured wrongly does, and one step that took ten times as long changes nothing.

G: points of the token grid. D: numbers of drafts, 0 and up.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.engine.speculation.measuring import (
    DEEP,
    LONG,
    PLAIN,
    SHALLOW,
    SHORT,
    TOKENS_PER_SEQUENCE,
    RunStep,
    TimedSteps,
)
from pipeline.engine.speculation.robust import MovingMedian

RECENT_STEPS = 7  # steps whose median is the machine's present speed
SPEED_PRIOR_STEPS = 2  # that the start-up's speed counts as
SHAPE_STEPS = 5  # the first ones after a change of kind, which tell shapes: the speed is still that of the steps before
RECENT_SHAPES = 15  # steps of one kind and size whose median corrects the table there
PRIOR_STEPS = 1  # what is believed of a point before counts as much as this many steps seen there
FEW_STEPS = 5  # steps seen at a point below which the median says little,
FEW_TRUSTED = 0.05  # and may move the logarithm of its time by so much
NOTABLE = 0.01  # a correction that changes by less makes no new version of the table
BEYOND = 1 << 20  # tokens up to which the grid is extended by its last slope: more than any step has
LOOKED_UP = 64  # table times kept: one step asks for the same ones again
DRAFTED = 1  # in the place of PLAIN, where it does not matter how many tokens a sequence has
LEAST_SHARE = 0.1  # extrapolating to short contexts leaves at least this share of a measured time


class StepCost:
    """The table of one model on one device. Lookups are pure; only `observe` changes it."""

    def __init__(
        self,
        num_tokens_G: Sequence[int],
        seconds_KCG: Sequence[Sequence[Sequence[float]]] | np.ndarray,
        contexts: tuple[int, int],
        padded_to: Sequence[int] = (),
    ) -> None:
        """seconds_KCG: of the three kinds at the two contexts. `padded_to`: rising token counts that a step is padded
        to (CUDA graphs); what is larger than all of them is not padded."""
        grid_G = np.asarray(num_tokens_G, dtype=np.float64)
        assert len(grid_G) > 1, "the token grid has at least two points"
        assert (np.diff(grid_G) > 0).all(), "the token grid rises"
        self.version = 0  # rises when a lookup would answer notably otherwise, the speed apart
        self._contexts = contexts
        self._padded_to = np.asarray(padded_to, dtype=np.float64)
        self._grid_G = np.append(grid_G, BEYOND)
        timed_KCG = np.array(seconds_KCG, dtype=np.float64)
        assert timed_KCG.shape == (3, 2, len(grid_G)), "one time for each kind, context and point"
        assert (timed_KCG > 0).all(), "a step takes time"
        self._seconds_KCG = _extended(grid_G, timed_KCG)
        self._share_KG = np.array([np.maximum(self._grid_G // n, 1) / self._grid_G for n in TOKENS_PER_SEQUENCE])
        # The same as lists: one step's time is looked up several times a step, far faster without arrays.
        self._grid, self._sizes, self._shares = self._grid_G.tolist(), list(padded_to), self._share_KG.tolist()
        self._seconds = self._seconds_KCG.tolist()
        self._looked_up: dict[tuple[int, int, int], tuple[float, int, float, int]] = {}
        self._speed = MovingMedian(RECENT_STEPS)  # log of measured by table
        for _ in range(SPEED_PRIOR_STEPS):  # else the first step, a wild one perhaps, would be it
            self._speed.add(0.0)
        self._last = (-1, -1)  # kind and point of the step before
        self._num_told, self._speed_before = 0, 0.0  # steps to come that tell shapes, and the speed for them
        self._shape_KG = [[MovingMedian(RECENT_SHAPES) for _ in self._grid_G] for _ in (PLAIN, DRAFTED)]
        self._correction_KG = np.zeros((2, len(self._grid_G)))  # log
        self._correction = self._correction_KG.tolist()

    @classmethod
    def measure(
        cls,
        run_step: RunStep,
        max_tokens: int,
        contexts: tuple[int, int],
        padded_to: Sequence[int] = (),
        budget_s: float = 2.0,
        repeats: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> "StepCost":
        """Time steps of 1 to `max_tokens` tokens, at least two sizes and others while `budget_s` lasts (measuring.py);
        beyond, a token costs what the last ones cost."""
        timed = TimedSteps(run_step, contexts, budget_s, clock)
        timed.measure(max_tokens, padded_to, repeats)
        return cls(timed.num_tokens_G, timed.seconds_KCG, contexts, padded_to)

    @property
    def speed(self) -> float:
        """How many times as long as the table says steps take at present."""
        return math.exp(self._speed.value)

    def curve_s(self, num_sequences: int, kv_tokens: int, num_other: int, max_drafts: int) -> np.ndarray:
        """Seconds (D,) of steps with 0 to `max_drafts` drafts beside one token for each of the sequences and
        `num_other` tokens of prefill, at the table's own speed: multiply by `speed`.

        `kv_tokens`: KV tokens that the sequences have, all together. About 50 us for a thousand drafts; the answer
        for the same arguments changes only with `version`.
        """
        tokens_D = np.arange(num_sequences + num_other, num_sequences + num_other + max_drafts + 1, dtype=np.float64)
        padded_D = tokens_D
        if self._sizes:
            index_D = np.searchsorted(self._padded_to, tokens_D)
            inside_D = index_D < len(self._sizes)
            padded_D = np.where(inside_D, self._padded_to[np.minimum(index_D, len(self._sizes) - 1)], tokens_D)
        weight = self._context_weight(num_sequences, kv_tokens)
        at_short_KG, at_long_KG = self._seconds_KCG[:, SHORT], self._seconds_KCG[:, LONG]
        seconds_KG = np.maximum(at_short_KG + weight * (at_long_KG - at_short_KG), LEAST_SHARE * at_short_KG)
        plain_D, shallow_D, deep_D = (np.interp(padded_D, self._grid_G, seconds_G) for seconds_G in seconds_KG)
        _, few_D, many_D = (np.interp(padded_D, self._grid_G, share_G) for share_G in self._share_KG)
        share_D = num_sequences / tokens_D
        is_few_D = share_D > few_D
        low_D, high_D = np.where(is_few_D, few_D, many_D), np.where(is_few_D, 1.0, few_D)
        low_s_D, more_s_D = np.where(is_few_D, (shallow_D, plain_D - shallow_D), (deep_D, shallow_D - deep_D))
        part_D = ((share_D - low_D) / (high_D - low_D).clip(1e-9)).clip(max=1.0)
        seconds_D = low_s_D + part_D * np.where(part_D < 0.0, more_s_D.clip(0.0), more_s_D)
        log_D = np.interp(padded_D, self._grid_G, self._correction_KG[DRAFTED])
        log_D[0] = np.interp(padded_D[0], self._grid_G, self._correction_KG[_kind(0, num_other)])
        return np.maximum(seconds_D, LEAST_SHARE * deep_D) * np.exp(log_D)

    def step_s(self, num_sequences: int, kv_tokens: int, num_other: int = 0, num_drafts: int = 0) -> float:
        """Seconds of one step at the machine's present speed; a few us."""
        kind = _kind(num_drafts, num_other)
        table_s, correction, _ = self._at(kind, num_sequences + num_other + num_drafts, num_sequences, kv_tokens)
        return table_s * math.exp(correction + self._speed.value)

    def elasticity(self, num_sequences: int, kv_tokens: int, num_other: int, num_more: int) -> float:
        """By which share the time of a step grows, divided by the share by which its tokens do, when `num_more` are
        added: 1 where compute is the limit, near 0 where tokens cost nothing (memory or dispatch is the limit)."""
        tokens = num_sequences + num_other
        before_s, after_s = (
            table_s * math.exp(correction)
            for table_s, correction, _ in (
                self._at(DRAFTED, tokens, num_sequences, kv_tokens),
                self._at(DRAFTED, tokens + num_more, num_sequences, kv_tokens),
            )
        )
        return (after_s - before_s) / before_s * tokens / num_more

    def observe(self, num_sequences: int, kv_tokens: int, num_drafts: int, seconds: float) -> None:
        """A step without prefill took so long. (Those with prefill are too unlike the table's to say how fast the
        machine is.)"""
        if seconds <= 0.0:
            return
        kind = _kind(num_drafts, 0)
        table_s, correction, g = self._at(kind, num_sequences + num_drafts, num_sequences, kv_tokens)
        log_ratio = math.log(seconds / table_s)
        shape, point = self._shape_KG[kind][g], (kind, g)
        if kind != self._last[0]:
            # At the very first nothing tells yet what deviates, this point or the speed; it is called the speed.
            was_kind, was_g = self._last
            self._num_told = SHAPE_STEPS if was_kind >= 0 else 0
            if was_kind >= 0 and not len(self._shape_KG[was_kind][was_g]):
                self._shape_KG[was_kind][was_g].add(self._correction[was_kind][was_g])
            self._speed_before = self._speed.value
        if self._num_told:
            self._num_told -= 1
            shape.add(log_ratio - self._speed_before)
        elif point != self._last and self._last[0] >= 0 and len(shape) < RECENT_SHAPES:
            shape.add(log_ratio - self._speed.value)
        self._last = point
        self._speed.add(log_ratio - correction)
        if abs(_trusted(shape) - self._correction[kind][g]) > NOTABLE:
            self._correct()

    # -- parts

    def _context_weight(self, num_sequences: int, kv_tokens: int) -> float:
        """0 at the short context, 1 at the long one."""
        short, long = self._contexts
        return (kv_tokens / max(num_sequences, 1) - short) / (long - short) if long != short else 0.0

    def _at(self, kind: int, num_tokens: int, num_sequences: int, kv_tokens: int) -> tuple[float, float, int]:
        """Uncorrected seconds of one step, the logarithm of their correction, and the nearest point of the grid.

        The same as an element of `curve_s`.
        """
        key = num_tokens, num_sequences, kv_tokens
        if key not in self._looked_up:
            if len(self._looked_up) >= LOOKED_UP:
                self._looked_up.clear()
            self._looked_up[key] = self._look_up(*key)
        table_s, low, part, nearest = self._looked_up[key]
        left, right = self._correction[kind][low : low + 2]
        return table_s, left + part * (right - left), nearest

    def _look_up(self, num_tokens: int, num_sequences: int, kv_tokens: int) -> tuple[float, int, float, int]:
        """Uncorrected seconds, the point of the grid below and how far it is to the next, and the nearest one."""
        at = bisect_left(self._sizes, num_tokens)
        padded = self._sizes[at] if at < len(self._sizes) else num_tokens
        grid = self._grid
        low = min(max(bisect_right(grid, padded) - 1, 0), len(grid) - 2)
        part = min(max((padded - grid[low]) / (grid[low + 1] - grid[low]), 0.0), 1.0)
        weight = self._context_weight(num_sequences, kv_tokens)
        seconds = []
        for short_G, long_G in self._seconds:
            ends = [max(s + weight * (t - s), LEAST_SHARE * s) for s, t in zip(short_G[low : low + 2], long_G[low:])]
            seconds.append(ends[0] + part * (ends[1] - ends[0]))
        few, many = (shares[low] + part * (shares[low + 1] - shares[low]) for shares in self._shares[SHALLOW:])
        share, least_s = num_sequences / num_tokens, LEAST_SHARE * seconds[DEEP]
        if share > few:
            low_share, high_share, low_s, high_s = few, 1.0, seconds[SHALLOW], seconds[PLAIN]
        else:
            low_share, high_share, low_s, high_s = many, few, seconds[DEEP], seconds[SHALLOW]
        between, more_s = min((share - low_share) / max(high_share - low_share, 1e-9), 1.0), high_s - low_s
        table_s = max(low_s + between * (max(more_s, 0.0) if between < 0.0 else more_s), least_s)
        nearest = low if padded * padded <= grid[low] * grid[low + 1] else low + 1
        return table_s, low, part, nearest

    def _correct(self) -> None:
        """A point where nothing was seen takes the correction of the nearest of its kind that has one; where there is
        none, of the other kind: what all of those deviate by is how start-up was timed, and holds for both."""
        own_K: list[list[float]] = []
        for shape_G in self._shape_KG:
            seen = [(g, _trusted(shape)) for g, shape in enumerate(shape_G) if len(shape)]
            own_K.append([min(seen, key=lambda s, at=at: abs(s[0] - at))[1] for at in range(len(shape_G)) if seen])
        self._correction = [own_K[kind] or own_K[1 - kind] for kind in (PLAIN, DRAFTED)]
        self._correction_KG = np.array(self._correction)
        self.version += 1


def _kind(num_drafts: int, num_other: int) -> int:
    return DRAFTED if num_drafts or num_other else PLAIN


def _trusted(shape: MovingMedian) -> float:
    """The correction that what was seen at a point amounts to."""
    trusted = shape.value * len(shape) / (len(shape) + PRIOR_STEPS)
    if len(shape) < FEW_STEPS:  # one wild step must not keep a point from ever being tried again
        return min(max(trusted, -FEW_TRUSTED), FEW_TRUSTED)
    return trusted


def _extended(grid_G: np.ndarray, seconds_KCG: np.ndarray) -> np.ndarray:
    """With one more point far out, on the last slope: beyond the grid a token costs what the last ones cost."""
    last = seconds_KCG[..., -1]
    slope = np.maximum(last - seconds_KCG[..., -2], 0.0) / (grid_G[-1] - grid_G[-2])
    far = last + slope * (BEYOND - grid_G[-1])
    return np.concatenate([seconds_KCG, far[..., None]], axis=-1)
