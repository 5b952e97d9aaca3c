"""The CPU kernels against the reference, on ragged batches over a cache whose unused slots are NaN."""

import math
import os
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.contract import AttentionInput
from pipeline.kernels.cpu import elementwise
from pipeline.kernels.cpu.attention.attention import attention
from pipeline.kernels.cpu.attention.paged import paged_decode
from pipeline.kernels.cpu.compile.numerics import arrays_of
from pipeline.kernels.cpu.compile.threads import WHOLE, is_cached, use_threads
from pipeline.kernels.cpu.linear.selection import DenseLinear, padded_tokens, prepare_linear
from pipeline.kernels.reference import attention as reference_attention
from pipeline.kernels.select import select_kernels
from pipeline.weights.packed import DenseWeight
from tests.kernels.fp8 import hostile_vectors

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of one elementwise pass; the oracle is float32


def ragged_step(
    rng: np.random.Generator, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, with_fp8: bool = False
) -> tuple[AttentionInput, LayerCache]:
    """A random mixture of decoding rows, whole prompts and chunks behind a prefix, in scattered blocks."""
    contexts, queries = [], []
    for _ in range(int(rng.integers(1, 40))):
        context = int(rng.integers(1, 90))
        contexts.append(context)
        queries.append(int(rng.choice([1, 1, 1, context, int(rng.integers(1, context + 1))])))
    blocks_of = [-(-c // block_size) for c in contexts]
    num_blocks = sum(blocks_of) + 3
    order = rng.permutation(num_blocks)
    table = np.full((len(contexts), max(blocks_of)), -1, dtype=np.int32)
    kind = FP8 if with_fp8 else dtype
    cache = LayerCache.allocate(num_blocks, block_size, kv_heads, head_dim, kind, torch.device("cpu"))
    cache.fill(list(range(num_blocks)), float("nan"))
    slots, taken = [], 0
    for s, (context, count) in enumerate(zip(contexts, queries)):
        mine = order[taken : taken + blocks_of[s]]
        taken += blocks_of[s]
        table[s, : len(mine)] = mine
        position = np.arange(context)
        slot = mine[position // block_size] * block_size + position % block_size
        k_LKD, v_LKD = (torch.randn(context, kv_heads, head_dim).to(dtype) for _ in range(2))
        reference.write_kv(k_LKD, v_LKD, cache, torch.from_numpy(slot))
        slots.append(slot[context - count :])
    where = AttentionInput(
        np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
        np.array(contexts, dtype=np.int32),
        table,
        torch.from_numpy(np.concatenate(slots)),
        block_size,
    )
    return where, cache


def widened(cache: LayerCache) -> LayerCache:
    """In float32, but for codes."""
    return LayerCache(*(tensor if tensor.dtype == FP8 else tensor.float() for tensor in cache.tensors))


@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize("with_fp8", [False, True], ids=["as-computed", "fp8"])
@pytest.mark.parametrize("seed", range(6))
def test_attention(seed: int, with_fp8: bool, window: int | None) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    dtype = torch.float32 if seed % 3 else torch.bfloat16
    kv_heads, group, head_dim = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5])), int(rng.choice([8, 16, 40]))
    where, cache = ragged_step(rng, kv_heads, head_dim, int(rng.choice([1, 4, 16])), dtype, with_fp8)
    q_TND = torch.randn(int(where.query_start_S1[-1]), kv_heads * group, head_dim).to(dtype)
    ours = attention(q_TND, cache, where, 0.3, window)
    oracle = reference_attention(q_TND.float(), widened(cache), where, 0.3, window)
    assert torch.isfinite(ours).all(), "a slot outside the context was read"
    assert float((ours.float() - oracle).abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float32 on fp8", "bfloat16 on fp8"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 1, 32, 8), (2, 2, 64, 12), (1, 2, 80, 16), (1, 4, 96, 16), (2, 3, 128, 32)],
)
def test_attention_of_heads_that_fill_whole_tiles(
    kv_heads: int, group: int, head_dim: int, block_size: int, kind: str, window: int | None
) -> None:
    """And of some that nearly do; decoding rows beside prompts, in blocks that are whole numbers of tiles and not."""
    torch.manual_seed(head_dim)
    dtype = torch.bfloat16 if kind.startswith("bfloat16") else torch.float32
    rng = np.random.default_rng(head_dim)
    where, cache = ragged_step(rng, kv_heads, head_dim, block_size, dtype, kind.endswith("fp8"))
    q_TND = torch.randn(int(where.query_start_S1[-1]), kv_heads * group, head_dim).to(dtype)
    ours = attention(q_TND, cache, where, head_dim**-0.5, window)
    oracle = reference_attention(q_TND.float(), widened(cache), where, head_dim**-0.5, window)
    assert torch.isfinite(ours).all(), "a slot outside the context was read"
    assert float((ours.float() - oracle).abs().max()) < TOLERANCE[dtype]


def test_reference_attention_is_softmax_over_the_visible_keys() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 6, 1, 4), torch.randn(1, 6, 1, 4)
    where = AttentionInput(
        np.array([0, 2], dtype=np.int32),
        np.array([5], dtype=np.int32),
        np.array([[0]], dtype=np.int32),
        torch.tensor([3, 4]),
        6,
    )
    q_TND = torch.randn(2, 1, 4)
    out = reference_attention(q_TND, LayerCache(keys, values), where, 0.5, 3)
    for row, visible in ((0, slice(1, 4)), (1, slice(2, 5))):
        weights = (0.5 * keys[0, visible, 0] @ q_TND[row, 0]).softmax(0)
        assert torch.allclose(out[row, 0], weights @ values[0, visible, 0], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_dense_linear(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(1)
    weight, bias = torch.randn(48, 80), torch.randn(48)
    x_TK = torch.randn(tokens, 80).to(dtype)
    ours = prepare_linear(DenseWeight(weight, bias), dtype)(x_TK)
    exact = x_TK.float() @ weight.to(dtype).float().T + bias.to(dtype).float()
    assert ours.dtype == dtype
    assert float((ours.float() - exact).abs().max() / exact.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 100, 1023])
def test_the_packed_linear_pads_its_tokens_and_gives_them_back(tokens: int) -> None:
    torch.manual_seed(2)
    weight, bias, x_TK = torch.randn(48, 80), torch.randn(48), torch.randn(tokens, 80)
    ours = DenseLinear(weight, bias, torch.float32, packed=True)(x_TK)
    assert ours.shape == (tokens, 48)
    assert float((ours - (x_TK @ weight.T + bias)).abs().max()) < 1e-4


def test_padding_costs_little_and_leaves_few_numbers_of_tokens() -> None:
    assert all(t <= padded_tokens(t) <= t + t // 8 for t in range(1, 5000))
    assert len({padded_tokens(t) for t in range(1, 2049)}) < 80


def test_selection_says_who_serves_each_operation() -> None:
    kernels = select_kernels(torch.device("cpu"), torch.float32)
    names = {"linear", "add_rms_norm", "norm_rope_write", "attention", "silu_mul", "greedy", "draw"}
    assert set(kernels.served_by) == names
    assert all(
        "numba" in origin
        for operation, origin in kernels.served_by.items()
        if operation not in ("linear", "greedy", "draw")
    )


def close(ours: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype) -> bool:
    """Of the type asked for, and within rounding of the float32 oracle; sums may cancel, so not of each value alone."""
    assert ours.dtype == dtype
    assert torch.isfinite(ours).all()
    error = (ours.float() - oracle.float()).abs()
    return bool((error <= RELATIVE[dtype] * (oracle.float().abs() + oracle.float().square().mean().sqrt())).all())


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOKENS = pytest.mark.parametrize("tokens", [1, 5, 700])  # on one thread, and on all


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


# -- FP8


SOUND_CODES = torch.arange(256, dtype=torch.uint8)[torch.arange(256) & 0x7F != 0x7F]


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
    for tensor in ours.tensors:
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
    scale = cache.k_scale_CBK
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


@pytest.mark.parametrize("queries", [1, 5])
def test_every_code_is_widened_exactly(queries: int) -> None:
    """As a value alone in its context, and as a key that the query picks a place of."""
    count = len(SOUND_CODES)
    cache = LayerCache.allocate(count, queries, 1, 16, FP8, torch.device("cpu"))
    cache.fill(list(range(count)), 1.0)
    cache.v_CBKD.view(torch.uint8).copy_(SOUND_CODES[:, None, None, None])
    where = AttentionInput(
        np.arange(0, count * queries + 1, queries, dtype=np.int32),
        np.full(count, queries, dtype=np.int32),
        np.arange(count, dtype=np.int32)[:, None],
        torch.arange(count * queries),
        queries,
    )
    out_TND = attention(torch.ones(count * queries, 1, 16), cache, where, 0.25, None)
    expected_T = SOUND_CODES.view(FP8).float().repeat_interleave(queries)
    assert torch.allclose(out_TND[:, 0, 0], expected_T, rtol=1e-6, atol=0)


def test_a_broken_value_or_key_stays_in_its_head_and_sequence() -> None:
    torch.manual_seed(3)
    where, cache = ragged_step(np.random.default_rng(3), 2, 16, 4, torch.float32, with_fp8=True)
    for name in ("k_scale_CBK", "v_scale_CBK"):
        broken = LayerCache(*(tensor.clone() for tensor in cache.tensors))
        getattr(broken, name)[where.block_table_SM[1, 0], 0, 1] = float("nan")
        q_TND = torch.randn(int(where.query_start_S1[-1]), 4, 16)
        ours = attention(q_TND, broken, where, 0.3, None).isfinite().all(-1)
        rows = slice(*where.query_start_S1[1:3].tolist())
        assert not ours[rows, 2:].any()
        ours[rows, 2:] = True
        assert ours.all()


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


@DTYPES
def test_some_rows_of_a_step_attend_as_in_the_whole_step(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(8)
    torch.manual_seed(8)
    where, cache = ragged_step(rng, 2, 16, 4, dtype)
    tokens = int(where.query_start_S1[-1])
    q_TND = torch.randn(tokens, 4, 16).to(dtype)
    rows = rng.permutation(tokens)[: tokens // 2]
    whole = reference_attention(q_TND.float(), widened(cache), where, 0.3, 9)
    ours = attention(q_TND[rows], cache, where.rows(rows), 0.3, 9)
    assert float((ours.float() - whole[rows]).abs().max()) < TOLERANCE[dtype]
    assert torch.equal(where.rows(rows).slot_mapping_T, where.slot_mapping_T[rows])


def test_it_is_known_whether_the_kernels_are_compiled(tmp_path: Path) -> None:
    cache, q = LayerCache.allocate(1, 4, 1, 4, torch.float32, torch.device("cpu")), torch.ones(1, 3, 4)
    elementwise.add_rms_norm(q[0], q[0], q[0, 0], 1e-5)
    elementwise.norm_rope_write(q, q[:, 0, :2], q[:, 0, :2], None, 1e-5, cache, torch.tensor([2]))
    elementwise.silu_mul(q[0])
    where = AttentionInput(
        np.array([0, 1], dtype=np.int32),
        np.array([3], dtype=np.int32),
        np.zeros((1, 1), dtype=np.int32),
        torch.tensor([2]),
        4,
    )
    attention(q, cache, where, 1.0, None)
    passes = elementwise.add_rms_norm_kernel, elementwise.norm_rope_write_kernel, elementwise.silu_mul_kernel
    assert all(is_cached(kernel) for kernel in (*passes, paged_decode))
    newer = tmp_path / "elementwise.py"
    newer.write_text("a newer file")
    later = time.time() + 60
    os.utime(newer, (later, later))

    class Changed:
        stats, __name__ = elementwise.silu_mul_kernel.stats, "silu_mul_kernel"
        py_func = types.FunctionType(elementwise.silu_mul_kernel.py_func.__code__.replace(co_filename=str(newer)), {})

    class OfOtherTiles(Changed):
        py_func = types.FunctionType(elementwise.silu_mul_kernel.py_func.__code__, {})
        py_func.__qualname__ = f"silu_mul_kernel-{'0' * 12}"

    assert not is_cached(Changed())  # type: ignore[arg-type]
    assert not is_cached(OfOtherTiles())  # type: ignore[arg-type]


def test_selecting_kernels_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernels = select_kernels(torch.device("cpu"), torch.float32)
        kernels.silu_mul(torch.ones(2000, 64))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
