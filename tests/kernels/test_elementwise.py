"""The elementwise kernels of the CPU and of Triton against the reference in float32."""

import math
from typing import Any, NamedTuple

import pytest
import torch

from pipeline.kernels import reference
from pipeline.kernels.cache import FP8, LayerCache
from pipeline.kernels.cpu import elementwise as compiled
from pipeline.kernels.triton import elementwise as fused
from tests.kernels.steps import hostile_vectors
from tests.kernels.triton.problems import DEVICE, TYPES, close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter
CPU = torch.device("cpu")
ACTIVATIONS = "silu", "gelu_tanh", "clamped_swiglu"
SOUND_CODES = torch.arange(256, dtype=torch.uint8)[torch.arange(256) & 0x7F != 0x7F]


class Served(NamedTuple):
    kernels: Any
    device: torch.device
    dtype: torch.dtype
    tokens: tuple[int, ...]


SETS = [
    *(Served(compiled, CPU, dtype, (1, 5, 700)) for dtype in (torch.float32, torch.bfloat16)),  # 700: on all threads
    *(Served(fused, DEVICE, dtype, (1, 3)) for dtype in TYPES),
]
EACH = pytest.mark.parametrize("on", SETS, ids=lambda on: f"{on.kernels.__name__.split('.')[-2]}-{on.dtype}")


@EACH
@pytest.mark.parametrize("hidden", [8, 61, 1030])
def test_add_rms_norm(hidden: int, on: Served) -> None:
    torch.manual_seed(hidden)
    for tokens in on.tokens:
        x, residual, weight = torch.randn(tokens, hidden), 3 * torch.randn(tokens, hidden), torch.rand(hidden) + 0.5
        x, residual, weight = x.to(on.dtype), residual.to(on.dtype), weight.to(on.dtype)
        total = (x.float() + residual.float()).to(on.dtype)
        expected = reference.rms_norm(total.float(), weight.float(), 1e-5)
        ours, summed = on.kernels.add_rms_norm(*(t.to(on.device) for t in (x, residual, weight)), 1e-5)
        assert ours.dtype == on.dtype
        assert torch.equal(summed.cpu(), total)
        assert close(ours, expected)


@EACH
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["weight as inputs", "float32 weight"])
@pytest.mark.parametrize("width", [8, 61, 1030])
def test_rms_norm_of_a_part_of_each_row(width: int, weight_dtype: torch.dtype | None, on: Served) -> None:
    """Columns beyond the part stay as they are, and a NaN stays in its row."""
    torch.manual_seed(width)
    for tokens in on.tokens:
        rows, weight = torch.randn(tokens, width + 9).to(on.dtype), torch.rand(width) + 0.5
        rows[0, 7] = math.nan
        weight = weight.to(weight_dtype or on.dtype)
        expected, ours = rows.float(), rows.to(on.device, copy=True)
        expected[:, 3:-6] = reference.rms_norm(expected[:, 3:-6], weight.float(), 1e-5)
        found = on.kernels.rms_norm(ours[:, 3:-6], weight.to(on.device), 1e-5)
        assert bool(found[0].isnan().all())
        assert torch.equal(found[1:], ours[1:, 3:-6])
        assert close(ours[1:], expected[1:])
        assert torch.equal(torch.cat([ours[:, :3], ours[:, -6:]], 1).cpu(), torch.cat([rows[:, :3], rows[:, -6:]], 1))
    no_rows = torch.ones(0, width, dtype=on.dtype, device=on.device)
    assert on.kernels.rms_norm(no_rows, weight.to(on.device), 1e-5).shape == (0, width)


def test_rms_norm_of_the_reference_writes_into_rows_and_rounds_once() -> None:
    """Norms of transformers with a float32 weight do the same: rounding the normed values first would differ."""
    rows, weight = torch.randn(5, 24).to(torch.bfloat16), torch.rand(16) + 0.5
    expected, part = rows.double(), rows[:, 4:20].double()
    expected[:, 4:20] = part * (part.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight
    reference.reference_kernels(torch.bfloat16, CPU).rms_norm(rows[:, 4:20], weight, 1e-5)
    assert torch.equal(rows, expected.to(torch.bfloat16))


def written(cache: LayerCache) -> torch.Tensor:
    """Return (tensors, slots): whether a slot holds anything but 0."""
    codes, scales = cache.tensors[:2], (scale.transpose(1, 2).contiguous() for scale in cache.tensors[2:])
    return torch.stack([t.cpu().float().flatten(2).flatten(0, 1).ne(0).any(1) for t in (*codes, *scales)])


def of_slots(cache: LayerCache, slots: torch.Tensor) -> torch.Tensor:
    return torch.zeros(cache.k_CBKD.shape[:2].numel(), dtype=torch.bool).index_fill(0, slots, True)


@EACH
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 3, 10), (8, 1, 16), (15, 3, 80)])
def test_norm_rope_write(heads: int, kv_heads: int, head_dim: int, with_norm: bool, on: Served) -> None:
    torch.manual_seed(heads)
    for tokens in on.tokens:
        qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(on.dtype)
        angle, slots = 100 * torch.rand(tokens, head_dim // 2), torch.randperm(770)[:tokens]
        norms = [(torch.rand(head_dim) + 0.5).to(on.dtype) for _ in range(2)] if with_norm else None
        cache = LayerCache.allocate(110, 7, kv_heads, head_dim, on.dtype, on.device)
        wide = LayerCache.allocate(110, 7, kv_heads, head_dim, torch.float32, CPU)
        wide_norms, our_norms = (norms and tuple(t.to(kind) for t in norms) for kind in (torch.float32, on.device))
        oracle = reference.norm_rope_write(qkv.float(), angle.cos(), angle.sin(), wide_norms, 1e-6, wide, slots)  # type: ignore[arg-type]
        inputs = (t.to(on.device) for t in (qkv, angle.cos(), angle.sin()))
        ours = on.kernels.norm_rope_write(*inputs, our_norms, 1e-6, cache, slots.to(on.device))
        assert ours.dtype == on.dtype
        assert close(ours, oracle)
        assert close(*(each.k_CBKD.flatten(0, 1)[slots] for each in (cache, wide)))
        assert torch.equal(cache.v_CBKD.cpu(), wide.v_CBKD.to(on.dtype))
        assert torch.equal(written(cache), of_slots(cache, slots).expand(2, -1))


def fp8_caches(qkv: torch.Tensor, kv_heads: int, slots: torch.Tensor, on: Served) -> tuple[LayerCache, LayerCache]:
    """Return the caches that a kernel and the reference write from unrotated vectors."""
    zero = torch.zeros(len(qkv), qkv.shape[2] // 2)
    ours, oracle = (LayerCache.allocate(103, 7, kv_heads, qkv.shape[2], FP8, device) for device in (on.device, CPU))
    inputs = (t.to(on.device) for t in (qkv, zero.cos(), zero))
    on.kernels.norm_rope_write(*inputs, None, 1e-6, ours, slots.to(on.device))
    reference.norm_rope_write(qkv, zero.cos(), zero, None, 1e-6, oracle, slots)
    return ours, oracle


@EACH
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 2, 40), (15, 3, 80)])
def test_an_fp8_cache_is_written_as_the_reference_writes_it(
    heads: int, kv_heads: int, head_dim: int, on: Served
) -> None:
    """Bits are equal for sound vectors, zeros, vectors of one tiny value, and broken ones."""
    tokens, vectors = max(9, *on.tokens), heads + 2 * kv_heads
    qkv = hostile_vectors(tokens * vectors, head_dim).view(tokens, vectors, head_dim).to(on.dtype)
    slots = torch.randperm(103 * 7)[:tokens]
    ours, oracle = fp8_caches(qkv, kv_heads, slots, on)
    for mine, its in zip(ours.tensors, oracle.tensors):
        assert torch.equal(mine.cpu().view(torch.uint8), its.view(torch.uint8))
    assert not written(ours)[:, ~of_slots(ours, slots)].any()


@pytest.mark.parametrize("on", [each for each in SETS if each.dtype == torch.float32], ids=["cpu", "triton"])
def test_codes_are_those_of_torch_at_and_around_every_halfway_case(on: Served) -> None:
    code = SOUND_CODES[:127].view(FP8).float()
    halfway = (code[1:] + code[:-1]) / 2
    cases = torch.cat([code, halfway, halfway.nextafter(code[1:]), halfway.nextafter(code[:-1]), torch.rand(9) * 448])
    cases = torch.cat([cases, torch.tensor([1e-30, 1e-45])])
    vectors = torch.stack([cases, -cases, torch.full_like(cases, 448.0), cases], dim=1)  # so that the scale is 1
    ours, _ = fp8_caches(vectors[:, None].repeat(1, 3, 1), 1, torch.arange(len(cases)), on)
    assert bool((ours.tensors[2].flatten().cpu()[: len(cases)] == 1.0).all())
    found = ours.k_CBKD.cpu().flatten(0, 1)[: len(cases), 0].view(torch.uint8)
    assert torch.equal(found, vectors.to(FP8).view(torch.uint8))


def test_values_stored_in_8_bits_are_near_the_given_ones() -> None:
    """The error is up to half a unit of the last mantissa bit, or of the smallest code; broken vectors become NaN."""
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


@pytest.mark.parametrize("kind", [torch.float32, FP8], ids=str)
def test_a_token_without_a_slot_writes_nothing(kind: torch.dtype) -> None:
    """Padding of a captured step must not change the cache."""
    qkv, angle = torch.randn(3, 4, 16, device=DEVICE), torch.rand(3, 8, device=DEVICE)
    cache = LayerCache.allocate(2, 4, 1, 16, kind, DEVICE)
    fused.norm_rope_write(qkv, angle, angle, None, 1e-6, cache, torch.tensor([5, -1, -1], device=DEVICE))
    assert torch.equal(written(cache), of_slots(cache, torch.tensor([5])).expand(len(cache.tensors), -1))


@EACH
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_mul(activation: str, on: Served) -> None:
    for tokens in on.tokens:
        for width in (3, 64, 201, 1100):
            gate_up = (8 * torch.randn(tokens, 2 * width)).to(on.dtype)
            ours = on.kernels.gate_mul(gate_up.to(on.device), activation)
            assert ours.dtype == on.dtype
            assert close(ours, reference.gate_mul(gate_up.double(), activation).float()), (tokens, width)
    gate = torch.tensor([[-1e30, -1000.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 1000.0, 1e30]])
    if on.dtype == torch.float32:  # exp of some cannot be held
        gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
        ours = on.kernels.gate_mul(gate_up.to(on.device), activation).cpu()
        assert torch.allclose(ours, reference.gate_mul(gate_up, activation), atol=1e-6)


def test_gate_mul_of_the_reference() -> None:
    gate_up = torch.randn(4, 10)
    gate, up = gate_up.chunk(2, dim=1)
    inner = (2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    assert torch.allclose(reference.gate_mul(gate_up, "gelu_tanh"), gate * (1 + inner.tanh()) / 2 * up, atol=1e-6)
    assert torch.allclose(reference.gate_mul(gate_up, "silu"), gate * gate.sigmoid() * up, atol=1e-6)
    gate_up = torch.tensor([[9.0, -9.0, 1.0, -9.0, 9.0, 2.0]])  # two are clamped; a gate is not from below
    expected = [7 / (1 + math.exp(-1.702 * 7)) * -6, -9 / (1 + math.exp(1.702 * 9)) * 8, 3 / (1 + math.exp(-1.702))]
    assert torch.allclose(reference.gate_mul(gate_up, "clamped_swiglu"), torch.tensor([expected]), atol=1e-6)


@EACH
def test_nan_stays_in_its_row_and_zero_rows_are_no_error(on: Served) -> None:
    """A broken row must have broken logits."""
    for broken in (math.nan, math.inf):
        x = torch.ones(3, 16, dtype=on.dtype)
        x[1, 3] = broken
        x = x.to(on.device)
        norm, residual = on.kernels.add_rms_norm(x.clone(), torch.zeros_like(x), torch.ones_like(x[0]), 1e-5)
        # The clamped gate and up are finite for infinity.
        activations = ACTIVATIONS if math.isnan(broken) else ACTIVATIONS[:2]
        products = [on.kernels.gate_mul(x.clone(), activation) for activation in activations]
        for found in (norm, residual, *products):
            assert torch.isfinite(found).all(dim=1).tolist() == [True, False, True]
    x = torch.ones(0, 16, dtype=on.dtype, device=on.device)
    assert on.kernels.gate_mul(x, "silu").shape == (0, 8)
    assert on.kernels.add_rms_norm(x, x.clone(), torch.ones(16, dtype=on.dtype, device=on.device), 1e-5)[0].numel() == 0
