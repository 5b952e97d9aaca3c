"""Accelerators by name: memory, bandwidth and arithmetic rates from their vendors, and prices.

Reads `hardware.yaml`, which is next to this file so that it is installed with the package. Properties of the actual
machine come from torch, not from this file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ConfigError
from pipeline.formatting import nearest

FILE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True)
class Card:
    """One accelerator.

    Rates are peaks per second: dense, with sums in float32; None if the card has no such unit. compute_capability:
    major and minor, which determine the compiled kernels. nvlink_bytes_per_s, pcie_bytes_per_s: to other cards, in one
    direction. on_demand_usd, spot_usd: price of an hour; None if unknown.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    bf16_flops: int
    fp8_flops: int | None
    nvlink_bytes_per_s: int | None
    pcie_bytes_per_s: int
    source: str
    device: str  # CUDA's name for the card
    compute_capability: tuple[int, int]
    on_demand_usd: float | None = None
    spot_usd: float | None = None


def load_cards() -> tuple[Card, ...]:
    """Return the cards of `hardware.yaml`, in its order."""
    return tuple(
        Card(**values | {"compute_capability": tuple(values["compute_capability"])}) for values in _read()["cards"]
    )


def price_source() -> str:
    """Return the source of the prices, and their date."""
    return _read()["prices"]


def _read() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def card_of_device(name: str) -> Card | None:
    """Return the card with this CUDA name; None if it is not in `hardware.yaml`."""
    return next((card for card in load_cards() if card.device == name), None)


def find_card(name: str, option: str = "--card") -> Card:
    """Find a card by its name or a prefix of it, ignoring case. Raises ConfigError with a message about `option`."""
    known = {card.name: card for card in load_cards()}
    found = [card for full, card in known.items() if full.lower() == name.lower()]
    found = found or [card for full, card in known.items() if full.lower().startswith(name.lower())]
    if not found:
        close = nearest(name, known)
        hint = f" Did you mean {close}?" if close else ""
        raise ConfigError(f"{option} {name}: no such card; expected one of {', '.join(known)}.{hint}")
    return found[0]
