"""Crossovers of int4 products against the times of one H200, and how a card without an entry gets one."""

from collections.abc import Callable

import pytest

from pipeline.kernels.triton.linear.crossover import CROSSOVERS, MEASURED, crossover_of
from pipeline.roofline.cost_model import DecoderSize

LAYER = {name: inputs * outputs for name, inputs, outputs in DecoderSize(4096, 14336, 32, 32, 8, 128, 1).linears()}
TOKENS = 16, 32, 48, 64, 80, 128, 192, 256
TIMES_US = {
    "qkv": {
        "int4": (13.8, 17.6, 20.9, 21.4, 37.0, 36.8, 53.0, 53.2),
        "cached": (17.9, 18.0, 18.2, 17.8, 17.9, 18.6, 22.5, 22.8),
        "scratch": (37.6, 37.5, 38.0, 38.1, 39.1, 39.9, 43.6, 44.6),
    },
    "o": {
        "int4": (12.2, 13.2, 15.0, 15.9, 23.7, 25.0, 34.1, 43.2),
        "cached": (15.2, 15.5, 16.1, 14.5, 14.8, 15.4, 19.7, 20.8),
        "scratch": (24.4, 25.0, 25.8, 24.1, 25.9, 27.9, 34.1, 30.2),
    },
    "gate_up": {
        "int4": (38.8, 42.8, 59.7, 60.4, 113.3, 116.3, 172.5, 199.6),
        "cached": (59.2, 60.4, 62.5, 62.7, 64.1, 67.7, 78.9, 94.2),
        "scratch": (156.9, 156.3, 157.8, 158.2, 159.1, 161.7, 170.9, 182.9),
    },
    "down": {
        "int4": (24.7, 25.1, 31.6, 31.9, 56.9, 57.7, 83.5, 109.8),
        "cached": (33.4, 34.3, 34.7, 37.1, 36.4, 37.1, 45.6, 47.5),
        "scratch": (82.5, 83.0, 83.4, 85.9, 84.7, 88.1, 94.5, 95.8),
    },
}
"""Microseconds of the linears of a layer of Llama-3-8B at TOKENS: H200, 2026-11-26, bfloat16, groups of 128."""


def layer_us(form: str, at: int, max_fused: Callable[[str], float]) -> float:
    return sum(times["int4" if TOKENS[at] <= max_fused(name) else form][at] for name, times in TIMES_US.items())


@pytest.mark.parametrize("form", ["cached", "scratch"])
def test_on_an_h200_a_layer_takes_the_faster_path(form: str) -> None:
    h200 = crossover_of((9, 0))
    assert h200.source == MEASURED
    for at, tokens in enumerate(TOKENS):
        served = layer_us(form, at, lambda name: h200.max_fused_tokens(LAYER[name], form == "cached"))
        dense, fused = layer_us(form, at, lambda _: 0), layer_us(form, at, lambda _: 1e9)
        assert served <= 1.035 * min(dense, fused), tokens
        assert tokens <= 64 or served <= 1.05 * dense


def test_a_border_by_weight_gains_where_weights_are_small() -> None:
    h200, at = crossover_of((9, 0)), TOKENS.index(64)
    one_border = layer_us("cached", at, lambda _: h200.cached)
    assert layer_us("cached", at, lambda name: h200.max_fused_tokens(LAYER[name], True)) < 0.97 * one_border


def test_other_cards_take_the_next_older_one() -> None:
    assert crossover_of((8, 6)) == crossover_of((8, 0))
    assert crossover_of((12, 0)) == CROSSOVERS[10, 0]
    assert crossover_of((7, 5)) == CROSSOVERS[8, 0]
    assert {each.source for each in CROSSOVERS.values()} == {MEASURED, "assumed"}
