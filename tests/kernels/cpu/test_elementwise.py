"""The elementwise kernels of the CPU against the reference."""

import math

import numpy as np
import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.cpu import elementwise
from pipeline.kernels.cpu.compile.numerics import arrays_of
from pipeline.kernels.cpu.compile.threads import WHOLE, use_threads
from tests.kernels.fp8 import hostile_vectors

RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of one pass; the oracle is float32
SOUND_CODES = torch.arange(256, dtype=torch.uint8)[torch.arange(256) & 0x7F != 0x7F]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS = pytest.mark.parametrize("tokens", [1, 5, 700])  # on one thread, and on all


def close(ours: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> bool:
    """Of the type asked for, and within rounding of the float32 oracle; sums may cancel, so not of each value alone."""
    assert ours.dtype == dtype
    assert torch.isfinite(ours).all()
    error = (ours.float() - oracle.float()).abs()
    return bool((error <= RELATIVE[dtype] * (oracle.float().abs() + oracle.float().square().mean().sqrt())).all())


@DTYPES
@TOKENS
@pytest.mark.parametrize("hidden", [8, 61, 256])
def test_add_rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x, residual, weight = torch.randn(tokens, hidden), 3 * torch.randn(tokens, hidden), torch.rand(hidden) + 0.5
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    total = (x.float() + residual.float()).to(dtype)
    expected = reference.rms_norm(total.float(), weight.float(), 1e-5)
    ours, summed = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    assert close(ours, expected, dtype)


@DTYPES
@TOKENS
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 10), (8, 1, 16)])
def test_norm_rope_write(
    heads: int, kv_heads: int, head_dim: int, with_norm: bool, tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens + heads)
    block_size, num_blocks = 7, 110
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    angle = 100 * torch.rand(tokens, head_dim // 2)
    norms = tuple((torch.rand(head_dim) + 0.5).to(dtype) for _ in range(2)) if with_norm else None
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    cache = LayerCache.allocate(num_blocks, block_size, kv_heads, head_dim, dtype, torch.device("cpu"))
    cache.fill(list(range(num_blocks)), 7.0)
    wide = LayerCache(*(tensor.float() for tensor in cache.tensors))
    wide_norms = None if norms is None else (norms[0].float(), norms[1].float())
    oracle = reference.norm_rope_write(qkv.float(), angle.cos(), angle.sin(), wide_norms, 1e-6, wide, slots)
    ours = elementwise.norm_rope_write(qkv, angle.cos(), angle.sin(), norms, 1e-6, cache, slots)  # type: ignore[arg-type]
    assert close(ours, oracle, dtype)
    assert close(cache.k_CBKD, wide.k_CBKD, dtype)
    assert torch.equal(cache.v_CBKD, wide.v_CBKD.to(dtype))
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool).index_fill(0, slots, False)
    assert all(bool((tensor.flatten(0, 1)[untouched] == 7.0).all()) for tensor in cache.tensors)


@DTYPES
@pytest.mark.parametrize("tokens", [9, 700])
def test_an_fp8_cache_is_written_as_the_reference_writes_it(tokens: int, dtype: torch.dtype) -> None:
    """Without a rotation to the bit: of sound vectors, zeros, vectors of one tiny value, and broken ones."""
    qkv = hostile_vectors(tokens * 7, 40).view(tokens, 7, 40).to(dtype)
    zero, slots = torch.zeros(tokens, 20), torch.randperm(103 * 7)[:tokens]
    ours, oracle = (LayerCache.allocate(103, 7, 2, 40, FP8, torch.device("cpu")) for _ in range(2))
    elementwise.norm_rope_write(qkv, zero.cos(), zero, None, 1e-6, ours, slots)
    reference.norm_rope_write(qkv, zero.cos(), zero, None, 1e-6, oracle, slots)
    for mine, its in zip(ours.tensors, oracle.tensors):
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
    untouched = torch.ones(103 * 7, dtype=torch.bool).index_fill(0, slots, False)
    for tensor in (*ours.tensors[:2], *(scale.transpose(1, 2).contiguous() for scale in ours.tensors[2:])):
        assert not tensor.view(torch.uint8).flatten(0, 1)[untouched].any()


def test_codes_are_those_of_torch_at_and_around_every_halfway_case() -> None:
    code = SOUND_CODES[:127].view(FP8).float()
    halfway = (code[1:] + code[:-1]) / 2
    cases = torch.cat([code, halfway, halfway.nextafter(code[1:]), halfway.nextafter(code[:-1]), torch.rand(9) * 448])
    cases = torch.cat([cases, -cases, torch.tensor([1e-30, -1e-45])])
    x_TKD = torch.stack([cases, torch.full_like(cases, 448.0)], dim=1)[:, None, :]  # so that the scale is 1
    cache = LayerCache.allocate(len(cases), 1, 1, 2, FP8, torch.device("cpu"))
    arrays = arrays_of(cache)
    use_threads(False)
    elementwise.write_fp8_kernel(x_TKD.numpy(), np.arange(len(cases)), arrays[0], arrays[2], *WHOLE)
    scale = cache.k_scale_CKB
    assert scale is not None
    assert bool((scale == 1.0).all())
    assert torch.equal(cache.k_CBKD[:, 0, 0, 0].view(torch.uint8), cases.to(FP8).view(torch.uint8))


def test_what_is_stored_in_8_bits_is_near_what_was_given() -> None:
    """Of half a unit in the last of 3 bits of mantissa, or of the smallest code; broken vectors are NaN throughout."""
    x_TKD = hostile_vectors(90, 16)[:, None]
    code_TKD, scale_TK = reference.to_fp8(x_TKD)
    stored_TKD = code_TKD.float() * scale_TK[..., None]
    broken_T = ~x_TKD.isfinite().all(-1).squeeze(1)
    assert broken_T.sum() == 30
    assert bool(stored_TKD[broken_T].isnan().all())
    assert bool(code_TKD.float().isfinite().all())
    sound_TKD, scale_TK1 = x_TKD[~broken_T], scale_TK[~broken_T][..., None]
    allowed = torch.maximum(sound_TKD.abs() * 2**-4, scale_TK1 * 2**-10) * 1.00001
    assert bool(((stored_TKD[~broken_T] - sound_TKD).abs() <= allowed).all())


@DTYPES
@TOKENS
@pytest.mark.parametrize("width", [3, 64, 201])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    gate_up = (8 * torch.randn(tokens, 2 * width)).to(dtype)
    assert close(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up.float()), dtype)


def test_silu_of_what_exp_cannot_hold() -> None:
    gate = torch.tensor([[-1e30, -1000.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 1000.0, 1e30]])
    ours = elementwise.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert float((ours[:, 1:] - torch.nn.functional.silu(gate[:, 1:])).abs().max()) < 1e-6
    assert abs(float(ours[0, 0])) < 1e-6


@DTYPES
def test_what_is_no_number_comes_out_as_none(dtype: torch.dtype) -> None:
    """Where a row was broken, the logits must show it."""
    for broken in (math.nan, math.inf):
        x = torch.ones(3, 16).to(dtype)
        x[1, 3] = broken
        assert torch.isfinite(elementwise.silu_mul(x.clone())).all(dim=1).tolist() == [True, False, True]
        norm, residual = elementwise.add_rms_norm(x.clone(), torch.zeros_like(x), torch.ones(16).to(dtype), 1e-5)
        assert torch.isfinite(norm).all(dim=1).tolist() == [True, False, True]
        assert torch.isfinite(residual).all(dim=1).tolist() == [True, False, True]
