"""Compare divisions of a machine's cards into engines: replicas on one card each, groups of two, and so on.

All cards of a machine cost the same, so the division with the most tokens per second has the lowest cost per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.estimate.cards import CardServing, OnCard, on_card
from pipeline.estimate.prices import PriceList
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.job_simulation import RequestTokens

MACHINE = 8  # cards
SIZES = (1, 2, 4, 8)  # cards of an engine
WORTH = 0.03  # share of the cost; the cost model cannot resolve less


@dataclass(frozen=True)
class Division:
    """Machine of `MACHINE` cards whose engines have `num_cards` cards each. tokens_per_s: prompt and generated tokens
    of all engines. usd_per_million: of these tokens; None without a price."""

    card: str
    num_cards: int
    tokens_per_s: float
    usd_per_million: float | None

    @property
    def num_engines(self) -> int:
        return MACHINE // self.num_cards


def fitting_engines(
    card: Card, model: ModelConfig, serving: CardServing, requests: Sequence[RequestTokens]
) -> list[OnCard]:
    """Simulate an engine of each size of `SIZES`, and return those that the model fits."""
    found = (on_card(card, model, replace(serving, tensor_parallel_size=size), requests) for size in SIZES)
    return [each for each in found if not each.lacks]


def division_of(engine: OnCard, prices: PriceList) -> Division:
    """Return the division of a machine into engines like this one."""
    assert engine.expected is not None
    rate = engine.expected.tokens_per_s * (MACHINE // engine.num_cards)
    price = prices.price_of(engine.card)
    usd = None
    if price is not None and price.on_demand_usd is not None:
        usd = price.on_demand_usd * MACHINE / 3600 / rate * 1e6
    return Division(engine.card, engine.num_cards, rate, usd)


def cheapest(found: Sequence[Division]) -> Division:
    """Return the division with the lowest cost per token. Of nearly equal ones, the smallest groups: replicas do not
    wait for one another."""
    fastest = max(division.tokens_per_s for division in found)
    return next(division for division in found if division.tokens_per_s >= fastest * (1 - WORTH))
