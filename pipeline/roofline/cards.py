"""Accelerators by name: memory, bandwidth, arithmetic rates, as their vendor states them.

Owns reading `hardware.yaml`, which lies beside this file so that an installed package has it too. What a
machine really has is asked of torch, not of this file.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.errors import ConfigError
from pipeline.formatting import nearest

FILE = Path(__file__).with_name("hardware.yaml")


@dataclass(frozen=True)
class Card:
    """One accelerator. Rates are peaks: dense, a second, with sums in float32; None where the card has no such unit.
    compute_capability: major and minor, by which kernels are compiled."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    bf16_flops: int
    fp8_flops: int | None
    source: str
    device: str  # the name under which CUDA shows it
    compute_capability: tuple[int, int]


def load_cards() -> tuple[Card, ...]:
    """The cards of `hardware.yaml`, in its order."""
    cards = yaml.safe_load(FILE.read_text(encoding="utf-8"))["cards"]
    return tuple(Card(**values | {"compute_capability": tuple(values["compute_capability"])}) for values in cards)


def card_of_device(name: str) -> Card | None:
    """The card that CUDA shows under this name; None where it is not in `hardware.yaml`."""
    return next((card for card in load_cards() if card.device == name), None)


def find_card(name: str, option: str = "--card") -> Card:
    """By its name or the beginning of it, in any case. Raises ConfigError, which begins with `option`."""
    known = {card.name: card for card in load_cards()}
    found = [card for full, card in known.items() if full.lower() == name.lower()]
    found = found or [card for full, card in known.items() if full.lower().startswith(name.lower())]
    if not found:
        close = nearest(name, known)
        hint = f" Did you mean {close}?" if close else ""
        raise ConfigError(f"{option} {name}: no such card; expected one of {', '.join(known)}.{hint}")
    return found[0]
