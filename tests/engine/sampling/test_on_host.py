"""The sampler against a slow plain implementation, exact enumeration and chi-square of many draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.engine.params import SamplingParams
from pipeline.engine.sampling import on_host as sampler
from pipeline.engine.sampling import random_numbers as draws
from pipeline.engine.sampling import top_p as weights
from pipeline.engine.sampling.batch import SamplingBatch
from pipeline.engine.sampling.on_host import distribution, greedy, sample
from pipeline.engine.sampling.random_numbers import uniforms
from pipeline.engine.schedule.sequence import SAMPLING_OPTIONS, is_plain, sampling_options

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EOS = frozenset({2})


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return request.param


def batch_of(params, *, seeds=None, positions=None, output=None, prompt=None, eos=EOS):
    """What the engine hands over for rows with these options; their known tokens lie in a table in reversed order."""
    count = len(params)
    output = output or [np.empty(0, dtype=np.int32)] * count
    prompt = prompt or [np.empty(0, dtype=np.int32)] * count
    slots = np.arange(count)[::-1].copy()
    num_prompt = np.array([len(ids) for ids in prompt], dtype=np.int64)
    num_known = num_prompt + [len(ids) for ids in output]
    token_ids = np.zeros((count, num_known.max() + 3), dtype=np.int32)
    ending_ids = np.full(count, None, dtype=object)
    for row, slot in enumerate(slots):
        token_ids[slot, : num_known[row]] = [*prompt[row], *output[row]]
        if params[row].min_tokens:
            ids = {*params[row].stop_token_ids, *(() if params[row].ignore_eos else eos)}
            ending_ids[row] = np.array(sorted(ids), dtype=np.int64)
    return SamplingBatch(
        options=np.array([sampling_options(p) for p in params], dtype=SAMPLING_OPTIONS),
        seeds=np.arange(count, dtype=np.uint64) if seeds is None else np.asarray(seeds, dtype=np.uint64),
        positions=np.zeros(count, dtype=np.int64) if positions is None else np.asarray(positions),
        ending_ids=ending_ids,
        token_ids=token_ids,
        slots=slots,
        num_prompt=num_prompt,
        num_known=num_known,
    )


def plain_distribution(logits, params, output=(), prompt=(), position=0, eos=EOS):
    """One row, in float64 and by the book; None where the answer hangs on the last bit."""
    z = [float(np.float32(x)) for x in logits]
    if position < params.min_tokens:
        for token in {*params.stop_token_ids, *(() if params.ignore_eos else eos)}:
            if token < len(z):
                z[token] = -math.inf
    for token in {*output, *prompt}:
        z[token] = z[token] * params.repetition_penalty if z[token] < 0 else z[token] / params.repetition_penalty
    for token in set(output):
        z[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    if params.temperature == 0:
        best = z.index(max(z))
        if any(0 < z[best] - x < 1e-5 for x in z):
            return None
        return np.array([float(token == best) for token in range(len(z))])
    z = [x / params.temperature for x in z]
    if params.top_k:
        kth = sorted(z, reverse=True)[min(params.top_k, len(z)) - 1]
        if any(0 < abs(x - kth) < 1e-5 for x in z):
            return None
        z = [x if x >= kth else -math.inf for x in z]
    w = [math.exp(x - max(z)) for x in z]
    if params.min_p and any(0 < abs(x - params.min_p) < 1e-5 for x in w):
        return None
    w = [x if x >= params.min_p else 0.0 for x in w]
    p = [x / sum(w) for x in w]
    better = 0.0
    for token in sorted(range(len(p)), key=lambda token: (-p[token], token)):
        if params.top_p < 1 and abs(better - params.top_p) < 1e-5:
            return None
        if params.top_p < 1 and better >= params.top_p:
            w[token] = 0.0
        better += p[token]
    return np.array(w) / sum(w)


LOGITS = [1.5, -0.3, 2.25, 0.0, 0.75, -2.0, 1.0, -0.5, 2.0, -1.25]
OPTIONS = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "top_k after min_p, then top_p": {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": -0.6},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (0,)},
    "all": {
        "temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 4, "stop_token_ids": (8,),
    },
}  # fmt: skip
OUTPUT, PROMPT = np.array([2, 6, 2, 1], dtype=np.int32), np.array([4, 5, 5], dtype=np.int32)


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


def chi_square_fits(counts, p):
    """Whether counts are within six standard deviations of chi-square; probability 0 must not occur."""
    possible = p > 0
    if counts[~possible].any():
        return False
    mean = p[possible] * counts.sum()
    freedom = possible.sum() - 1
    return ((counts[possible] - mean) ** 2 / mean).sum() <= freedom + 6 * math.sqrt(2 * max(freedom, 1))


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


def mixed_rows(num_rows, num_tokens, seed=0):
    rng = np.random.default_rng(seed)
    options = [*OPTIONS.values(), {"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 0.5}]
    options.append({"temperature": 0.0, "min_tokens": 9, "logprobs": 2})
    params = [
        SamplingParams(**{"max_tokens": 20, "temperature": 1.0, **options[i % len(options)]}) for i in range(num_rows)
    ]
    lengths = rng.integers(0, 12, num_rows)
    output = [rng.integers(0, num_tokens, n).astype(np.int32) for n in lengths]
    prompt = [rng.integers(0, num_tokens, 7).astype(np.int32) for _ in range(num_rows)]
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, num_tokens)).astype(np.float32))
    seeds = rng.integers(0, 2**63, num_rows).astype(np.uint64)
    return logits, batch_of(params, seeds=seeds, positions=lengths, output=output, prompt=prompt)


def rows_of(logits, batch, rows):
    shared = {"token_ids": batch.token_ids}
    return logits[rows], SamplingBatch(**{name: values[rows] for name, values in vars(batch).items()} | shared)


def test_draws_follow_the_distribution_of_their_row():
    logits, batch = mixed_rows(45, 40)
    p = distribution(logits, batch).numpy()
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-5)
    for row in range(45):
        np.testing.assert_array_equal(distribution(*rows_of(logits, batch, [row]))[0].numpy(), p[row])
        assert p[row, sample(logits, batch).token_ids[row]] > 0
    greedy = batch_of([SamplingParams()] * 45)
    assert (distribution(logits, greedy).numpy() == (np.arange(40) == sample(logits, greedy).token_ids[:, None])).all()


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
    sizes = [len(block) for block in sampler._blocks(np.arange(45), logits)]
    together = sample(logits, batch).token_ids
    monkeypatch.setattr(sampler, "_BLOCK_VALUES", rows_of_a_block * 1300 + 50)
    in_blocks = sample(logits, batch).token_ids
    assert sizes == [45]
    assert max(len(block) for block in sampler._blocks(np.arange(45), logits)) == rows_of_a_block
    assert (in_blocks == together).all()


def test_another_seed_or_position_draws_anew():
    logits = torch.zeros(1, 4096)
    params = [SamplingParams(max_tokens=9, temperature=1.0)]
    first = sample(logits, batch_of(params, seeds=[5], positions=[3])).token_ids[0]
    assert sample(logits, batch_of(params, seeds=[5], positions=[3])).token_ids[0] == first
    assert sample(logits, batch_of(params, seeds=[6], positions=[3])).token_ids[0] != first
    assert sample(logits, batch_of(params, seeds=[5], positions=[4])).token_ids[0] != first


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
            drawn = draws.draw(w, torch.from_numpy(u).to(device)).cpu().numpy()
            assert (weights[np.arange(400), drawn] > 0).all()


def test_a_target_beyond_the_sum_takes_the_last_token_of_positive_weight():
    w = torch.tensor([[0.25, 0.5, 0.0, 0.0], [0.0, 0.0, 1e-300, 0.0]], dtype=torch.float64)
    assert draws.first_past(w, torch.tensor([2.0, 1.0]).double())[0].tolist() == [1, 2]
    assert draws.first_past(w, torch.tensor([0.25, 0.0]).double())[0].tolist() == [1, 2]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [7, 1000, 40_000])
def test_greedy_takes_the_lowest_of_equal_ids(dtype, num_tokens, device):
    logits = torch.zeros(3, num_tokens, dtype=dtype, device=device)
    first = num_tokens // 3
    logits[:, [first, num_tokens // 2, num_tokens - 1]] = 1.5
    plain = SamplingParams()
    penalised = SamplingParams(presence_penalty=0.5)  # takes the other path
    ignores = SamplingParams(top_k=3, top_p=0.1, min_p=0.9)
    out = sample(logits, batch_of([plain, penalised, ignores]))
    assert out.token_ids.tolist() == [first] * 3
    assert sample(logits, batch_of([plain] * 3)).token_ids.tolist() == [first] * 3
    assert greedy(logits).token_ids.tolist() == [first] * 3
    assert out.finite.all()


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


def test_rows_that_are_not_finite_are_flagged_and_touch_nobody(device):
    logits, batch = mixed_rows(30, 50)
    logits = logits.to(device)
    clean = sample(logits, batch)
    assert clean.finite.all()
    broken = logits.clone()
    broken[3, 7], broken[10, 0], broken[16] = float("nan"), float("inf"), float("-inf")
    broken[14] = float("nan")
    bad = [3, 10, 14, 16]
    got = sample(broken, batch)
    assert np.flatnonzero(~got.finite).tolist() == bad
    good = np.setdiff1d(np.arange(30), bad)
    assert (got.token_ids[good] == clean.token_ids[good]).all()
    assert (got.token_ids[bad] == 0).all()
    assert set(clean.logprobs) - set(got.logprobs) == set(bad) & set(clean.logprobs)
    assert not set(bad) & set(got.logprobs)
    assert not distribution(broken, batch)[bad].any()
    rows = [3, 10, 14, 16, 0]
    for plain in (sample(broken[rows], batch_of([SamplingParams()] * 5)), greedy(broken[rows])):
        assert plain.finite.tolist() == [False, False, False, False, True]
        assert plain.token_ids.tolist() == [0, 0, 0, 0, int(logits[0].argmax())]
    hidden = torch.tensor([[0.0, 1.0, float("inf")]], device=device)  # where the mask of min_tokens would hide it
    assert not sample(hidden, batch_of([SamplingParams(min_tokens=1)])).finite.any()
    assert not sample(hidden, batch_of([SamplingParams(min_tokens=1, temperature=1.0)])).finite.any()
    # a -inf here and there is no fault
    masked = logits.clone()
    masked[:, 5] = float("-inf")
    assert sample(masked, batch).finite.all()


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


def test_the_logits_are_not_changed():
    logits, batch = mixed_rows(30, 50)
    before = logits.clone()
    sample(logits, batch)
    distribution(logits, batch)
    assert torch.equal(logits, before)


def test_only_rows_that_want_nothing_are_plain():
    assert is_plain(SamplingParams(max_tokens=3, top_k=3, top_p=0.1, min_p=0.9, stop=("x",), stop_token_ids=(3,)))
    for change in OPTIONS.values():
        assert is_plain(SamplingParams(max_tokens=9, **change)) == (set(change) <= {"top_k", "top_p", "min_p"})
    assert not is_plain(SamplingParams(logprobs=0))


def test_options_of_any_size_fit_their_row():
    params = SamplingParams(max_tokens=2**70, min_tokens=2**65, top_k=2**64, temperature=1.0)
    batch = batch_of([params])
    assert batch.options["top_k"][0] == batch.options["min_tokens"][0] == 2**63 - 1
    assert sample(torch.tensor([[0.0, 1.0, 99.0]]), batch).token_ids[0] != 2


def test_a_step_without_rows_gives_no_tokens():
    none = torch.zeros(0, 7)
    assert greedy(none).token_ids.tolist() == []
    assert sample(none, rows_of(none, batch_of([SamplingParams()]), np.arange(0))[1]).token_ids.tolist() == []
