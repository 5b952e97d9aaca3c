"""The distribution of sampled tokens against a plain implementation in float64, and chi-square of many samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling.on_host import distribution, sample
from tests.engine.sampling.sampled_rows import (
    LOGITS,
    OPTIONS,
    OUTPUT,
    PROMPT,
    batch_of,
    chi_square_fits,
    mixed_rows,
    plain_distribution,
    rows_of,
)


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
    counts = np.bincount(sample(logits, batch).token_ids, minlength=len(LOGITS))
    assert chi_square_fits(counts, expected)


def test_chi_square_tells_near_distributions_apart():
    p = np.array([0.5, 0.3, 0.2])
    assert chi_square_fits(np.array([10_000, 6_000, 4_000]), p)
    assert not chi_square_fits(np.array([10_400, 5_800, 3_800]), p)
    assert not chi_square_fits(np.array([10_000, 10_000, 1]), np.array([0.5, 0.5, 0.0]))


@settings(max_examples=300, deadline=None)
@given(
    # steps of 1/64: two that differ by less than float32's exp can tell are a tie, whose order is nobody's promise
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


def test_draws_follow_the_distribution_of_their_row():
    logits, batch = mixed_rows(45, 40)
    p = distribution(logits, batch).numpy()
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-5)
    for row in range(45):
        np.testing.assert_array_equal(distribution(*rows_of(logits, batch, [row]))[0].numpy(), p[row])
        assert p[row, sample(logits, batch).token_ids[row]] > 0
    greedy = batch_of([SamplingParams()] * 45)
    assert (distribution(logits, greedy).numpy() == (np.arange(40) == sample(logits, greedy).token_ids[:, None])).all()


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
    assert chi_square_fits(np.bincount(ids, minlength=num_tokens), expected)
