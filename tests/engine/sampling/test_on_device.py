"""Tokens that the device samples against the host's sampler, one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling.on_host import sample
from pipeline.engine.sampling.penalties import FutureIds, adjusted
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.schedule.sequence import PLACEHOLDER_TOKEN
from tests.engine.sampling.sampled_rows import LOGITS, OPTIONS, batch_of, mixed_rows, on_device


def same(ours, expected) -> bool:
    finite = np.array_equal(ours.finite, expected.finite)
    return finite and np.array_equal(ours.token_ids, expected.token_ids) and ours.logprobs == expected.logprobs


@pytest.mark.parametrize("num_tokens", [13, 600])
@pytest.mark.parametrize("seed", range(4))
def test_every_option_gives_the_tokens_of_the_host(seed: int, num_tokens: int) -> None:
    logits_RV, batch = mixed_rows(90, num_tokens, seed)
    assert same(on_device(logits_RV, batch), sample(logits_RV, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_in_the_model_s_type_are_read_as_float32(dtype: torch.dtype) -> None:
    """Tokens and log-probabilities, on the host and on the device, greedy ones too."""
    logits_RV, batch = mixed_rows(90, 600, 1)
    logits_RV = logits_RV.to(dtype)
    expected, greedy = (sample(logits_RV.float(), each) for each in (batch, None))
    for sampler in (sample, on_device):
        assert same(sampler(logits_RV, batch), expected)
        assert same(sampler(logits_RV, None), greedy)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_that_all_want_the_same(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 9, "temperature": 1.0, "logprobs": 1, **OPTIONS[name]})
    output = [np.array([1, 4, 4, row % 10]) for row in range(30)]
    batch = batch_of([params] * 30, positions=[3] * 30, output=output, prompt=[np.arange(3)] * 30)
    logits_RV = torch.tensor(LOGITS).expand(30, -1)
    assert same(on_device(logits_RV, batch), sample(logits_RV, batch))


@pytest.mark.parametrize("seed", range(4))
def test_a_token_that_the_host_does_not_know_yet_is_counted(seed: int) -> None:
    """Of most rows the last token is late: tokens that the row had before, once or more, and others."""
    rng = np.random.default_rng(seed)
    penalties = {
        "repetition_penalty": (1.0, 1.8), "presence_penalty": (0.0, 0.7, -0.4), "frequency_penalty": (0.0, 0.9),
        "temperature": (0.0, 0.5), "min_tokens": (0, 20),
    }  # fmt: skip
    params = [
        SamplingParams(max_tokens=50, **{name: values[rng.integers(len(values))] for name, values in penalties.items()})
        for _ in range(120)
    ]
    output = [rng.integers(0, 6, int(rng.integers(1, 9))).astype(np.int32) for _ in params]
    prompt = [rng.integers(0, 12, 5).astype(np.int32) for _ in params]
    positions = [len(ids) for ids in output]
    batch = batch_of(params, positions=positions, output=output, prompt=prompt)
    logits_RV = torch.from_numpy(rng.normal(0, 1, (120, 12)).astype(np.float32))
    expected = sample(logits_RV, batch)
    row_L = np.flatnonzero(rng.random(120) < 0.7)
    late = FutureIds(row_L, torch.tensor([int(output[row][-1]) for row in row_L]))
    last = batch.slots[row_L], batch.num_known[row_L] - 1
    assert (batch.token_ids[last] == late.token_id_F.numpy()).all()
    hidden = batch.token_ids.copy()
    hidden[last] = PLACEHOLDER_TOKEN
    unknown = replace(batch, token_ids=hidden)
    assert same(on_device(logits_RV, unknown, late), expected)
    assert not same(on_device(logits_RV, unknown), expected)
    every = np.arange(120)
    z_RV = adjusted(logits_RV, batch, every)
    assert torch.equal(adjusted(logits_RV, unknown, every, late), z_RV)


def test_drafts_of_a_known_distribution_are_settled_as_on_the_host() -> None:
    rng = np.random.default_rng(8)
    logits_RV, batch = mixed_rows(60, 20, seed=2)
    rows = np.sort(rng.choice(60, 40, replace=False))
    q_DV = torch.from_numpy(rng.dirichlet(np.ones(20), 40)).float()
    proposal = ProposalDistribution(rows, rng.integers(0, 20, 40), q_DV)
    settled = on_device(logits_RV, batch, proposal=proposal)
    assert same(settled, sample(logits_RV, batch, proposal))
    assert not same(settled, sample(logits_RV, batch))
