"""Prices of cards, each with its date and source, from a file; nothing is looked up over the network."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from pipeline.formatting import counted

FILE = Path(__file__).with_name("prices.yaml")
STALE_DAYS = 90
_KEYS = {"card", "on_demand_usd", "spot_usd", "date", "source"}


@dataclass(frozen=True)
class Price:
    """Price of one card in US dollars per hour; None if unknown."""

    card: str
    on_demand_usd: float | None
    spot_usd: float | None
    listed: date
    source: str

    def age_days(self, today: date) -> int:
        return (today - self.listed).days


@dataclass(frozen=True)
class PriceList:
    prices: tuple[Price, ...]
    spot_interruptions_per_hour: float

    def price_of(self, card: str) -> Price | None:
        return next((price for price in self.prices if price.card == card), None)

    def doubts(self, today: date) -> list[str]:
        """Return warnings about stale prices."""
        old = [price for price in self.prices if price.age_days(today) > STALE_DAYS]
        if not old:
            return []
        oldest = min(price.listed for price in old)
        return [f"prices of {counted(len(old), 'card')} are stale: from {oldest}, {(today - oldest).days} days ago"]


def load_prices(path: Path = FILE) -> PriceList:
    """Read a price list. Raises ConfigError for an invalid file."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--prices {path}: {error}") from None
    try:
        prices = tuple(_price(each) for each in raw["prices"])
        rate = float(raw.get("spot_interruptions_per_hour", 0.0))
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"--prices {path}: expected `prices`, a list of {{card, on_demand_usd, spot_usd, date, source}} as in "
            f"{FILE}; {type(error).__name__}: {error}"
        ) from None
    return PriceList(prices, rate)


def _price(raw: dict[str, Any]) -> Price:
    if set(raw) != _KEYS:
        raise ValueError(f"{raw.get('card', raw)} has the keys {sorted(raw)}")
    if not isinstance(raw["date"], date):
        raise ValueError(f"{raw['card']}: {raw['date']!r} is not a date such as 2026-11-24")
    on_demand, spot = (None if raw[key] is None else float(raw[key]) for key in ("on_demand_usd", "spot_usd"))
    if any(usd is not None and usd <= 0 for usd in (on_demand, spot)):
        raise ValueError(f"{raw['card']}: a price must be more than 0")
    return Price(str(raw["card"]), on_demand, spot, raw["date"], str(raw["source"]))
