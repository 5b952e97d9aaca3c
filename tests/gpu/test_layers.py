"""Kernels at the sizes of real models' layers against the reference in float32: the linears by every path and number of
tokens, attention over long, skewed and shared contexts, and sampling from a whole vocabulary.

On a card, memory for results is filled with NaN first.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.shapes import model_size
from pipeline.kernels import reference
from pipeline.kernels.linears import Linear
from pipeline.kernels.reference import reference_kernels
from pipeline.weights.packed import DenseWeight, GroupIntWeight, LinearWeight
from tests.gpu.checks import TOLERANCES, fp8_tolerance, relative_error
from tests.gpu.inputs import Heads, paged_step, random_int4
from tests.gpu.targets import TARGETS, Target

GROUP = 128
MAX_COMPARED = 128  # rows of a result
SUM_ERROR = 1e-5  # of a running sum over a row's weights, as a share of the whole
POISON_BYTES = 1 << 30
STEPS = {  # of a card and of a processor: tokens computed by each sequence, contexts, shared tokens
    "decode": (([1] * 64, [1024] * 64, 0), ([1] * 4, [100] * 4, 0)),
    "decode, long": (([1] * 64, [4096] * 64, 0), ([1] * 2, [300] * 2, 0)),
    "decode, many": (([1] * 512, [512] * 512, 0), ([1] * 9, [40] * 9, 0)),
    "decode, skewed": (([1] * 256, [1 + 31 * (s % 7) ** 3 for s in range(256)], 0), ([1] * 3, [1, 90, 7], 0)),
    "drafts": (([5] * 256, [1024] * 256, 0), ([5] * 3, [70] * 3, 0)),
    "decode, shared": (([1] * 835, [2176] * 835, 2048), ([1] * 4, [200] * 4, 128)),
    "prompts": (([735] * 11, [735] * 11, 0), ([60] * 2, [60] * 2, 0)),
    "prompts, long": (([2048] * 4, [2048] * 4, 0), ([130], [130], 0)),
    "half of a prompt": (([4096], [8192], 0), ([40], [130], 0)),
}


def poison(target: Target) -> None:
    """Fill memory that the allocator will hand out next with NaN."""
    if target.device.type == "cuda":
        torch.full((POISON_BYTES // 4,), float("nan"), device=target.device)


def some_rows(count: int) -> np.ndarray:
    """Return up to MAX_COMPARED of `count` rows, evenly spread, the first and the last included."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_COMPARED)).round().astype(np.int64))


Prepare = Callable[[], Linear | None]


def paths_of(weight: LinearWeight, target: Target) -> dict[str, tuple[Prepare, Prepare]]:
    """Return path -> (function that packs the weight for it, function that packs it for the reference)."""
    kernels, exact = target.kernels(), reference_kernels(torch.float32, target.device)
    ours: dict[str, Prepare] = {"served": lambda: kernels.prepare_linear(weight)}
    if target.device.type == "cuda":
        from pipeline.kernels.triton import batch_invariant
        from pipeline.kernels.triton.linear.dispatch import DequantBuffer, TwoPathLinear

        ours["deterministic"] = lambda: batch_invariant.prepare_linear(weight, target.dtype, target.device)
        if isinstance(weight, GroupIntWeight):
            make = partial(TwoPathLinear, weight, target.dtype, target.device)
            ours["fused"], ours["cached"] = lambda: make(crossover=1 << 20), lambda: make(crossover=0)
            ours["scratch"] = lambda: make(DequantBuffer(target.dtype, target.device), crossover=0)
    found: dict[str, tuple[Prepare, Prepare]] = {}
    for path, prepare in ours.items():
        found[path] = prepare, lambda: exact.prepare_linear(weight)
    if isinstance(weight, GroupIntWeight):
        for name in kernels.rounded.keys() & exact.rounded.keys():
            found[name] = partial(kernels.rounded[name].prepare, weight), partial(exact.rounded[name].prepare, weight)
    return found


@TARGETS
@pytest.mark.parametrize("name", ["qkv", "o", "gate_up", "down"])
@torch.inference_mode()
def test_linears_by_path(target: Target, name: str) -> None:
    wrong, random = [], torch.Generator(target.device).manual_seed(0)
    for model in target.models:
        size, weights = model_size(model)
        inputs, outputs = next((k, n) for each, k, n in size.linears() if each == name)
        int4 = random_int4(outputs, inputs, GROUP, torch.Generator().manual_seed(1))
        weight = int4 if weights.packed_bits == 4 else DenseWeight(int4.dequantize(target.dtype))
        for path, (prepare, prepare_exact) in paths_of(weight, target).items():
            linear, exact = prepare(), prepare_exact()
            assert linear is not None
            assert exact is not None
            tolerance = fp8_tolerance(target.dtype) if path.startswith("fp8") else TOLERANCES[target.dtype]
            for tokens in target.layer_tokens:
                x_TK = torch.randn(tokens, inputs, device=target.device, generator=random).to(target.dtype)
                rows = torch.from_numpy(some_rows(tokens)).to(target.device)
                poison(target)
                error = relative_error(linear(x_TK)[rows], exact(x_TK[rows].float()))
                if error > tolerance:
                    wrong.append(f"{model}, {path}, {tokens} tokens: {error:.1e}")
    assert not wrong, "\n".join(wrong)


@TARGETS
@pytest.mark.parametrize("with_fp8", [False, True], ids=["", "fp8 cache"])
@pytest.mark.parametrize("name", STEPS)
@torch.inference_mode()
def test_attention(target: Target, name: str, with_fp8: bool) -> None:
    counts, contexts, shared = STEPS[name][target.device.type == "cpu"]
    for model in target.models:
        size, _ = model_size(model)
        heads, scale = Heads(size.heads, size.kv_heads, size.head_dim), size.head_dim**-0.5
        step = paged_step(counts, contexts, heads, target.dtype, target.device, with_fp8_cache=with_fp8, shared=shared)
        rows = some_rows(len(step.q_TND))
        some = torch.from_numpy(rows).to(target.device)
        poison(target)
        ours = target.kernels().attention(step.q_TND, step.cache, step.attn_metadata, scale, None)[some]
        exact = reference.attention(step.q_TND[some].float(), step.cache, step.attn_metadata.rows(rows), scale, None)
        assert relative_error(ours, exact) <= 2 * TOLERANCES[target.dtype], model  # scores are rounded too


@TARGETS
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("is_peaked", [False, True], ids=["flat", "peaked"])
@torch.inference_mode()
def test_sampling(target: Target, top_p: float, is_peaked: bool) -> None:
    """The token grows with the number u; within SUM_ERROR of it, rounding of the sums decides which of two it is."""
    random = torch.Generator(target.device).manual_seed(0)
    vocab = max(model_size(model)[0].vocab for model in target.models)
    for rows in (1, 16, 512):
        logits_RV = 3 * torch.randn(rows, vocab, device=target.device, generator=random)
        if is_peaked:  # the token of rank r has the weight r^-1.5
            ranks_V = torch.arange(1, vocab + 1, device=target.device).log() * -1.5
            logits_RV = logits_RV.scatter(1, logits_RV.argsort(1, descending=True), ranks_V.expand(rows, -1))
        u_1R = torch.rand(1, rows, device=target.device, generator=random).double()
        options_4 = torch.tensor([1.0, vocab, top_p, 0.0], dtype=torch.float64, device=target.device)
        token_R, finite_R = target.kernels().sample(logits_RV, torch.cat([options_4.repeat(rows, 1).T, u_1R]))
        some = slice(0, MAX_COMPARED)
        bounds = []
        for error in (-SUM_ERROR, SUM_ERROR):
            near_1R = (u_1R + error).clamp(0, 1 - 2.0**-53)[:, some]
            sampling_params_5R = torch.cat([options_4.repeat(near_1R.shape[1], 1).T, near_1R])
            bounds.append(reference.sample(logits_RV[some], sampling_params_5R)[0])
        assert bool(finite_R.all())
        assert torch.equal(token_R[some], token_R[some].clamp(*bounds))
