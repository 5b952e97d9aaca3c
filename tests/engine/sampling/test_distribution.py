"""The distribution of sampled tokens against a plain implementation in float64, and chi-square of many samples."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engine.sampling import random_numbers
from pipeline.engine.sampling import top_p as weights
from pipeline.engine.sampling.on_host import distribution, sample
from pipeline.engine.sampling.random_numbers import uniforms
from pipeline.engine.sampling_params import SamplingParams
from tests.engine.sampling.sampled_rows import (
    LOGITS,
    OPTIONS,
    OUTPUT,
    PROMPT,
    batch_of,
    p_value,
    plain_distribution,
    rows_of,
)

FALSE_ALARM = 1e-7  # of one chi-square test


@pytest.mark.parametrize("name", OPTIONS)
def test_distribution_and_draws_of_each_option(name, device):
    params = SamplingParams(**{"max_tokens": 9, "temperature": 1.0, **OPTIONS[name]})
    expected = plain_distribution(LOGITS, params, OUTPUT, PROMPT, position=3)
    assert expected is not None
    num_draws = 5_000
    batch = batch_of(
        [params] * num_draws,
        positions=[3] * num_draws,
        output=[OUTPUT] * num_draws,
        prompt=[PROMPT] * num_draws,
    )
    logits = torch.tensor(LOGITS, device=device)[None].expand(num_draws, -1)
    np.testing.assert_allclose(distribution(logits, batch)[7].cpu().numpy(), expected, atol=2e-6)
    assert p_value(sample(logits, batch).token_ids[:, None], expected) > FALSE_ALARM


@settings(max_examples=300, deadline=None)
@given(
    # steps of 1/64: logits that differ by less than float32's exp resolves are a tie, whose order is not defined
    st.lists(st.integers(-512, 512).map(lambda n: n / 64), min_size=3, max_size=24, unique=True),
    st.builds(
        SamplingParams,
        max_tokens=st.just(50),
        min_tokens=st.sampled_from([0, 0, 5]),
        temperature=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
        top_k=st.integers(0, 30),
        top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
        presence_penalty=st.sampled_from([-1.0, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
        ignore_eos=st.booleans(),
    ),
    st.lists(st.integers(0, 2), max_size=9),
    st.lists(st.integers(0, 2), max_size=9),
    st.integers(0, 2**64 - 1),
)
def test_any_combination_against_the_plain_implementation(logits, params, output, prompt, seed):
    expected = plain_distribution(logits, params, output, prompt, position=len(output))
    if expected is None:
        return
    batch = batch_of(
        [params], seeds=[seed], positions=[len(output)], output=[np.array(output, dtype=np.int32)],
        prompt=[np.array(prompt, dtype=np.int32)],
    )  # fmt: skip
    logits = torch.tensor([logits])
    np.testing.assert_allclose(distribution(logits, batch)[0].numpy(), expected, atol=2e-5)
    assert expected[sample(logits, batch).token_ids[0]] > 0


def test_draws_over_a_vocabulary_of_many_blocks(device):
    num_tokens, num_draws = 2100, 15_000
    logits = torch.full((num_tokens,), float("-inf"), device=device)
    alive = [0, 511, 512, 1023, 1024, 2047, 2099]
    p = np.array([0.05, 0.2, 0.1, 0.3, 0.15, 0.1, 0.1])
    logits[alive] = torch.from_numpy(np.log(p)).float().to(device)
    batch = batch_of([SamplingParams(temperature=1.0)] * num_draws)
    ids = np.concatenate(
        [
            sample(*rows_of(logits.expand(num_draws, -1), batch, np.arange(start, start + 5000))).token_ids
            for start in range(0, num_draws, 5000)
        ]
    )
    expected = np.zeros(num_tokens)
    expected[alive] = p
    assert p_value(ids[:, None], expected) > FALSE_ALARM


# -- what top_k and top_p keep


def test_top_k_keeps_ties_and_top_p_the_smallest_set(device):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    batch = batch_of([SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.5)])
    kept = distribution(logits, batch).cpu() > 0
    assert kept.tolist() == [[False, True, True, True, False], [True, True, True, False, False]]


@pytest.mark.parametrize("num_tokens", [3, 64, 65, 255, 256, 700, 5000])
def test_the_smallest_set_of_best_tokens_that_reaches_top_p_is_kept(num_tokens, device):
    """One batch has rows of every flatness, with equal values, and with few values above 0."""
    rng = np.random.default_rng(num_tokens)
    spread = np.array([0.0, 0.1, 1.0, 3.0, 10.0, 80.0])
    z = rng.normal(0, 1, (60, num_tokens)) * np.tile(spread, 10)[:, None]
    z[20:40] = z[20:40].round()
    z[:, num_tokens // 2 :][40:50] = -np.inf
    w = np.exp(z - z.max(axis=1, keepdims=True)).astype(np.float32)
    top_p = rng.choice([0.001, 0.5, 0.9, 0.999], 60)
    got = torch.from_numpy(w).to(device, copy=True)
    weights.cut_top_p(got, torch.from_numpy(top_p)[:, None].to(device))
    for row, kept in enumerate(got.cpu().numpy()):
        order = np.lexsort((np.arange(num_tokens), -w[row]))
        before = w[row][order].astype(np.float64).cumsum() - w[row][order]
        wanted = top_p[row] * w[row].sum(dtype=np.float64)
        expected = np.zeros(num_tokens, dtype=np.float32)
        expected[order[before < wanted]] = w[row][order[before < wanted]]
        if np.abs(before - wanted).min() > 1e-9:
            np.testing.assert_array_equal(kept, expected)


# -- random numbers


def test_uniforms_are_uniform_and_independent_of_near_keys():
    seed, position = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    u = uniforms(seed.ravel(), position.ravel()).reshape(300, 300)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert p_value((100 * u).astype(int).reshape(-1, 1), np.full(100, 0.01)) > FALSE_ALARM
    pairs = [u[:, 1:] * u[:, :-1], u[1:] * u[:-1], u[1:, :-1] * u[:-1, 1:]]
    pairs.append(u * uniforms(seed.ravel(), position.ravel(), stream=1).reshape(300, 300))
    for product in pairs:  # mean 1/4, deviation sqrt(7/144/n)
        assert abs(product.mean() - 0.25) < 5 * math.sqrt(7 / 144 / product.size)
    assert len(np.unique(u)) == u.size


def test_uniforms_never_change():
    """A resumed job must draw the numbers its first run drew."""
    got = uniforms(np.array([0, 1, 2**64 - 1], dtype=np.uint64), np.array([0, 7, 2**40]))
    assert got.tolist() == [0.13870941014555427, 0.4206846226673492, 0.6101618111065336]


def test_only_tokens_of_positive_weight_are_drawn(device):
    """The uniform number is 0, near 1, and on borders between tokens."""
    rng = np.random.default_rng(3)
    for num_tokens in (3, 512, 1500):
        weights = rng.random((400, num_tokens)).astype(np.float32) * (rng.random((400, num_tokens)) < 0.02)
        weights[:, 1] = 1e-30
        share = weights.cumsum(1, dtype=np.float64) / weights.sum(1, dtype=np.float64, keepdims=True)
        for u in (
            np.zeros(400),
            np.full(400, 1 - 2.0**-53),
            np.minimum(share[:, num_tokens // 2], 1 - 2.0**-53),
        ):
            w = torch.from_numpy(weights).to(device)
            drawn = random_numbers.draw(w, torch.from_numpy(u).to(device)).cpu().numpy()
            assert (weights[np.arange(400), drawn] > 0).all()
