"""The elementwise Triton kernels against the reference in float32."""

import math

import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.triton import elementwise as fused
from tests.kernels.fp8 import hostile_vectors
from tests.kernels.triton.problems import DEVICE, DTYPES, close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter


@DTYPES
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (3, 61), (2, 1030)])
def test_add_rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(hidden)
    x, residual, weight = torch.randn(tokens, hidden), 3 * torch.randn(tokens, hidden), torch.rand(hidden) + 0.5
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    expected = reference.rms_norm(total.float(), weight.float(), 1e-5)
    ours, summed = fused.add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert torch.equal(summed.cpu(), total)
    assert close(ours, expected)


@DTYPES
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 10), (15, 3, 80), (1, 1, 128)])
def test_norm_rope_write(heads: int, kv_heads: int, head_dim: int, with_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    tokens, block_size, num_blocks = 5, 7, 4
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angle = 100 * torch.rand(tokens, head_dim // 2)
    norms = tuple((torch.rand(head_dim) + 0.5).to(dtype) for _ in range(2)) if with_norm else None
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    there = LayerCache.allocate(num_blocks, block_size, kv_heads, head_dim, dtype, DEVICE)
    there.fill(list(range(num_blocks)), 7.0)
    wide = LayerCache(*(tensor.float().cpu() for tensor in there.tensors))
    wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
    oracle = reference.norm_rope_write(qkv.float(), angle.cos(), angle.sin(), wide_norms, 1e-6, wide, slots)
    our_norms = None if norms is None else (norms[0].to(DEVICE), norms[1].to(DEVICE))
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    ours = fused.norm_rope_write(qkv.to(DEVICE), cos, sin, our_norms, 1e-6, there, slots.to(DEVICE))
    assert close(ours, oracle)
    assert close(there.k_CBKD, wide.k_CBKD)
    assert torch.equal(there.v_CBKD.cpu(), wide.v_CBKD.to(dtype))


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (15, 3, 80)])
def test_an_fp8_cache_is_written_as_the_reference_writes_it(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Without a rotation to the bit: of sound vectors, zeros, vectors of one tiny value, and broken ones."""
    qkv = hostile_vectors(9 * (heads + 2 * kv_heads), head_dim).view(9, -1, head_dim).to(dtype)
    zero = torch.zeros(9, head_dim // 2)
    slots = torch.randperm(28)[:9]
    ours, oracle = (LayerCache.allocate(4, 7, kv_heads, head_dim, FP8, torch.device(d)) for d in (DEVICE, "cpu"))
    fused.norm_rope_write(*(t.to(DEVICE) for t in (qkv, zero.cos(), zero)), None, 1e-6, ours, slots.to(DEVICE))
    reference.norm_rope_write(qkv, zero.cos(), zero, None, 1e-6, oracle, slots)
    for mine, its in zip(ours.tensors, oracle.tensors):
        assert torch.equal(mine.cpu().view(torch.uint8), its.view(torch.uint8))


@pytest.mark.parametrize("kind", [torch.float32, FP8], ids=str)
def test_a_token_without_a_slot_writes_nothing(kind: torch.dtype) -> None:
    """What fills up a captured step to its size must not touch the cache."""
    qkv, angle = torch.randn(3, 4, 16, device=DEVICE), torch.rand(3, 8, device=DEVICE)
    cache = LayerCache.allocate(2, 4, 1, 16, kind, DEVICE)  # one KV head: slots are in order in scales too
    cache.fill([0, 1], 7.0)
    before = [tensor.clone() for tensor in cache.tensors]
    slots = torch.tensor([5, -1, -1], device=DEVICE)
    fused.norm_rope_write(qkv, angle, angle, None, 1e-6, cache, slots)
    for tensor, old in zip(cache.tensors, before):
        changed = (tensor != old).reshape(8, -1).any(1)
        assert changed.tolist() == [slot == 5 for slot in range(8)]


@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (2, 1024), (3, 1100)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    gate_up = (8 * torch.randn(tokens, 2 * width)).to(dtype)
    assert close(fused.silu_mul(gate_up.to(DEVICE)), reference.silu_mul(gate_up.float()))


def test_silu_of_what_exp_cannot_hold() -> None:
    gate = torch.tensor([[-1e30, -1000.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 1000.0, 1e30]])
    ours = fused.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1).to(DEVICE)).cpu()
    assert torch.allclose(ours, torch.nn.functional.silu(gate), atol=1e-6)


def test_what_is_no_number_comes_out_as_none() -> None:
    for broken in (math.nan, math.inf):
        x = torch.ones(3, 16)
        x[1, 3] = broken
        x = x.to(DEVICE)
        assert torch.isfinite(fused.silu_mul(x.clone())).all(dim=1).tolist() == [True, False, True]
        norm, residual = fused.add_rms_norm(x.clone(), torch.zeros_like(x), torch.ones_like(x[0]), 1e-5)
        assert torch.isfinite(norm).all(dim=1).tolist() == [True, False, True]
        assert torch.isfinite(residual).all(dim=1).tolist() == [True, False, True]


def test_a_step_without_tokens() -> None:
    x = torch.ones(0, 16, device=DEVICE)
    assert fused.silu_mul(x).shape == (0, 8)
    assert fused.add_rms_norm(x, x.clone(), torch.ones(16, device=DEVICE), 1e-5)[0].shape == (0, 16)
