"""Sampled tokens against the oracle, and the best token of each row against the engine's sampler on the host."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from pipeline.engine.sampling import on_host
from pipeline.kernels import reference
from pipeline.kernels.triton.sampling import argmax
from pipeline.kernels.triton.sampling import sample as kernel
from tests.kernels.triton.problems import DEVICE, DTYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter

OPTIONS = {  # temperature, top_k (0: all), top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.7, 0, 1.0, 0.0),
    "hot": (30.0, 0, 1.0, 0.0),
    "cold": (1e-30, 0, 1.0, 0.0),
    "top_k": (1.0, 7, 1.0, 0.0),
    "top_p": (1.0, 0, 0.8, 0.0),
    "little top_p": (1.0, 0, 0.01, 0.0),
    "min_p": (1.3, 0, 1.0, 0.05),
    "all": (1.5, 40, 0.9, 0.002),
    "more than the list holds": (30.0, 0, 0.9, 0.0),
    "top_k of more than the list holds": (1.0, 6000, 0.99, 0.0),
}


def params_of(options: list[tuple[float, float, float, float]], vocabulary: int, u_R: np.ndarray) -> torch.Tensor:
    options_R4 = np.array([(t, k or vocabulary, p, m) for t, k, p, m in options]).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(np.vstack([options_R4.T, u_R]), dtype=np.float64))


def both(logits_RV: torch.Tensor, sampling_params_5R: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    ours = kernel.sample(logits_RV.to(DEVICE), sampling_params_5R.to(DEVICE))
    return [
        (token_R.cpu().numpy(), finite_R.cpu().bool().numpy())
        for token_R, finite_R in (ours, reference.sample(logits_RV, sampling_params_5R))
    ]


def agree(logits_RV: torch.Tensor, options: list[tuple[float, float, float, float]], u_R: np.ndarray) -> bool:
    (ours, finite), (oracle, sound) = both(logits_RV, params_of(options, logits_RV.shape[1], u_R))
    return np.array_equal(finite, sound) and np.array_equal(ours[finite], oracle[finite])


def flat(random: np.random.Generator, rows: int, vocabulary: int) -> torch.Tensor:
    return torch.from_numpy(random.normal(0, 3, (rows, vocabulary))).float()


def peaked(random: np.random.Generator, rows: int, vocabulary: int) -> torch.Tensor:
    """Logits like a model's: a few tokens far above all others."""
    logits_RV = flat(random, rows, vocabulary)
    logits_RV[:, random.choice(vocabulary, 6, replace=False)] += torch.linspace(10, 20, 6)
    return logits_RV


def greedy_agrees(logits_RV: torch.Tensor) -> bool:
    token_R, finite_R = argmax.greedy(logits_RV.to(DEVICE))
    expected = on_host.greedy(logits_RV.float())
    assert token_R.dtype == torch.int64
    same = np.array_equal(token_R.cpu().numpy(), expected.token_ids)
    return same and np.array_equal(finite_R.cpu().numpy(), expected.finite)


@DTYPES
@pytest.mark.parametrize("vocabulary", [1, 100, 8192, 8193, 20_000])
def test_tokens_are_those_of_the_oracle(vocabulary: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(vocabulary)
    options = [(t, min(k, vocabulary), p, m) for t, k, p, m in OPTIONS.values()]
    logits_RV = torch.from_numpy(random.normal(0, 3, (len(options), vocabulary))).to(dtype)
    assert agree(logits_RV, options, random.random(len(options)))
    assert greedy_agrees(logits_RV)


@pytest.mark.parametrize("best", [0.0, -0.0])
def test_zeros_of_either_sign_are_equal(best: float) -> None:
    """The largest logits are zeros of both signs."""
    logits_RV = torch.full((3, 40), -3.0)
    logits_RV[:, [3, 5, 20, 30]] = torch.tensor([-best, best, best, -best])
    assert agree(logits_RV, [(0.7, 2, 1.0, 0.0), (0.7, 0, 0.01, 0.0), (0.7, 0, 1.0, 1.0)], np.array([0.7, 0.7, 0.9]))


@pytest.mark.parametrize("u", [0.25, 0.4, 1 - 2.0**-53])
@pytest.mark.parametrize("at", [[0, 1, 2, 8191], [3, 8192, 8193, 16_384]], ids=str)
def test_the_first_of_equal_logits_are_kept(at: list[int], u: float) -> None:
    """Four equal logits, of which one, two, all or three are kept, within a part of the row and over parts; behind them
    the best one."""
    logits_RV = torch.full((4, 20_000), -2.0)
    logits_RV[:, at] = 14.0
    logits_RV[:, 16_385] = 15.0
    cuts = [(1.0, 0, 0.5, 0.0), (1.0, 0, 0.65, 0.0), (1.0, 2, 1.0, 0.0), (1.0, 3, 0.8, 0.3)]
    (ours, _), (oracle, _) = both(logits_RV, params_of(cuts, 20_000, np.full(4, u)))
    assert ours.tolist() == oracle.tolist()
    if u == 0.25:
        assert set(ours.tolist()) <= set(at), "the equal ones have lower ids"


@pytest.mark.parametrize("num_equal", [4095, 4096, 4097])
def test_candidates_that_just_fit_the_list(num_equal: int) -> None:
    logits_RV = torch.full((3, 10_000), -20.0)
    logits_RV[:, 100 : 100 + num_equal] = 3.0
    options = [(1.0, 0, 0.6, 0.0), (1.0, num_equal - 1, 1.0, 0.0), (1.0, num_equal, 0.999, 0.0)]
    assert agree(logits_RV, options, np.array([0.9, 1 - 2.0**-53, 0.5]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [flat, peaked])
def test_rows_of_a_large_vocabulary(kind: Callable[..., torch.Tensor], seed: int) -> None:
    """Flat rows have more candidates at the cut than the list holds."""
    random = np.random.default_rng(seed)
    options = [
        (0.7, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 0.5, 0.0), (2.0, 0, 0.99, 0.0), (1.0, 50, 1.0, 0.0),
        (1.0, 50, 0.9, 0.0), (1.0, 9000, 0.95, 0.0), (5.0, 9000, 1.0, 1e-3), (4.0, 0, 0.9, 1e-4), (3.0, 0, 1.0, 0.01),
    ]  # fmt: skip
    logits_RV = kind(random, len(options), 50_021)
    assert agree(logits_RV, options, random.random(len(options)))


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.9, 0.9999])
@pytest.mark.parametrize("num_equal", [3000, 5000, 19_000])
def test_equal_logits_below_better_ones(num_equal: int, top_p: float) -> None:
    """The list holds all equal logits or not; the cut is among the better ones, the equal ones or the others."""
    random = np.random.default_rng(num_equal)
    logits_RV = torch.from_numpy(random.normal(-3, 1, (3, 20_000))).float()
    logits_RV[:, random.choice(20_000, num_equal, replace=False)] = 2.0
    logits_RV[:, random.choice(20_000, 900, replace=False)] = torch.from_numpy(random.uniform(3, 4, 900)).float()
    options = [(1.0, 0, top_p, 0.0), (1.0, 1500, top_p, 0.0), (1.0, 0, top_p, 0.1)]
    for u in (0.1, 0.9, 1 - 2.0**-53):
        assert agree(logits_RV, options, np.full(3, u))


def test_a_row_has_its_token_in_any_batch() -> None:
    random = np.random.default_rng(5)
    options = [OPTIONS[name] for name in ("temperature", "top_k", "top_p", "all", "more than the list holds", "greedy")]
    logits_RV = torch.cat([flat(random, 3, 9000), peaked(random, 3, 9000)])
    sampling_params_5R = params_of(options, 9000, random.random(6))
    token_R = kernel.sample(logits_RV.to(DEVICE), sampling_params_5R.to(DEVICE))[0]
    for rows in ([0], [2], [5], [4, 2], [3, 1, 0, 4, 2, 5]):
        alone = kernel.sample(logits_RV[rows].to(DEVICE), sampling_params_5R[:, rows].contiguous().to(DEVICE))[0]
        assert alone.tolist() == token_R[rows].tolist()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="loads are counted in the interpreter")
def test_passes_over_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    num_loaded, logits_RV = 0, torch.empty(0)
    load = InterpreterBuilder.create_masked_load

    def counted(self: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *rest: object) -> TensorHandle:
        nonlocal num_loaded
        at = pointers.data.astype(np.int64) - logits_RV.data_ptr()
        num_loaded += int((mask.data & (at >= 0) & (at < logits_RV.nbytes)).sum())
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    passes = {
        "temperature": (1.1, 1.1),
        "top_k": (1.3, 1.3),
        "top_p": (3.1, 1.1),
        "more than the list holds": (4.1, 4.1),
    }
    for name, limits in passes.items():
        for kind, most in zip((flat, peaked), limits):
            num_loaded, logits_RV = 0, kind(np.random.default_rng(3), 1, 65_536)
            kernel.sample(logits_RV, params_of([OPTIONS[name]], 65_536, np.array([0.5])))
            assert 1.0 <= num_loaded / 65_536 <= most, (name, kind)


def test_equal_logits() -> None:
    logits_RV = torch.zeros(4, 20_000)
    logits_RV[1, [5, 7]] = 1.0
    logits_RV[2, [9000, 9001]] = 1.0  # in one part
    logits_RV[3, [8191, 8192, 19_999]] = 1.0  # over parts
    assert greedy_agrees(logits_RV), "the first of them"
    options = [(1.0, 0, 1.0, 0.0), (2.0, 0, 0.5, 0.0), (1.0, 9, 1.0, 0.0), (1.0, 0, 1.0, 1.0), (0.0, 0, 1.0, 0.0)]
    assert agree(torch.zeros(5, 9000), options, np.array([0.3, 0.999, 0.7, 0.2, 0.5]))


@pytest.mark.parametrize(("name", "num"), [("temperature", 80), ("min_p", 60), ("all", 24)])
def test_shares_are_those_of_the_distribution(name: str, num: int) -> None:
    """The numbers are evenly spaced: each cumulative share is that of the distribution, to half a step."""
    logits_V = torch.from_numpy(np.random.default_rng(7).normal(0, 1.5, 60)).float()
    sampling_params_5R = params_of([OPTIONS[name]] * num, 60, (np.arange(num) + 0.5) / num)
    token_R = (
        kernel.sample(logits_V.expand(num, -1).contiguous().to(DEVICE), sampling_params_5R.to(DEVICE))[0].cpu().numpy()
    )
    assert (np.diff(token_R) >= 0).all()
    temperature, top_k, top_p, min_p = OPTIONS[name]
    w = np.exp((logits_V.double().numpy() - float(logits_V.max())) / temperature)
    order = np.argsort(-w)
    w[order[int(top_k or 60) :]] = 0.0
    w[w < min_p] = 0.0
    better = np.cumsum(w[order]) - w[order]
    w[order[better >= top_p * w.sum()]] = 0.0
    assert (w[token_R] > 0).all()
    sampled_V = np.bincount(token_R, minlength=60).cumsum() / num
    assert np.abs(sampled_V - w.cumsum() / w.sum()).max() <= 0.501 / num


@pytest.mark.parametrize("at", [0, 8191, 8192, 19_999])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_reported(value: float, at: int) -> None:
    logits_RV = torch.randn(4, 20_000)
    logits_RV[1, at] = value
    logits_RV[2] = value
    assert greedy_agrees(logits_RV)
    options = [OPTIONS["temperature"], OPTIONS["top_k"], OPTIONS["min_p"], OPTIONS["greedy"]]
    sampling_params_5R = params_of(options, 20_000, np.array([0.1, 0.9, 0.5, 0.3]))
    (ours, finite), (oracle, sound) = both(logits_RV, sampling_params_5R)
    assert finite.tolist() == sound.tolist() == [True, value == float("-inf"), False, True]
    assert (ours[finite] == oracle[finite]).all()
    assert (ours[~finite] == 0).all()


def test_rows_that_are_not_contiguous_and_no_rows() -> None:
    options = [OPTIONS["temperature"], OPTIONS["greedy"], OPTIONS["top_p"]]
    assert agree(torch.randn(3, 60)[:, :30], options, np.array([0.2, 0.4, 0.6]))
    assert greedy_agrees(torch.randn(4, 60)[:, :30])
    logits_RV = torch.empty(0, 10, device=DEVICE)
    for found in (kernel.sample(logits_RV, torch.empty(5, 0, device=DEVICE).double()), argmax.greedy(logits_RV)):
        assert [len(each) for each in found] == [0, 0]


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_impossible_tokens_are_never_sampled(name: str) -> None:
    """Few tokens are possible, and the random number is on the borders between them."""
    logits_RV = torch.full((12, 9000), float("-inf"))
    logits_RV[:, [5, 8191, 8192, 8999]] = torch.tensor([0.0, 1.0, 0.5, -300.0])
    share = torch.tensor([0.0, 1.0, 0.5]).double().softmax(0).cumsum(0).numpy()
    u_R = np.concatenate([[0.0, 1 - 2.0**-53], share[:2], np.nextafter(share[:2], 0), np.linspace(0, 0.999, 6)])
    (ours, _), _ = both(logits_RV, params_of([OPTIONS[name]] * 12, 9000, u_R))
    assert set(ours.tolist()) <= {5, 8191, 8192}
