"""The best draft lengths of one step: how many tokens each sequence drafts so that expected tokens per second are most.

A sequence's draft at position k is worth the product of the acceptance probabilities up to k, and a first one what it
finds out besides; it costs what one more token in the step costs. Which drafts belong to a class and a position only
matters through that value, so they are taken class by class in falling order of value, and the best number of drafts is
looked for over the whole curve of costs: a curve may have steps and kinks (padded graphs, another kernel from some size
on), where stopping at the first fall would miss the best. No torch.

Not every token is worth the same (`token_prices`). A text is easy or hard by its places: who hurries through an easy
part has nothing but hard ones left, where others are by then, too. What shortens a job is that each part is computed in
as little time as it can be, so a token is worth what it costs in the class that its sequence is in: less where many
drafts are accepted, more where few are.

C: classes, K: draft positions, N = C * K: drafts that are alike, in falling order of value, D: numbers of drafts (0 and
up), S: sequences.
"""

from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from pipeline.engine.speculation.proposing import ProposingCost


class Values:
    """What drafts are worth, and in which order they are taken: made of probabilities once, used in several steps."""

    def __init__(self, probability_CK: np.ndarray, found_C: np.ndarray | float = 0.0) -> None:
        """found_C: tokens that a first draft brings in later steps: they decide what is drafted, and count nowhere
        else."""
        self.value_CK = value_CK = probability_CK.cumprod(axis=1)
        num_classes = len(value_CK)
        # What a sequence gets with as many drafts, and with none.
        self.tokens_CK1 = np.concatenate((np.ones((num_classes, 1)), value_CK), axis=1).cumsum(axis=1)
        self.num_classes = num_classes
        self._weights: tuple[np.ndarray, float] | None = None  # of tokens; None: all are worth the same
        self._wanted_CK = value_CK.copy()
        self._wanted_CK[:, 0] += found_C
        self._sort()

    def weighted(self, weight_C: np.ndarray, rest: float) -> "Values":
        """The same where a token of class c is worth weight_C[c], and one of a sequence without candidates `rest`."""
        other = copy(self)
        other._weights, other._wanted_CK = (weight_C, rest), self._wanted_CK * weight_C[:, None]
        other._sort()
        return other

    def plain(self, num_sequences: int, deep_CK: np.ndarray) -> float:
        """What a token of each of these sequences is worth; `best_split` says what deep_CK is."""
        if self._weights is None:
            return num_sequences
        size_C, (weight_C, rest) = deep_CK[:, 0], self._weights
        return float(size_C @ weight_C) + rest * max(num_sequences - float(size_C.sum()), 0.0)

    def _sort(self) -> None:
        max_drafts = self.value_CK.shape[1]
        self.order_N = np.argsort(-self._wanted_CK, axis=None, kind="stable")
        self.wanted_N, self.value_N = self._wanted_CK.ravel()[self.order_N], self.value_CK.ravel()[self.order_N]
        self.class_N = self.order_N // max_drafts
        self.at_depth_NK = (self.order_N % max_drafts)[:, None] == np.arange(max_drafts)


@dataclass(frozen=True)
class Split:
    """So many drafts in all, and whose: class c drafts to depth_C[c], and `num_deeper` of `deeper_class` one more."""

    num_drafts: int
    depth_C: np.ndarray
    deeper_class: int
    num_deeper: int
    expected_tokens: float  # of the step, with the one that each sequence gets anyway
    seconds: float  # of the step and of proposing, lookups apart
    plain_s: float  # of the step without drafts
    price_s: float = 0.0  # seconds that one draft more or less makes
    rate: float = 0.0  # tokens a second, by what they are worth
    worth_s: float = 0.0  # seconds of plain steps that it stands for, its own among them; see `Gains`


def best_split(
    num_sequences: int,
    deep_CK: np.ndarray,
    values: Values,
    curve_s_D: np.ndarray,
    proposing: ProposingCost,
    extra_s: float,
    lookup_s: float = 0.0,
) -> Split:
    """The number of drafts with the most expected tokens, by what they are worth, per second of step, passes and
    lookup.

    deep_CK: sequences of class c with a candidate at k (may be fractions, of an expectation). curve_s_D: seconds of
    the step by number of drafts. extra_s: seconds that drafting may take beside the plain step at most, whatever it
    gains.
    """
    args = curve_s_D, proposing, extra_s, lookup_s
    split = best = _best_in_order(num_sequences, deep_CK, values, *args)
    if not proposing.has_passes or np.count_nonzero(deep_CK[:, 0]) < 2:
        return split
    # By value a deep draft of a sure class may come before a first one of others, which is cheaper: it opens no pass.
    for depth in range(1, _deepest(split) + 1):
        shallow_CK = deep_CK * (np.arange(deep_CK.shape[1]) < depth)
        other = _best_in_order(num_sequences, shallow_CK, values, *args)
        if other.num_drafts and other.rate > best.rate:
            best = replace(other, depth_C=np.minimum(other.depth_C, depth))
    return best


def even_split(
    num_sequences: int,
    deep_CK: np.ndarray,
    values: Values,
    depth: int,
    curve_s_D: np.ndarray,
    proposing: ProposingCost,
    extra_s: float,
) -> Split | None:
    """Every sequence drafts as deep as it can up to `depth`, whatever it is worth; None where that takes longer than
    `extra_s` allows, or more drafts than the curve has."""
    count_CK = deep_CK[:, :depth]
    num_drafts, plain_s = int(count_CK.sum() + 1e-6), float(curve_s_D[0])
    if not 0 < num_drafts < len(curve_s_D):
        return None
    seconds = float(curve_s_D[num_drafts])
    if proposing.has_passes:
        seconds += float(proposing.pass_s(count_CK.sum(axis=0)).sum())
    if seconds > plain_s + extra_s:
        return None
    expected = num_sequences + float((count_CK * values.value_CK[:, :depth]).sum())
    return Split(num_drafts, np.full(len(deep_CK), depth), 0, 0, expected, seconds, plain_s)


def _best_in_order(
    num_sequences: int,
    deep_CK: np.ndarray,
    values: Values,
    curve_s_D: np.ndarray,
    proposing: ProposingCost,
    extra_s: float,
    lookup_s: float,
) -> Split:
    """`best_split` of drafts taken in the order of their values."""
    count_N = deep_CK.ravel()[values.order_N]
    end_N1, wanted_N1 = np.zeros(len(count_N) + 1), np.zeros(len(count_N) + 1)
    count_N.cumsum(out=end_N1[1:])
    (count_N * values.wanted_N).cumsum(out=wanted_N1[1:])
    most = min(int(end_N1[-1] + 1e-6), len(curve_s_D) - 1)
    drafts_D = np.arange(most + 1)
    wanted_D = np.interp(drafts_D, end_N1, wanted_N1)
    plain = values.plain(num_sequences, deep_CK)
    wanted_D += plain
    seconds_D = curve_s_D[: most + 1]
    if proposing.has_passes:
        seconds_D = seconds_D + _passes_s(drafts_D, values, count_N, end_N1, proposing)
    plain_s = float(curve_s_D[0])
    rate_D = wanted_D / (seconds_D + lookup_s)
    # Allowed or not, one by one: a staircase may be affordable again further on.
    rate_D[seconds_D > plain_s + extra_s] = 0.0
    rate_D[0] = plain / (plain_s + lookup_s)
    best = int(rate_D.argmax())
    taken = int(end_N1.searchsorted(best + 1e-6, side="right")) - 1  # items of the order that are taken whole
    depth_C = np.bincount(values.class_N[:taken], minlength=values.num_classes)
    rest = best - int(end_N1[taken] + 1e-6)
    expected, deeper = num_sequences + float(count_N[:taken] @ values.value_N[:taken]), 0
    if rest:
        deeper = int(values.class_N[taken])
        expected += (best - float(end_N1[taken])) * float(values.value_N[taken])
    price_s = _price_s(best, seconds_D, wanted_D, lookup_s) if best else 0.0
    return Split(best, depth_C, deeper, rest, expected, float(seconds_D[best]), plain_s, price_s, float(rate_D[best]))


def token_prices(
    split: Split, num_sequences: int, deep_CK: np.ndarray, values: Values, lookup_s: float = 0.0
) -> tuple[np.ndarray, float]:
    """Seconds that a token costs with this split, in each class (C,) and without candidates: a sequence's share of the
    step and its drafts, by the tokens that it gets."""
    depth_C, drafts_C = split.depth_C, split.depth_C.astype(np.float64)
    tokens_C = values.tokens_CK1[np.arange(len(depth_C)), depth_C]
    if split.num_deeper:
        c = split.deeper_class
        part = split.num_deeper / float(deep_CK[c, depth_C[c]])
        drafts_C[c] += part
        tokens_C[c] += part * values.value_CK[c, depth_C[c]]
    share_s = (split.seconds + lookup_s - split.price_s * split.num_drafts) / num_sequences
    return (share_s + split.price_s * drafts_C) / tokens_C, share_s


def paces(split: Split, num_sequences: int, deep_CK: np.ndarray, values: Values) -> tuple[np.ndarray, np.ndarray]:
    """Of each class, the sequences (G,) with candidates and the tokens that each gets in a step of this split; last
    those without."""
    taken_CK = deep_CK * (np.arange(deep_CK.shape[1]) < split.depth_C[:, None])
    if split.num_deeper:
        taken_CK[split.deeper_class, split.depth_C[split.deeper_class]] = split.num_deeper
    size_C = deep_CK[:, 0]
    tokens_C = 1.0 + (taken_CK * values.value_CK).sum(axis=1) / np.maximum(size_C, 1e-9)
    return np.append(size_C, max(num_sequences - size_C.sum(), 0.0)), np.append(tokens_C, 1.0)


def deal(split: Split, class_S: np.ndarray, available_S: np.ndarray, turn: int) -> np.ndarray:
    """Draft lengths (S,) of a split. Where only some of a class draft one more, they take turns: `turn` rises."""
    depth_S = split.depth_C[class_S]
    length_S = np.minimum(available_S, depth_S)
    if split.num_deeper:
        able = np.flatnonzero((class_S == split.deeper_class) & (available_S > depth_S))
        first = turn % len(able)
        length_S[np.concatenate((able[first:], able[:first]))[: split.num_deeper]] += 1
    return length_S


def _deepest(split: Split) -> int:
    return max(int(split.depth_C.max()), int(split.depth_C[split.deeper_class]) + 1 if split.num_deeper else 0)


def _price_s(best: int, seconds_D: np.ndarray, wanted_D: np.ndarray, lookup_s: float) -> float:
    """Seconds that a draft costs at the best number of them: on a line its slope. At a kink the drafts before it cost
    less and those behind it more; how many there are is decided by what the last one is worth. A curve may fall: then
    it costs nothing."""
    half, twice = best // 2, min(2 * best, len(seconds_D) - 1)
    before_s = float(seconds_D[best] - seconds_D[half]) / (best - half)
    behind_s = float(seconds_D[twice] - seconds_D[best]) / (twice - best) if twice > best else before_s
    last = float(wanted_D[best] - wanted_D[best - 1])
    worth_s = last * float(seconds_D[best] + lookup_s) / float(wanted_D[best])
    return max(min(max(worth_s, before_s), max(before_s, behind_s)), 0.0)


def _passes_s(
    drafts_D: np.ndarray, values: Values, count_N: np.ndarray, end_N1: np.ndarray, cost: ProposingCost
) -> np.ndarray:
    """Seconds (D,) of the draft passes that the first drafts of the order need.

    The first draft at a depth opens a pass, more of that depth make it wider; so there is a node at the first draft of
    each item and one at its last, and between them the time is (nearly) a line.
    """
    wide_NK = values.at_depth_NK * count_N[:, None]
    last_NK = wide_NK.cumsum(axis=0)
    first_NK = last_NK - np.maximum(wide_NK - 1.0, 0.0)
    node_drafts, node_s = np.zeros(2 * len(count_N) + 1), np.zeros(2 * len(count_N) + 1)
    node_drafts[1::2] = end_N1[:-1] + np.minimum(count_N, 1.0)
    node_drafts[2::2] = end_N1[1:]
    node_s[1::2] = cost.pass_s(first_NK).sum(axis=1)
    node_s[2::2] = cost.pass_s(last_NK).sum(axis=1)
    return np.interp(drafts_D, node_drafts, node_s)
