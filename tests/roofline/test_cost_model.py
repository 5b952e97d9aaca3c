"""A step's bound against sums done by hand, and what must hold of every bound."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from pipeline.errors import ConfigError
from pipeline.roofline.cards import load_cards
from pipeline.roofline.cost_model import (
    AWQ,
    DENSE,
    Ceilings,
    DecoderSize,
    ExpertSize,
    Reached,
    StepLoad,
    Weights,
    linear_seconds,
    step_seconds,
)

SIZE = DecoderSize(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_dim=64, vocab=1000)
LLAMA_8B = DecoderSize(4096, 14_336, 32, 32, 8, 128, 128_256)
CARD = Ceilings("a card", 1e9, 1e12, 1e9)
SCRATCH = Weights(packed_bits=4, cached=False)


def step(counts, contexts, rows):
    return StepLoad(np.array(counts), np.array(contexts), rows)


def test_sizes_are_those_of_the_model():
    assert SIZE.linears() == [("qkv", 256, 512), ("o", 256, 256), ("gate_up", 256, 1024), ("down", 512, 256)]
    assert SIZE.linear_parameters == 2 * (256 * 512 + 256 * 256 + 256 * 1024 + 512 * 256)
    assert SIZE.kv_bytes_per_token() == 2 * 2 * 2 * 64 * 2
    assert LLAMA_8B.linear_parameters + 2 * LLAMA_8B.head_parameters == 8_029_995_008  # 8.03e9, without norms
    assert LLAMA_8B.kv_bytes_per_token() == 131_072
    assert LLAMA_8B.kv_bytes_per_token(1 + 4 / 128) == 2 * 32 * 8 * (128 + 4), "in fp8, a scale per token and head"


def test_layers_with_heads_of_their_own_are_counted_each():
    """A layer with a window of 8 keys and heads of 64, and one that sees all keys with a KV head of 128."""
    size = replace(SIZE, windows=(8, None), kv_heads_and_dims=((2, 64), (1, 128)))
    assert size.linear_parameters == SIZE.linear_parameters + 256 * 256 + 256 * 256
    seconds = step_seconds(step([1], [30], 0), size, DENSE, CARD)
    assert seconds.kv_s == pytest.approx((2 * 64 * 9 + 128 * 31) * 2 * 2 / 1e9)
    assert seconds.attention_s == pytest.approx(4 * 4 * (64 * 8 + 128 * 30) / 1e12)


def test_a_decoding_step_reads_weights_keys_and_values_once():
    seconds = step_seconds(step([1, 1], [10, 30], 2), SIZE, DENSE, CARD)
    assert seconds.linears_s == pytest.approx(SIZE.linear_parameters * 2 / 1e9)
    assert seconds.head_s == pytest.approx(256 * 1000 * 2 / 1e9)
    assert seconds.kv_s == pytest.approx((40 + 2) * SIZE.kv_bytes_per_token() / 1e9)
    assert seconds.attention_s == pytest.approx(4 * 2 * 4 * 64 * 40 / 1e12)
    assert seconds.total_s == pytest.approx(seconds.linears_s + seconds.kv_s + seconds.head_s)


def test_a_step_reads_the_experts_that_its_tokens_use():
    dense, every = 2 * (256 * 512 + 256 * 256), 3 * 256 * 128  # of attention; of an expert
    size = replace(SIZE, experts=ExpertSize(layers=1, num_experts=4, top_k=1, width=128, shared_width=64))
    for_all = dense + 256 * 4 + 3 * 256 * 64 + 3 * 256 * 512  # a router, a shared expert, a layer without experts
    assert size.linear_parameters == for_all + 4 * every
    assert size.active_expert_parameters == every
    for tokens, used in (1, 1.0), (2, 1.75), (1000, 4.0):  # the second token repeats the first's expert in a quarter
        seconds = step_seconds(step([1] * tokens, [10] * tokens, 0), size, DENSE, replace(CARD, flops_per_s=1e18))
        assert seconds.linears_s == pytest.approx((for_all + used * every) * 2 / 1e9)
    many = step_seconds(step([50_000], [50_000], 0), size, DENSE, CARD)
    assert many.linears_s == pytest.approx(2 * 50_000 * (for_all + every) / 1e12)


def test_a_model_with_experts_has_the_size_that_its_publisher_states():
    size = SHAPES["qwen3-30b-a3b"].size
    assert (size.linear_parameters + 2 * size.head_parameters) / 1e9 == pytest.approx(30.5, abs=0.05)
    active = size.linear_parameters - size.expert_parameters + size.active_expert_parameters
    assert (active + 2 * size.head_parameters) / 1e9 == pytest.approx(3.3, abs=0.1)


def test_a_long_prompt_is_computing():
    seconds = step_seconds(step([5000], [5000], 1), SIZE, DENSE, CARD)
    assert seconds.linears_s == pytest.approx(2 * 5000 * SIZE.linear_parameters / 1e12)
    assert seconds.attention_s == pytest.approx(4 * 2 * 4 * 64 * (5000 * 5001 / 2) / 1e12)
    assert seconds.head_s == pytest.approx(256 * 1000 * 2 / 1e9)
    last = step_seconds(step([100], [5000], 1), SIZE, DENSE, CARD)  # a chunk sees all that is before it
    assert last.attention_s == pytest.approx(4 * 2 * 4 * 64 * sum(range(4901, 5001)) / 1e12)
    assert step_seconds(step([100], [5000], 0), SIZE, DENSE, CARD).head_s == 0


def test_int4_weights_take_the_path_that_is_faster():
    slow_int4 = replace(CARD, reached=Reached(gemm=0.8, int4=0.4, int4_read=0.5))
    few, many = (linear_seconds(m, 1024, 1024, AWQ, slow_int4) for m in (1, 100_000))
    packed = 0.5 + 2.5 / 128
    assert few == pytest.approx({"packed": packed * 2**20 / 0.5e9, "dense": 2 * 2**20 / 1e9})
    assert many["packed"] == pytest.approx(2 * many["dense"])
    fp8 = linear_seconds(1, 1024, 1024, Weights(packed_bits=8), slow_int4)
    assert fp8 == pytest.approx(few | {"packed": (1 + 4 / 128) * 2**20 / 0.5e9})
    tokens = step([1] * 2000, [1] * 2000, 0)
    linears_s = step_seconds(tokens, SIZE, AWQ, slow_int4).linears_s
    assert linears_s == pytest.approx(step_seconds(tokens, SIZE, DENSE, slow_int4).linears_s)
    made = linear_seconds(100, 1024, 1024, SCRATCH, slow_int4)
    assert made["scratch"] == pytest.approx(
        linear_seconds(100, 1024, 1024, DENSE, slow_int4)["dense"] + (packed + 2) * 2**20 / 1e9
    )
    assert set(linear_seconds(1, 8, 8, DENSE, CARD)) == {"dense"}


def test_a_fixed_border_decides_the_path():
    served = replace(AWQ, fused_tokens=64)
    assert [set(linear_seconds(m, 512, 512, served, CARD)) for m in (1, 64, 65)] == [{"packed"}, {"packed"}, {"dense"}]
    made = replace(SCRATCH, fused_tokens=192)
    assert [set(linear_seconds(m, 512, 512, made, CARD)) for m in (192, 193)] == [{"packed"}, {"scratch"}]
    tokens = step([1] * 100, [9] * 100, 0)
    assert step_seconds(tokens, SIZE, served, CARD).linears_s > step_seconds(tokens, SIZE, AWQ, CARD).linears_s


def test_fp8_activations_are_a_byte_a_weight_and_a_rate_of_their_own():
    fp8 = replace(AWQ, fp8=True)
    card = replace(CARD, fp8_flops_per_s=2e12, reached=Reached(bandwidth=0.5, fp8=0.25))
    few, many = (linear_seconds(m, 1024, 1024, fp8, card) for m in (1, 100_000))
    assert few == pytest.approx({"fp8": (1 + 4 / 128) * 2**20 / 0.5e9})
    assert many == pytest.approx({"fp8": 2 * 100_000 * 2**20 / 0.5e12})
    with pytest.raises(ConfigError, match="a card: does not support products of fp8"):
        linear_seconds(1, 8, 8, fp8, CARD)
    a100, h100 = (next(c for c in load_cards() if c.name.startswith(name)) for name in ("A100", "H100"))
    assert Ceilings.of_card(a100, Reached()).fp8_flops_per_s is None
    assert Ceilings.of_card(h100, Reached()).fp8_flops_per_s == h100.fp8_flops


def test_what_sequences_share_is_read_once_and_multiplied_by_each():
    apart = step([1, 1, 1], [100, 110, 120], 3)
    together = replace(apart, spared_tokens=2 * 64)
    found, spared = (step_seconds(tokens, SIZE, DENSE, CARD) for tokens in (apart, together))
    assert found.kv_s - spared.kv_s == pytest.approx(128 * SIZE.kv_bytes_per_token() / 1e9)
    assert found.attention_s == spared.attention_s


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=20),
    st.sampled_from([DENSE, AWQ, SCRATCH]),
    st.tuples(*[st.floats(0.05, 1.0)] * 5),
)
def test_no_step_beats_its_bytes_or_its_products(sequences, weights, shares):
    counts, contexts = (list(each) for each in zip(*((n, n + before) for n, before in sequences)))
    tokens = step(counts, contexts, len(counts))
    bound = step_seconds(tokens, SIZE, weights, CARD)
    min_weight_bytes = 2 if weights is DENSE else weights.packed_bytes
    min_bytes = SIZE.linear_parameters * min_weight_bytes + SIZE.head_parameters * 2
    min_bytes += SIZE.kv_bytes_per_token() * sum(contexts)
    assert bound.total_s >= min_bytes / CARD.bytes_per_s
    flops = 2 * SIZE.linear_parameters * sum(counts) + 2 * SIZE.head_parameters * len(counts)
    assert bound.total_s >= flops / CARD.flops_per_s
    predicted = step_seconds(tokens, SIZE, weights, replace(CARD, reached=Reached(*shares, step_s=1e-4, layer_s=1e-5)))
    assert predicted.total_s >= bound.total_s + 1e-4 + 2e-5
    more = step([*counts, 5], [*contexts, 9], len(counts) + 1)
    longer = step(counts, [contexts[0] + 7, *contexts[1:]], len(counts))
    for other in (more, longer):
        assert step_seconds(other, SIZE, weights, CARD).total_s >= bound.total_s
    assert step_seconds(tokens, SIZE, weights, CARD, kv_value_bytes=1).kv_s == pytest.approx(bound.kv_s / 2)


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    before=st.integers(0, 50),
    window=st.one_of(st.none(), st.integers(1, 60)),
)
def test_a_window_limits_the_keys_that_are_seen_and_read(counts: list[int], before: int, window: int | None):
    load = step(counts, [before + count for count in counts], 0)
    seen = [
        {key for key in range(position + 1) if window is None or key > position - window}
        for count in counts
        for position in range(before, before + count)
    ]
    assert load.seen_keys(window) == sum(map(len, seen))
    ends = np.cumsum([0, *counts])
    read = [set().union(*seen[start:stop]) for start, stop in pairwise(ends)]
    assert load.read_tokens(window) == sum(map(len, read))


def test_layers_with_a_window_take_less_time_on_long_contexts():
    windowed = replace(LLAMA_8B, windows=(None, *[128] * 31))
    load = step([1] * 64, [8192] * 64, 64)
    full, short = (step_seconds(load, size, DENSE, CARD).kv_s for size in (LLAMA_8B, windowed))
    assert short == pytest.approx(full * (8193 + 31 * 129) / (32 * 8193))
    assert step_seconds(step([1], [100], 1), windowed, DENSE, CARD) == step_seconds(
        step([1], [100], 1), LLAMA_8B, DENSE, CARD
    )
