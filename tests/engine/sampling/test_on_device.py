"""Tokens that the device samples against the host's sampler, one by one, and the distribution of what is sampled."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling import penalties
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.sampling.on_host import sample
from pipeline.engine.sampling.penalties import FutureIds, adjusted
from pipeline.engine.sampling.random_numbers import uniforms
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.schedule.sequence import PLACEHOLDER_TOKEN
from pipeline.kernels import reference
from tests.engine.sampling.sampled_rows import LOGITS, OPTIONS, batch_of, mixed_rows, plain_distribution
from tests.engine.sampling.test_verify import p_value

NUM_DRAWS = 40_000
SHAPES = {name: OPTIONS[name] for name in ("plain", "hot", "top_k", "top_p", "min_p", "top_k after min_p, then top_p")}
SHAPES["cold, then top_p"] = {"temperature": 0.6, "top_p": 0.7}
FALSE_ALARM = 1e-4  # of all chi-square tests here together


class OnThisDevice:
    greedy, sample = staticmethod(reference.greedy), staticmethod(reference.sample)


def same(ours, expected) -> bool:
    finite = np.array_equal(ours.finite, expected.finite)
    return finite and np.array_equal(ours.token_ids, expected.token_ids) and ours.logprobs == expected.logprobs


@pytest.mark.parametrize("num_tokens", [13, 600])
@pytest.mark.parametrize("seed", range(4))
def test_every_option_gives_the_tokens_of_the_host(seed: int, num_tokens: int) -> None:
    logits_RV, batch = mixed_rows(90, num_tokens, seed)
    before = logits_RV.clone()
    assert same(sample_on_device(OnThisDevice(), logits_RV, batch).output(), sample(logits_RV, batch))
    assert torch.equal(logits_RV, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_in_the_model_s_type_are_read_as_float32(dtype: torch.dtype) -> None:
    """Tokens and log-probabilities, on the host and on the device, greedy ones too."""
    logits_RV, batch = mixed_rows(90, 600, 1)
    logits_RV = logits_RV.to(dtype)
    expected, greedy = (sample(logits_RV.float(), each) for each in (batch, None))
    assert same(sample(logits_RV, batch), expected)
    assert same(sample_on_device(OnThisDevice(), logits_RV, batch).output(), expected)
    assert same(sample(logits_RV, None), greedy)
    assert same(sample_on_device(OnThisDevice(), logits_RV, None).output(), greedy)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_that_all_want_the_same(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 9, "temperature": 1.0, "logprobs": 1, **OPTIONS[name]})
    output = [np.array([1, 4, 4, row % 10]) for row in range(30)]
    batch = batch_of([params] * 30, positions=[3] * 30, output=output, prompt=[np.arange(3)] * 30)
    logits_RV = torch.tensor(LOGITS).expand(30, -1)
    assert same(sample_on_device(OnThisDevice(), logits_RV, batch).output(), sample(logits_RV, batch))


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
    assert same(sample_on_device(OnThisDevice(), logits_RV, unknown, late).output(), expected)
    assert not same(sample_on_device(OnThisDevice(), logits_RV, unknown).output(), expected)
    every = np.arange(120)
    z_RV = adjusted(logits_RV, batch, every)
    assert torch.equal(adjusted(logits_RV, unknown, every, late), z_RV)


def test_a_late_token_that_its_row_had_before_has_one_count() -> None:
    """Whichever of the two is written last."""
    late = FutureIds(np.array([0, 2]), torch.tensor([7, 4]))
    places = torch.tensor([0, 0, 1, 2]), torch.tensor([3, 7, 7, 5])
    both, count = penalties._with_future(
        late, torch.tensor([0, 2]), np.array([0, 0, 1, 2]), places, torch.tensor([1, 2, 5, 1])
    )
    assert list(zip(both[0].tolist(), both[1].tolist(), count.tolist())) == [
        (0, 3, 1), (0, 7, 3), (1, 7, 5), (2, 5, 1), (0, 7, 3), (2, 4, 1),
    ]  # fmt: skip


def test_rows_that_are_not_finite_are_flagged_and_touch_nobody() -> None:
    logits_RV, batch = mixed_rows(60, 50)
    clean = sample_on_device(OnThisDevice(), logits_RV, batch).output()
    assert clean.finite.all()
    bad = [3, 10, 14, 16, 20, 31, 42]
    broken = logits_RV.clone()
    broken[3, 7], broken[10, 0], broken[14], broken[16] = float("nan"), float("inf"), float("nan"), float("-inf")
    broken[[20, 31, 42], 2] = float("inf")
    ours = sample_on_device(OnThisDevice(), broken, batch).output()
    assert np.flatnonzero(~ours.finite).tolist() == bad
    good = np.setdiff1d(np.arange(60), bad)
    assert (ours.token_ids[good] == clean.token_ids[good]).all()
    assert (ours.token_ids[bad] == 0).all()
    assert set(clean.logprobs) - set(ours.logprobs) == set(bad) & set(clean.logprobs)
    for params in (SamplingParams(min_tokens=1), SamplingParams(min_tokens=1, temperature=1.0)):
        hidden = torch.tensor([[0.0, 1.0, float("inf")]])  # where the mask would hide it
        nothing_left = torch.tensor([[float("-inf"), float("-inf"), 1.0]])
        for row_1V in (hidden, nothing_left):
            assert not sample_on_device(OnThisDevice(), row_1V, batch_of([params])).output().finite.any()
    capped = torch.tensor([[0.0, float("inf"), 2.0]])  # which a penalty would make finite
    penalised = SamplingParams(repetition_penalty=2.0)
    assert not sample_on_device(OnThisDevice(), capped, batch_of([penalised], output=[[1]])).output().finite.any()


def test_drafts_of_a_known_distribution_are_settled_as_on_the_host() -> None:
    rng = np.random.default_rng(8)
    logits_RV, batch = mixed_rows(60, 20, seed=2)
    rows = np.sort(rng.choice(60, 40, replace=False))
    q_DV = torch.from_numpy(rng.dirichlet(np.ones(20), 40)).float()
    proposal = ProposalDistribution(rows, rng.integers(0, 20, 40), q_DV)
    settled = sample_on_device(OnThisDevice(), logits_RV, batch, proposal=proposal).output()
    assert same(settled, sample(logits_RV, batch, proposal))
    assert not same(settled, sample(logits_RV, batch))


def pairs_p_value(
    name: str,
    own_sample: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = reference.sample,
    seeds: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> float:
    """P value of pairs of draws at neighbouring positions against independent ones of the right distribution."""
    params = SamplingParams(**{"temperature": 1.0, **SHAPES[name]})
    p = plain_distribution(LOGITS, params)
    number = np.arange(NUM_DRAWS)
    seeds = number // 100 if seeds is None else seeds
    positions = number % 100 if positions is None else positions
    batch = batch_of([params] * NUM_DRAWS, seeds=seeds, positions=positions)
    chooser = OnThisDevice()
    chooser.sample = own_sample  # type: ignore[method-assign]
    ids = sample_on_device(chooser, torch.tensor(LOGITS).expand(NUM_DRAWS, -1), batch).output().token_ids
    return p_value(ids.reshape(-1, 2), np.outer(p, p))


@pytest.mark.parametrize("name", SHAPES)
def test_the_distribution_of_sampled_tokens(name: str) -> None:
    """Also that what a row samples at one position says nothing of the next."""
    assert len(SHAPES) * NUM_DRAWS >= 200_000
    assert pairs_p_value(name) > FALSE_ALARM / len(SHAPES)


def test_control_a_seed_that_is_used_again_at_every_position_is_told() -> None:
    number = np.arange(NUM_DRAWS)
    assert pairs_p_value("plain", seeds=number // 2, positions=number % 2) > FALSE_ALARM / len(SHAPES)
    assert pairs_p_value("plain", seeds=number // 2, positions=np.zeros(NUM_DRAWS, dtype=np.int64)) < FALSE_ALARM / len(
        SHAPES
    )


@pytest.mark.parametrize(
    "mistake", ["temperature after top_p", "min_p forgotten", "one more than top_k", "numbers that are not uniform"]
)
def test_control_a_wrong_distribution_is_told(mistake: str) -> None:
    def wrong(logits_RV: torch.Tensor, how_5R: torch.Tensor) -> torch.Tensor:
        how_5R = how_5R.clone()
        if mistake == "min_p forgotten":
            how_5R[3] = 0.0
        elif mistake == "one more than top_k":
            how_5R[1] += 1
        elif mistake == "numbers that are not uniform":
            how_5R[4] **= 1.1
        else:  # top_p cuts what the temperature has not touched
            p_RV = logits_RV.softmax(-1)
            best_RV, id_RV = p_RV.sort(-1, descending=True)
            cut_RV = best_RV.cumsum(-1) - best_RV >= how_5R[2].unsqueeze(-1)
            logits_RV = logits_RV.masked_fill(torch.zeros_like(cut_RV).scatter_(1, id_RV, cut_RV), -math.inf)
            how_5R[2] = 1.0
        return reference.sample(logits_RV, how_5R)

    names = {"temperature after top_p": "cold, then top_p", "min_p forgotten": "min_p", "one more than top_k": "top_k"}
    name = names.get(mistake, "plain")
    assert pairs_p_value(name, wrong) < FALSE_ALARM / len(SHAPES)


def test_the_numbers_are_those_of_the_host() -> None:
    """So a row draws the same tokens wherever it is computed."""
    batch = batch_of([SamplingParams(temperature=1.0)] * 5, seeds=[3, 3, 4, 4, 2**64 - 1], positions=[0, 1, 0, 1, 7])
    given = []
    chooser = OnThisDevice()
    chooser.sample = lambda logits_RV, how_5R: given.append(how_5R) or reference.sample(logits_RV, how_5R)  # type: ignore
    sample_on_device(chooser, torch.zeros(5, 9), batch)
    assert given[0][4].tolist() == uniforms(batch.seeds, batch.positions).tolist()
