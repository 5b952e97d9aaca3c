"""Uniform numbers by seed and position, and the token that each of them means."""

import math

import numpy as np
import torch

from pipeline.engine.sampling import random_numbers
from pipeline.engine.sampling.random_numbers import uniforms
from tests.engine.sampling.sampled_rows import chi_square_fits


def test_uniforms_are_uniform_and_independent_of_near_keys():
    seed, position = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    u = uniforms(seed.ravel(), position.ravel()).reshape(300, 300)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert chi_square_fits(np.histogram(u, bins=100, range=(0, 1))[0], np.full(100, 0.01))
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
    """Whatever the uniform number and the rounding: u is 0, near 1, and on every border between tokens."""
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


def test_a_target_beyond_the_sum_takes_the_last_token_of_positive_weight():
    w = torch.tensor([[0.25, 0.5, 0.0, 0.0], [0.0, 0.0, 1e-300, 0.0]], dtype=torch.float64)
    assert random_numbers.first_past(w, torch.tensor([2.0, 1.0]).double())[0].tolist() == [1, 2]
    assert random_numbers.first_past(w, torch.tensor([0.25, 0.0]).double())[0].tolist() == [1, 2]
