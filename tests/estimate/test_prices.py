"""Table of prices, and tables of users."""

from datetime import date

import pytest

from pipeline.errors import ConfigError
from pipeline.estimate.prices import load_prices
from pipeline.roofline.cards import load_cards

GOOD = "prices:\n  - {card: L4, on_demand_usd: 0.5, spot_usd: null, date: 2026-11-01, source: ours}\n"


def test_every_price_has_a_known_card_a_date_and_a_source():
    found = load_prices()
    assert {price.card for price in found.prices} <= {card.name for card in load_cards()}
    assert all(price.source and price.listed for price in found.prices)
    assert all(price.spot_usd < price.on_demand_usd for price in found.prices)


def test_a_table_of_the_user_is_read_and_old_prices_are_reported(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(GOOD)
    found = load_prices(path)
    assert (found.price_of("L4").on_demand_usd, found.price_of("L4").spot_usd, found.price_of("H200")) == (
        0.5,
        None,
        None,
    )
    assert found.doubts(date(2026, 11, 24)) == []
    assert found.doubts(date(2027, 2, 24)) == ["prices of 1 card are stale: from 2026-11-01, 115 days ago"]


@pytest.mark.parametrize(("old", "new", "message"), [
    ("0.5", "0", "more than 0"),
    ("date: 2026-11-01", "date: soon", "'soon' is not a date"),
    (", source: ours", "", "L4 has the keys"),
    ("prices:", "price:", "KeyError"),
    ("0.5", "cheap", "could not convert"),
    ("prices:", "prices: [", "expected"),
])  # fmt: skip
def test_a_damaged_table_is_refused_with_its_path(tmp_path, old, new, message):
    path = tmp_path / "ours.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=f"(?s)--prices .*ours.yaml: .*{message}"):
        load_prices(path)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--prices .*none\.yaml"):
        load_prices(tmp_path / "none.yaml")
