"""`engine.deterministic` keeps its promise: a row has the same bits in any batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pipeline.kernels.contract import Kernels
from pipeline.kernels.routing import Routing
from pipeline.weights.packed import DenseWeight
from tests.gpu.inputs import Heads, paged_step, random_int4
from tests.gpu.targets import TARGETS, Target
from tests.kernels.experts import FORMS, random_experts

STEP = (1, 1, 4, 130, 40, 1), (1, 1300, 200, 130, 300, 65)  # tokens that sequences compute, and their contexts


def is_invariant(target: Target, kernel: Callable[[torch.Tensor], torch.Tensor], x_TK: torch.Tensor) -> bool:
    """Compare the last rows of x alone with the same rows of the whole x, at each number in `target.tokens`."""
    whole = kernel(x_TK.clone())  # the kernel may write into it
    return all(torch.equal(kernel(x_TK[-tokens:].clone()), whole[-tokens:]) for tokens in target.tokens)


def linears_are_invariant(target: Target, kernels: Kernels) -> bool:
    random, found = torch.Generator().manual_seed(0), []
    for n, k in (*target.linears_NK, (151, 896)):
        dense = DenseWeight((torch.randn(n, k, generator=random) * k**-0.5).to(target.dtype))
        for weight in (dense, random_int4(n, k, 128, random)):
            linear, x_TK = kernels.prepare_linear(weight), target.normal(2 * max(target.tokens), k)
            found.append(is_invariant(target, linear, x_TK))
    return all(found)


def attention_is_invariant(target: Target, kernels: Kernels, heads: Heads, window: int | None) -> bool:
    """Compare a mixed step with its query tokens as one-token sequences, all together and one alone."""
    step = paged_step(*STEP, heads, target.dtype, target.device)
    scale = heads.head_dim**-0.5
    whole_TND = kernels.attention(step.q_TND, step.cache, step.attn_metadata, scale, window)
    for rows in (np.arange(len(whole_TND)), *np.arange(len(whole_TND))[::29, None]):
        some = torch.from_numpy(rows).to(target.device)
        own = kernels.attention(step.q_TND[some], step.cache, step.attn_metadata.rows(rows), scale, window)
        if not torch.equal(own, whole_TND[some]):
            return False
    return True


@TARGETS
@pytest.mark.parametrize("keep_dense", [True, False], ids=["", "4-bit weights widened in each call"])
@torch.inference_mode()
def test_linears(target: Target, keep_dense: bool) -> None:
    assert linears_are_invariant(target, target.kernels(keep_dense, deterministic=True))


@TARGETS
@torch.inference_mode()
def test_elementwise(target: Target) -> None:
    kernels, x_TH = target.kernels(deterministic=True), target.normal(2 * max(target.tokens), 2048)
    weight_H = target.normal(2048)
    assert is_invariant(target, lambda x: kernels.add_rms_norm(x, torch.ones_like(x), weight_H, 1e-5)[0], x_TH)
    assert is_invariant(target, lambda x: kernels.gate_mul(x, "silu"), x_TH)


@TARGETS
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_experts(target: Target, form: str) -> None:
    kernels = target.kernels(deterministic=True)
    layer = kernels.prepare_experts(random_experts(form, 8, 512, 384), "silu", kernels.prepare_linear)

    def routed(x_TH: torch.Tensor) -> torch.Tensor:
        return layer(x_TH, *kernels.route(x_TH[:, :8], Routing(2)))

    assert is_invariant(target, routed, target.normal(2 * max(target.tokens), 512))


@TARGETS
@pytest.mark.parametrize("window", [None, 48])
@torch.inference_mode()
def test_attention(target: Target, window: int | None) -> None:
    kernels = target.kernels(deterministic=True)
    assert all(attention_is_invariant(target, kernels, heads, window) for heads in target.heads)


@TARGETS
@torch.inference_mode()
def test_the_other_kernels_do_not_promise_it(target: Target) -> None:
    """The comparisons above find differences."""
    kernels = target.kernels()
    assert not linears_are_invariant(target, kernels)
    assert not attention_is_invariant(target, kernels, target.heads[0], None)
