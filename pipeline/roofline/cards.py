"""Accelerators by name: memory, bandwidth, arithmetic rates, as their vendor states them.

Owns reading `hardware.yaml`, which lies beside this file so that an installed package has it too (`configs/` links to
it). What a machine really has is asked of torch, not of this file.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

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
