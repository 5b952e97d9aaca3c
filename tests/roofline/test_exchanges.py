"""Groups of cards: exchanges against sums done by hand, shares of the model, and the time of a step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from pipeline.demo import demo_model
from pipeline.model.config import read_config
from pipeline.model.sharding import exchanges_of_step
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import AWQ, DENSE, Ceilings, ExpertSize, StepLoad, step_seconds
from pipeline.roofline.exchanges import (
    Link,
    StepExchange,
    all_reduce_seconds,
    exchange_seconds,
    gather_seconds,
    step_exchanges,
)
from pipeline.roofline.shares import BOUND, MEASURED, source

LLAMA_70B = SHAPES["llama-70b"].size
DECODING = StepLoad(np.ones(64, dtype=np.int64), np.full(64, 500), 64)


def test_a_step_of_a_70b_model_exchanges_this() -> None:
    assert step_exchanges(80, 8192, 128_256, num_cards=4, num_tokens=512, num_rows=3) == [
        StepExchange("all-reduce", 159, 512 * 8192 * 2),
        StepExchange("all-reduce", 2, 3 * 8192 * 2),
        StepExchange("gather", 1, 3 * 128_256 * 2),
    ]
    (only,) = step_exchanges(80, 8192, 128_256, num_cards=4, num_tokens=512, num_rows=0)  # within a prompt
    assert only.count == 159
    assert step_exchanges(1, 8, 1001, num_cards=8, num_tokens=1, num_rows=1)[-1].num_bytes == 2 * 8 * 126


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (8192, 3), (512, 0)])
def test_the_engine_exchanges_what_the_cost_model_counts(num_tokens: int, num_rows: int) -> None:
    config, num_cards = read_config(demo_model("target")), 2
    size = config.size
    counted = step_exchanges(size.layers, size.hidden, size.vocab, num_cards, num_tokens, num_rows)
    done = exchanges_of_step(config, num_cards, num_tokens, num_rows, num_rows)
    for kind, theirs, shares in (("all-reduce", "sum", 1), ("gather", "gather", num_cards)):
        ours = [each for each in counted if each.kind == kind]
        engine = [each for each in done if each.kind == theirs]
        assert sum(each.count for each in ours) == len(engine)
        num_bytes = sum(each.rows * each.width * shares * 2 for each in engine)
        assert sum(each.count * each.num_bytes for each in ours) == num_bytes


def test_an_all_reduce_takes_its_bytes_and_its_hops() -> None:
    link = Link(bytes_per_s=100e9, start_s=5e-6, hop_s=1e-6)
    found = all_reduce_seconds(4e6, 4, link)
    assert found == pytest.approx(5e-6 + 6e-6 + 6e6 / 100e9)  # 2 * 3 / 4 of 4 MB
    assert gather_seconds(4e6, 4, link) == pytest.approx(5e-6 + 1e-6 + 3e6 / 100e9)
    parts = [StepExchange("all-reduce", 3, 4_000_000), StepExchange("gather", 1, 4_000_000)]
    assert exchange_seconds(parts, 4, link) == pytest.approx(3 * found + gather_seconds(4e6, 4, link))


@given(num_bytes=st.floats(1, 1e9), num_cards=st.sampled_from([2, 4, 8]))
def test_no_all_reduce_beats_the_bytes_that_a_card_must_send(num_bytes: float, num_cards: int) -> None:
    bound = 2 * (num_cards - 1) / num_cards * num_bytes / 1e9
    assert all_reduce_seconds(num_bytes, num_cards, Link(1e9)) >= bound * (1 - 1e-12)


def test_shares_add_up_to_the_model() -> None:
    assert LLAMA_70B.linear_parameters + 2 * LLAMA_70B.head_parameters == 70_552_387_584  # 70.6e9, without norms
    assert LLAMA_70B.local(1) is LLAMA_70B
    for num_cards in (2, 4, 8):
        share = LLAMA_70B.local(num_cards)
        assert share.linear_parameters * num_cards == LLAMA_70B.linear_parameters
        assert share.head_parameters * num_cards == LLAMA_70B.head_parameters
        assert share.kv_bytes_per_token() * num_cards == LLAMA_70B.kv_bytes_per_token()
    sixteen = LLAMA_70B.local(16)
    assert sixteen.kv_bytes_per_token() * 8 == LLAMA_70B.kv_bytes_per_token(), "KV heads are replicated"
    assert replace(LLAMA_70B, vocab=1001).local(8).vocab == 126
    routed = replace(LLAMA_70B, experts=ExpertSize(80, 16, 2, 1024, shared_width=512))
    share = routed.local(4)
    assert share.experts == ExpertSize(80, 16, 2, 256, shared_width=128)
    assert share.expert_parameters * 4 == routed.expert_parameters
    assert (8192, 16, 80) in share.linear_counts(), "each card has the router"


@pytest.mark.parametrize(("card", "rate", "hop_s"), [("h100", 0.8 * 450e9, 0.6e-6), ("l40s", 0.5 * 32e9, 1e-6)])
def test_a_groups_step_is_its_shares_step_and_the_exchanges(card: str, rate: float, hop_s: float) -> None:
    one, group = (Ceilings.of_card(find_card(card), MEASURED, num_cards) for num_cards in (1, 4))
    assert group.link == Link(rate, 6.6e-6, hop_s)
    whole, share = (step_seconds(DECODING, LLAMA_70B, AWQ, each) for each in (group, one))
    alone = step_seconds(DECODING, LLAMA_70B.local(4), AWQ, one)
    parts = step_exchanges(80, 8192, 128_256, 4, 64, 64)
    assert whole == replace(alone, exchange_s=exchange_seconds(parts, 4, group.link))
    assert alone.exchange_s == share.exchange_s == 0.0
    assert whole.total_s == pytest.approx(alone.total_s + whole.exchange_s)
    assert whole.linears_s < share.linears_s / 3


def test_a_bound_of_a_group_has_no_latency() -> None:
    group = Ceilings.of_card(find_card("h100"), BOUND, 8)
    found = step_seconds(DECODING, LLAMA_70B, DENSE, group).exchange_s
    sent = 2 * 7 / 8 * 161 * 64 * 8192 * 2 + 7 / 8 * 64 * 128_256 * 2
    assert found == pytest.approx(sent / 450e9)


def test_the_source_says_that_links_are_assumed() -> None:
    assert source(["H200"], has_groups=True).endswith("(2026-11-26); exchanges between cards assumed")
    assert "exchanges" not in source(["H200", "L4"])
