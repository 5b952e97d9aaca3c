"""Estimates of cards: what fits, what a card lacks, and which changes pay."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config import load_job
from pipeline.estimate.cards import CardServing, kinds_of_weights, on_card
from pipeline.estimate.pool import PoolEstimate
from pipeline.estimate.recommend import WORTH, advice_for_card, advice_for_pool
from pipeline.model.config import read_config
from pipeline.report.estimate import Interval
from pipeline.roofline.cards import load_cards
from pipeline.roofline.job_simulation import RequestTokens

CARDS = {card.name: card for card in load_cards()}
DEMO = read_config(Path("pipeline/demo/models/target"))
EIGHT_B = replace(DEMO, hidden_size=4096, intermediate_size=12288, layers=DEMO.layers[:1] * 36, num_heads=32,
                  num_kv_heads=8, head_dim=128, vocab_size=151_936)  # fmt: skip
REQUESTS = [RequestTokens(500, 100)] * 300


@pytest.fixture(scope="module")
def job():
    return CardServing.from_job(load_job("jobs/summarize.yaml"))


def test_the_data_sheet_is_faster_than_the_expectation_and_a_fast_card_than_a_slow_one(job):
    fast, slow = on_card(CARDS["H100 80GB SXM"], EIGHT_B, job, REQUESTS), on_card(CARDS["L40S"], EIGHT_B, job, REQUESTS)
    assert fast.best.wall_s < fast.expected.wall_s
    assert fast.expected.wall_s < slow.expected.wall_s
    assert fast.load_s == slow.load_s > 10


def test_missing_memory_and_missing_features_are_reported(job):
    huge = replace(EIGHT_B, layers=DEMO.layers[:1] * 400)
    assert on_card(CARDS["L4"], huge, job, REQUESTS).lacks == "the weights and one request do not fit its memory"
    assert on_card(CARDS["A100 80GB SXM"], EIGHT_B, job, REQUESTS, "fp8").lacks == "has no fp8 products"
    assert on_card(CARDS["H100 80GB SXM"], EIGHT_B, job, REQUESTS, "fp8").lacks == ""
    assert list(kinds_of_weights(EIGHT_B)) == ["16 bit", "AWQ int4", "fp8"]


def test_weights_in_host_memory_make_room_and_bound_a_step(job):
    card, larger = CARDS["L4"], replace(EIGHT_B, layers=DEMO.layers[:1] * 52)  # 22.6 GB in the layers
    assert on_card(card, larger, job, REQUESTS).lacks == "the weights and one request do not fit its memory"
    found = on_card(card, larger, replace(job, cpu_offload_gb=9.0), REQUESTS)
    assert (found.lacks, found.kv_tokens > 0) == ("", True)
    assert found.best.wall_s > found.best.num_steps * 9e9 / card.pcie_bytes_per_s
    assert found.best.parts.copy_s < found.expected.parts.copy_s
    packed = on_card(card, EIGHT_B, job, REQUESTS, "AWQ int4")
    offloaded = on_card(card, EIGHT_B, replace(job, cpu_offload_gb=2.0), REQUESTS, "AWQ int4")
    assert offloaded.kv_tokens > packed.kv_tokens
    # On a larger card, weights on the card get 16-bit copies, which save time in steps with many tokens.
    card = CARDS["H100 80GB SXM"]
    packed = on_card(card, EIGHT_B, job, REQUESTS, "AWQ int4")
    offloaded = on_card(card, EIGHT_B, replace(job, cpu_offload_gb=2.0), REQUESTS, "AWQ int4")
    assert offloaded.best.parts.linears_s > packed.best.parts.linears_s
    assert "engine.cpu_offload_gb = 30" in on_card(card, EIGHT_B, replace(job, cpu_offload_gb=30), REQUESTS).lacks


def test_advice_follows_the_cost_model_and_is_only_what_pays(job):
    card = CARDS["L4"]
    now = on_card(card, EIGHT_B, job, REQUESTS)
    advice = {each.key: each for each in advice_for_card(card, EIGHT_B, job, REQUESTS)}
    weights = [key for key in advice if key.startswith("weights: ")]
    assert len(weights) == 1  # 16 GB of weights leave almost no room on a card of 24
    better = on_card(card, EIGHT_B, job, REQUESTS, weights[0].removeprefix("weights: "))
    assert advice[weights[0]].effect == pytest.approx(1 - better.expected.wall_s / now.expected.wall_s)
    assert all(each.effect >= WORTH for each in advice.values())


def test_advice_limits_engines_by_their_start_and_the_last_units():
    def pool(actors, machine_us):
        each = Interval(machine_us, machine_us, machine_us)
        return PoolEstimate("this machine", actors, each, each)

    advice = advice_for_pool([pool(1, 100), pool(4, 115), pool(64, 400)], units=600, unit_rows=512)
    assert [each.key for each in advice] == ["run.actors: 4"]
    few = advice_for_pool([pool(8, 100)], units=16, unit_rows=512)
    assert [each.key for each in few] == ["output.rows_per_file: 128"]
