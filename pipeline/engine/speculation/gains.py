"""What a step is expected to gain by drafts: how many of them are best, and what that is worth. No torch.

What a token is worth: as long as rows wait, each token of any sequence brings the end nearer by as much. Later the end
comes with the slowest sequence: then the gain is that of the time in which all sequences get as far as in one plain
step, those that are there ever fewer (as if all had as much left). How far apart they are is what they are expected to
get now, as far as that lasts (persistence.py). There the best drafts for the most tokens are compared with as many for
everybody, which may bring the slowest further.

S: sequences that decode, C: classes (`Acceptance`), K: draft positions, D: numbers of drafts (0 and up), G: groups of
sequences that are equally fast.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.engine.speculation.budget import LossBudget
from pipeline.engine.speculation.choice import Split, Values, best_split, even_split, paces, token_prices
from pipeline.engine.speculation.cost import StepCost
from pipeline.engine.speculation.messages import Batch
from pipeline.engine.speculation.persistence import Persistence
from pipeline.engine.speculation.proposing import ProposingCost

MAX_CURVES = 64  # cost curves kept
CONTEXT_STEPS = 8  # curves of contexts nearer than 1/8 of a power of two are one
PREFILL_STEPS = 2  # and so of numbers of prompt tokens
BEST_ACCEPTANCE = 0.9  # of each draft, for what drafts could be worth at best
EVEN_DEPTHS = (1, 2, 4)  # drafts of everybody that are compared with the best ones
LEAST_LASTING = 0.05  # share of the differences below which all sequences count as equally fast
LASTING_STEPS = 8  # shares that are told apart where splits are found again
LEAST_GROUP = 1e-6  # sequences: less is a rounding error

_CurveKey = tuple[int, int, int, int]


class Gains:
    """Of one controller, which has the same cost tables and account."""

    def __init__(self, cost: StepCost, proposing: Sequence[ProposingCost], budget: LossBudget, max_drafts: int) -> None:
        self.cost, self.proposing, self.budget, self.max_drafts = cost, proposing, budget, max_drafts
        self.persistence = Persistence()
        self._curves: dict[_CurveKey, np.ndarray] = {}
        self._curves_version = -1
        self._splits: dict[tuple[int, _CurveKey, bytes, int], Split] = {}  # of the values that were given last
        self._weighted: dict[int, Values] = {}  # by proposer, of the same
        self._values: Values | None = None

    def split(self, batch: Batch, proposer: int, deep_CK: np.ndarray, values: Values, lookup_s: float) -> Split:
        """The best one of these candidates, as far as the budget allows. One of the same candidates and values is found
        again, at the speed that the machine had then: few sequences have the same ones in step after step."""
        if values is not self._values:
            self._splits.clear()
            self._weighted.clear()
            self._values = values
        key = proposer, self._curve_key(batch), deep_CK.tobytes(), round(LASTING_STEPS * self.lasting(batch))
        split = self._splits.get(key)
        if split is None or split.seconds - split.plain_s > self.budget.affordable_s - lookup_s:
            split = self._best(batch, proposer, deep_CK, values, lookup_s, by_price=True)
            if split.num_drafts:  # none may be what the account can pay for now
                self._splits[key] = split
        return split

    def expected(self, batch: Batch, proposer: int, share_CK: np.ndarray, present: float, values: Values) -> float:
        """Gain of a proposer over plain steps, where this share of the sequences has such candidates in a share
        `present` of the steps, and none in the others."""
        num = batch.num_sequences
        lookup_s = self.proposing[proposer].lookup_s(num)
        split = self._best(batch, proposer, share_CK * num, values, lookup_s)
        if not split.num_drafts:
            return 0.0
        more_s = split.worth_s - split.plain_s
        spent_s = split.plain_s + present * (split.seconds - split.plain_s) + lookup_s
        return max((split.plain_s + present * more_s) / spent_s - 1.0, 0.0)

    def at_best(self, batch: Batch, proposer: int) -> float:
        """Gain if everybody had candidates and nearly all of them were accepted, whatever the account allows."""
        num, curve_s_D = batch.num_sequences, self._curve(batch)
        draft_K1 = np.arange(min(self.max_drafts, (len(curve_s_D) - 1) // num) + 1)
        seconds_K1 = curve_s_D[num * draft_K1] + self.proposing[proposer].lookup_s(num)
        most = float(((BEST_ACCEPTANCE**draft_K1).cumsum() / seconds_K1).max())
        return most * float(curve_s_D[0]) - 1.0

    def lasting(self, batch: Batch) -> float:
        """The share of the differences between sequences that counts: the more rows wait to take the places of those
        that end, the less."""
        if batch.num_sequences == 1 or batch.slot_S is None:
            return 0.0
        return self.persistence.share * batch.num_sequences / (batch.num_sequences + batch.num_waiting)

    # -- parts

    def _best(
        self,
        batch: Batch,
        proposer: int,
        deep_CK: np.ndarray,
        values: Values,
        lookup_s: float,
        by_price: bool = False,
    ) -> Split:
        """by_price: where drafts pay, by what tokens cost; else for the most tokens at present."""
        num, extra_s, curve_s_D = batch.num_sequences, self.budget.affordable_s - lookup_s, self._curve(batch)
        proposing, lasting = self.proposing[proposer], self.lasting(batch)
        most = None
        if by_price and not _are_alike(num, deep_CK):
            most = self._best_by_price(proposer, num, deep_CK, values, curve_s_D, extra_s, lookup_s)
        if most is None:
            most = best_split(num, deep_CK, values, curve_s_D, proposing, extra_s, lookup_s)
        if lasting < LEAST_LASTING or not most.num_drafts:
            return replace(most, worth_s=most.expected_tokens / num * most.plain_s)
        best = replace(most, num_drafts=0, expected_tokens=num, seconds=most.plain_s, worth_s=most.plain_s)
        depths = EVEN_DEPTHS[: bisect_right(EVEN_DEPTHS, self.max_drafts)]
        evens = (even_split(num, deep_CK, values, depth, curve_s_D, proposing, extra_s) for depth in depths)
        for split in (most, *evens):
            if split is not None:
                worth_s = self._worth_s(batch, split, deep_CK, values, lasting)
                if worth_s * (best.seconds + lookup_s) > best.worth_s * (split.seconds + lookup_s):
                    best = replace(split, worth_s=worth_s)
        return best

    def _best_by_price(
        self,
        proposer: int,
        num: int,
        deep_CK: np.ndarray,
        values: Values,
        curve_s_D: np.ndarray,
        extra_s: float,
        lookup_s: float,
    ) -> Split | None:
        """With tokens worth what they cost; None where that is no draft. Prices hold as long as the values do: looked
        for once with tokens that are worth the same, and again by what they cost then."""
        proposing = self.proposing[proposer]
        weighted = self._weighted.get(proposer)
        if weighted is None:
            most = best_split(num, deep_CK, values, curve_s_D, proposing, extra_s, lookup_s)
            if not most.num_drafts:
                return None
            weighted = values.weighted(*token_prices(most, num, deep_CK, values, lookup_s))
            self._weighted[proposer] = weighted
        priced = best_split(num, deep_CK, weighted, curve_s_D, proposing, extra_s, lookup_s)
        return priced if priced.num_drafts else None

    def _worth_s(self, batch: Batch, split: Split, deep_CK: np.ndarray, values: Values, lasting: float) -> float:
        """Seconds of plain steps that a step with this split stands for, its own among them."""
        num = batch.num_sequences
        size_G, tokens_G = paces(split, num, deep_CK, values)
        mean = split.expected_tokens / num
        pace_G = mean + lasting * (tokens_G - mean)
        context, drafts = batch.kv_tokens / num, split.num_drafts / num
        whole_s, first_s, until, left = 0.0, 0.0, 0.0, float(num)  # until all are as far as one plain step gets them
        for g in np.argsort(-pace_G).tolist():
            if size_G[g] < LEAST_GROUP:
                continue
            there = max(round(left), 1)
            step_s = self.cost.step_s(there, int(context * there), 0, round(drafts * there))
            first_s = first_s or step_s
            whole_s += (1.0 / float(pace_G[g]) - until) * step_s
            until = 1.0 / float(pace_G[g])
            left -= float(size_G[g])
        return split.plain_s / whole_s * first_s

    def _curve_key(self, batch: Batch) -> _CurveKey:
        """Near contexts share a curve, and so do near numbers of prompt tokens."""
        num = batch.num_sequences
        nearest = round(CONTEXT_STEPS * math.log2(max(batch.kv_tokens / num, 1.0)))
        prefill = round(PREFILL_STEPS * math.log2(1 + batch.num_prefill))
        return num, nearest, prefill, min(num * self.max_drafts, batch.room)

    def _curve(self, batch: Batch) -> np.ndarray:
        """Seconds by number of drafts, at the present speed. Beside prompts: of a step without them, and what drafts
        cost more beside them. The prompts have to be computed anyway, but the tokens that plain steps would give need
        no more of them."""
        if self._curves_version != self.cost.version or len(self._curves) >= MAX_CURVES:
            self._curves.clear()
            self._curves_version = self.cost.version
        key = num, nearest, prefill, most = self._curve_key(batch)
        curve_s_D = self._curves.get(key)
        if curve_s_D is None:
            kv_tokens = int(num * 2.0 ** (nearest / CONTEXT_STEPS))
            curve_s_D = self.cost.curve_s(num, kv_tokens, 0, most)
            if prefill:
                beside_s_D = self.cost.curve_s(num, kv_tokens, round(2.0 ** (prefill / PREFILL_STEPS)) - 1, most)
                curve_s_D = curve_s_D[0] + (beside_s_D - beside_s_D[0]).clip(0.0)
            self._curves[key] = curve_s_D
        return curve_s_D * self.cost.speed


def _are_alike(num_sequences: int, deep_CK: np.ndarray) -> bool:
    """Whether all sequences are of one class: then a token of each is worth the same."""
    return np.count_nonzero(deep_CK[:, 0]) == 1 and float(deep_CK[:, 0].sum()) > num_sequences - LEAST_GROUP
