"""top_k and top_p: which tokens are kept, over vocabularies and distributions of all kinds."""

import numpy as np
import pytest
import torch

from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling import top_p as weights
from pipeline.engine.sampling.on_host import distribution
from tests.engine.sampling.sampled_rows import batch_of, plain_distribution


def test_top_k_keeps_ties_and_top_p_the_fewest(device):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    batch = batch_of([SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.5)])
    kept = distribution(logits, batch).cpu() > 0
    assert kept.tolist() == [[False, True, True, True, False], [True, True, True, False, False]]


@pytest.mark.parametrize(("spread", "top_p"), [(0.1, 0.5), (0.1, 0.99), (3.0, 0.95), (8.0, 0.9)])
def test_top_p_over_a_large_vocabulary(spread, top_p, device):
    """Flat rows need more than the best values sorted at first; rows of both kinds share the batch."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1, (2, 3000)).astype(np.float32) * np.array([[spread], [8.0]], dtype=np.float32)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    got = distribution(torch.from_numpy(logits).to(device), batch_of([params] * 2)).cpu().numpy()
    for row in range(2):
        expected = plain_distribution(logits[row], params)
        if expected is not None:
            assert ((got[row] > 0) == (expected > 0)).all()
            np.testing.assert_allclose(got[row], expected, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [3, 64, 65, 255, 256, 700, 5000])
def test_the_fewest_best_tokens_that_reach_top_p_are_kept(num_tokens, device):
    """Rows of every flatness, with equal values, with few values above 0, and all sorts of them in one batch."""
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


@pytest.mark.parametrize("num", [1, 5, 64, 300])
def test_best_values_are_the_best_in_order_and_with_all_their_equals(num, device):
    rng = np.random.default_rng(num)
    x = rng.normal(0, 3, (20, 777)).astype(np.float32)
    x[10:] = x[10:].round()
    x[4, :700] = -np.inf
    best, count = weights.best_values(torch.from_numpy(x).to(device), num, torch.finfo(torch.float32).min)
    for row in range(20):
        expected = np.sort(x[row])[::-1]
        enough = int(count[row])
        np.testing.assert_array_equal(best[row, :enough].cpu().numpy(), expected[:enough])
        assert enough >= min(num, int(np.isfinite(x[row]).sum()))
        assert enough == int((x[row] >= expected[enough - 1]).sum())
