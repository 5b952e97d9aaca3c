"""`engine.deterministic` keeps its promise: a row has the same bits among few and among many, whatever they are."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.kernels.contract import Kernels
from pipeline.weights.packed import DenseWeight
from tests.gpu.inputs import Heads, paged_step, random_int4
from tests.gpu.places import PLACES, Place

STEP = (1, 1, 4, 130, 40, 1), (1, 1300, 200, 130, 300, 65)  # tokens that sequences compute, and their contexts


def is_invariant(place: Place, kernel: Callable[[torch.Tensor], torch.Tensor], x_TK: torch.Tensor) -> bool:
    """The last rows of x, as many as `place.tokens` say, against the same rows among all of them."""
    whole = kernel(x_TK.clone())  # it may be written into
    return all(torch.equal(kernel(x_TK[-tokens:].clone()), whole[-tokens:]) for tokens in place.tokens)


def linears_are_invariant(place: Place, kernels: Kernels) -> bool:
    random, found = torch.Generator().manual_seed(0), []
    for n, k in (*place.linears_NK, (151, 896)):
        dense = DenseWeight((torch.randn(n, k, generator=random) * k**-0.5).to(place.dtype))
        for weight in (dense, random_int4(n, k, 128, random)):
            linear, x_TK = kernels.prepare_linear(weight), place.normal(2 * max(place.tokens), k)
            found.append(is_invariant(place, linear, x_TK))
    return all(found)


def attention_is_invariant(place: Place, kernels: Kernels, heads: Heads, window: int | None) -> bool:
    """A mixed step against each of its query tokens in a sequence of its own, all of these together and one alone."""
    step = paged_step(*STEP, heads, place.dtype, place.device)
    scale = heads.head_dim**-0.5
    whole_TND = kernels.attention(step.q_TND, step.cache, step.attn_metadata, scale, window)
    for rows in (np.arange(len(whole_TND)), *np.arange(len(whole_TND))[::29, None]):
        some = torch.from_numpy(rows).to(place.device)
        own = kernels.attention(step.q_TND[some], step.cache, step.attn_metadata.rows(rows), scale, window)
        if not torch.equal(own, whole_TND[some]):
            return False
    return True


@PLACES
@pytest.mark.parametrize("keep_dense", [True, False], ids=["", "4-bit weights widened in each call"])
@torch.inference_mode()
def test_linears(place: Place, keep_dense: bool) -> None:
    assert linears_are_invariant(place, place.kernels(keep_dense, deterministic=True))


@PLACES
@torch.inference_mode()
def test_elementwise(place: Place) -> None:
    kernels, x_TH = place.kernels(deterministic=True), place.normal(2 * max(place.tokens), 2048)
    weight_H = place.normal(2048)
    assert is_invariant(place, lambda x: kernels.add_rms_norm(x, torch.ones_like(x), weight_H, 1e-5)[0], x_TH)
    assert is_invariant(place, kernels.silu_mul, x_TH)


@PLACES
@pytest.mark.parametrize("window", [None, 48])
@torch.inference_mode()
def test_attention(place: Place, window: int | None) -> None:
    kernels = place.kernels(deterministic=True)
    assert all(attention_is_invariant(place, kernels, heads, window) for heads in place.heads)


@PLACES
@torch.inference_mode()
def test_the_other_kernels_do_not_promise_it(place: Place) -> None:
    """Or the comparisons above would find nothing anywhere."""
    kernels = place.kernels()
    assert not linears_are_invariant(place, kernels)
    assert not attention_is_invariant(place, kernels, place.heads[0], None)
