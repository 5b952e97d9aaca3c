"""The crossover of int4 products by the model of a card, and what takes its place."""

from dataclasses import replace

import pytest

from pipeline.kernels.triton.linear import crossover
from pipeline.kernels.triton.linear.crossover import MODELLED, Crossover, crossover_of, fused_seconds
from pipeline.roofline.cost_model import AWQ


@pytest.fixture
def fresh():
    crossover_of.cache_clear()
    yield
    crossover_of.cache_clear()


def test_the_table() -> None:
    assert {capability: crossover_of(capability) for capability in MODELLED} == {
        (8, 0): Crossover(64, 128),
        (8, 9): Crossover(160, 448),
        (9, 0): Crossover(128, 320),
    }


def test_other_cards_take_the_next_older_one() -> None:
    assert crossover_of((8, 6)) == crossover_of((8, 0))
    assert crossover_of((10, 0)) == crossover_of((9, 0))
    assert crossover_of((7, 5)) == crossover_of((8, 0))


def test_what_was_measured_takes_precedence(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(crossover.MEASURED, (9, 0), Crossover(48, 96))
    assert crossover_of((9, 0)) == Crossover(48, 96)
    assert crossover_of((8, 0)) == Crossover(64, 128)


def test_a_kernel_of_more_instructions_crosses_earlier(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    card = MODELLED[9, 0]
    slow = tuple(replace(tile, instructions=2 * tile.instructions) for tile in card.tiles)
    monkeypatch.setitem(MODELLED, (9, 0), replace(card, tiles=slow))
    assert crossover_of((9, 0)) == Crossover(64, 192)


@pytest.mark.parametrize("capability", MODELLED)
def test_no_product_is_faster_than_reading_its_weight(capability: tuple[int, int]) -> None:
    card = MODELLED[capability]
    for tokens in (1, 16, 17, 64, 65, 256):
        least_s = AWQ.packed_bytes * 4096 * 4096 / card.ceilings.bytes_per_s
        assert fused_seconds(tokens, 4096, 4096, card) > least_s
        assert fused_seconds(2 * tokens, 4096, 4096, card) >= fused_seconds(tokens, 4096, 4096, card)
