"""The samplers of the host and of a device: a row's token is the same in any batch, and one that its options allow."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.engine.sampling import on_host
from pipeline.engine.sampling.on_host import distribution, greedy, sample
from pipeline.engine.sampling.penalties import FutureIds, adjusted
from pipeline.engine.sampling.rejection import ProposalDistribution
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.slot_table import PLACEHOLDER_TOKEN
from tests.engine.sampling.sampled_rows import LOGITS, OPTIONS, batch_of, mixed_rows, on_device, rows_of


@pytest.mark.parametrize("num_tokens", [37, 1300])
def test_batch_mates_and_order_change_nothing(num_tokens, device):
    logits, batch = mixed_rows(45, num_tokens)
    logits = logits.to(device)
    together = sample(logits, batch).token_ids
    order = np.random.default_rng(1).permutation(45)
    assert (sample(*rows_of(logits, batch, order)).token_ids == together[order]).all()
    for row in range(45):
        assert sample(*rows_of(logits, batch, [row])).token_ids[0] == together[row]


@pytest.mark.parametrize("rows_of_a_block", [1, 7, 44])
def test_blocks_of_rows_draw_what_all_rows_draw(rows_of_a_block, monkeypatch):
    logits, batch = mixed_rows(45, 1300)
    together = sample(logits, batch).token_ids
    monkeypatch.setattr(on_host, "_BLOCK_VALUES", rows_of_a_block * 1300 + 50)
    assert (sample(logits, batch).token_ids == together).all()


def test_another_seed_or_position_draws_anew():
    logits = torch.zeros(1, 4096)
    params = [SamplingParams(max_tokens=9, temperature=1.0)]
    first = sample(logits, batch_of(params, seeds=[5], positions=[3])).token_ids[0]
    assert sample(logits, batch_of(params, seeds=[5], positions=[3])).token_ids[0] == first
    assert sample(logits, batch_of(params, seeds=[6], positions=[3])).token_ids[0] != first
    assert sample(logits, batch_of(params, seeds=[5], positions=[4])).token_ids[0] != first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [7, 1000, 40_000])
def test_greedy_chooses_the_lowest_of_equal_ids(dtype, num_tokens, device):
    logits = torch.zeros(3, num_tokens, dtype=dtype, device=device)
    first = num_tokens // 3
    logits[:, [first, num_tokens // 2, num_tokens - 1]] = 1.5
    plain = SamplingParams()
    penalised = SamplingParams(presence_penalty=0.5)  # uses the other path
    ignores = SamplingParams(top_k=3, top_p=0.1, min_p=0.9)
    out = sample(logits, batch_of([plain, penalised, ignores]))
    assert out.token_ids.tolist() == [first] * 3
    assert sample(logits, batch_of([plain] * 3)).token_ids.tolist() == [first] * 3
    assert greedy(logits).token_ids.tolist() == [first] * 3
    assert out.finite.all()


@pytest.mark.parametrize("sampler", [sample, on_device])
def test_rows_that_are_not_finite_are_flagged_and_change_no_other_row(sampler, device):
    logits, batch = mixed_rows(60, 50)
    logits = logits.to(device)
    before, clean = logits.clone(), sampler(logits, batch)
    assert clean.finite.all()
    bad = [3, 10, 14, 16, 20, 31, 42]
    broken = logits.clone()
    broken[3, 7], broken[10, 0], broken[14], broken[16] = float("nan"), float("inf"), float("nan"), float("-inf")
    broken[[20, 31, 42], 2] = float("inf")
    got = sampler(broken, batch)
    assert np.flatnonzero(~got.finite).tolist() == bad
    good = np.setdiff1d(np.arange(60), bad)
    assert (got.token_ids[good] == clean.token_ids[good]).all()
    assert (got.token_ids[bad] == 0).all()
    assert set(clean.logprobs) - set(got.logprobs) == set(bad) & set(clean.logprobs)
    rows = [3, 10, 14, 16, 0]
    for plain in (sampler(broken[rows], batch_of([SamplingParams()] * 5)), sampler(broken[rows], None)):
        assert plain.finite.tolist() == [False, False, False, False, True]
        assert plain.token_ids.tolist() == [0, 0, 0, 0, int(logits[0].argmax())]
    hidden = [0.0, 1.0, float("inf")]  # the mask of min_tokens would hide it
    nothing_left = [float("-inf"), float("-inf"), 1.0]
    capped = [0.0, float("inf"), 2.0]  # a penalty would make it finite
    masked = ({"min_tokens": 1}, {"min_tokens": 1, "temperature": 1.0})
    for row, options in [(row, each) for row in (hidden, nothing_left) for each in masked] + [
        (capped, {"repetition_penalty": 2.0})
    ]:
        penalised = batch_of([SamplingParams(**options)], output=[[1]])
        assert not sampler(torch.tensor([row], device=device), penalised).finite.any(), options
    # single -inf are valid
    some = logits.clone()
    some[:, 5] = float("-inf")
    assert sampler(some, batch).finite.all()
    assert torch.equal(logits, before), "the logits are not changed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_keeps_the_sequence_alive(temperature, device):
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]], device=device).expand(4, -1)
    params = SamplingParams(max_tokens=9, min_tokens=3, temperature=temperature, top_k=1, stop_token_ids=(3,))
    rows = [params, params, replace(params, ignore_eos=True), replace(params, stop_token_ids=(99,))]
    out = sample(logits, batch_of(rows, positions=[2, 3, 0, 0]))
    assert out.token_ids.tolist() == [1, 2, 2, 3]
    nothing_left = sample(logits[:, 2:3], batch_of([params] * 4, positions=[0] * 4, eos=frozenset({0})))
    assert not nothing_left.finite.any()
    assert logits[0].tolist() == [0.0, 1.0, 9.0, 8.0]


def test_logprobs_are_those_of_the_raw_logits(device):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, 300, generator=generator).bfloat16().to(device)
    base = {"max_tokens": 9, "temperature": 0.7, "top_k": 4, "repetition_penalty": 2.0}
    rows = [SamplingParams(**base, logprobs=n) for n in (0, 5, None, 100)]
    out = sample(logits, batch_of(rows, output=[np.arange(50)] * 4))
    exact = logits.float().log_softmax(-1).cpu()
    assert list(out.logprobs) == [0, 1, 3]
    for row, width in ((0, 0), (1, 5), (3, 100)):
        got = out.logprobs[row]
        assert got.token_id == out.token_ids[row]
        assert got.logprob == pytest.approx(exact[row, got.token_id].item(), abs=1e-5)
        assert len(got.top) == width
        values = [value for _, value in got.top]
        np.testing.assert_allclose(values, exact[row].sort(descending=True).values[:width], atol=1e-5)
        for token, value in got.top:
            assert value == pytest.approx(exact[row, token].item(), abs=1e-5)


def test_extreme_options_stay_finite():
    logits = torch.tensor([[0.0, -1.0, 2.0, 2.5, 0.0, float("-inf")]])
    for change in (
        {"temperature": 1e-40},
        {"temperature": 1e300},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e40},
        {"frequency_penalty": 1e300},
        {"frequency_penalty": -1e300, "presence_penalty": -1e300},
    ):
        params = SamplingParams(**{"temperature": 1.0, **change})
        batch = batch_of([params], output=[np.array([0, 3, 3])])
        assert sample(logits, batch).finite.all()
        p = distribution(logits, batch)[0]
        assert p.isfinite().all()
        assert p.sum().item() == pytest.approx(1.0, abs=1e-5)
        assert p[5] == 0
    coldest = distribution(logits, batch_of([SamplingParams(temperature=1e-40)]))[0]
    assert coldest.tolist() == [0, 0, 0, 1, 0, 0]


def test_a_step_without_rows_gives_no_tokens():
    none = torch.zeros(0, 7)
    assert greedy(none).token_ids.tolist() == []
    assert sample(none, rows_of(none, batch_of([SamplingParams()]), np.arange(0))[1]).token_ids.tolist() == []


# -- tokens that a device samples are the host's


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
    for sampled in (sample, on_device):
        assert same(sampled(logits_RV, batch), expected)
        assert same(sampled(logits_RV, None), greedy)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_that_all_want_the_same(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 9, "temperature": 1.0, "logprobs": 1, **OPTIONS[name]})
    output = [np.array([1, 4, 4, row % 10]) for row in range(30)]
    batch = batch_of([params] * 30, positions=[3] * 30, output=output, prompt=[np.arange(3)] * 30)
    logits_RV = torch.tensor(LOGITS).expand(30, -1)
    assert same(on_device(logits_RV, batch), sample(logits_RV, batch))


@pytest.mark.parametrize("seed", range(4))
def test_a_token_that_the_host_does_not_know_yet_is_counted(seed: int) -> None:
    """The last token of most rows is unknown to the host: repeated tokens and new ones."""
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
