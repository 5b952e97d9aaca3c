"""Products on activations in fp8 on a GPU, against the oracle; here in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from pipeline.kernels.activations.fp8 import fp8_block, rounded
from pipeline.kernels.reference import reference_kernels
from pipeline.kernels.triton.launch import A100, H100, Target
from pipeline.kernels.triton.linear import fp8, scaled_mm
from pipeline.kernels.triton.linear.fp8 import E4m3Weight, Fp8Linear, fp8_launches, fp8_linears, parts_of, tile_for
from pipeline.weights.packed import DenseWeight, Fp8Weight, GroupIntWeight
from tests.kernels.activations.test_fp8 import fp8_weight
from tests.kernels.triton.problems import DEVICE, DTYPES, PRODUCT, random_weight

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) < fp8.LEAST_CAPABILITY, reason="no fp8 units"
)
SUMS = 0.0 if DEVICE.type == "cpu" else 2**-12  # what a GPU's units lose within a block, of the largest


def oracle(weight: GroupIntWeight | Fp8Weight, x_MK: torch.Tensor) -> torch.Tensor:
    linears = reference_kernels(torch.float32, torch.device("cpu")).rounded["fp8"]
    linear = linears.prepare(weight)
    assert linear is not None
    return linear(x_MK.float().cpu())


def linear_of(weight: GroupIntWeight | Fp8Weight) -> Fp8Linear:
    block = fp8_block(weight)
    assert block is not None
    return Fp8Linear(weight, block, DEVICE)


def rounded_by_kernel(x_MK: torch.Tensor, block: int) -> torch.Tensor:
    weight = random_weight(8, x_MK.shape[1], x_MK.shape[1])
    packed = E4m3Weight.of(weight, block, DEVICE)
    launch = fp8_launches(x_MK, packed, None, x_MK.new_empty(len(x_MK), 8), Target.of(DEVICE))[0]
    launch.run()
    value_MK, scale_BM = launch.arguments[1:3]
    spread_MK = value_MK.float() * scale_BM.t().repeat_interleave(block, 1)
    behind = spread_MK[:, x_MK.shape[1] :]
    assert bool((behind == 0).all() or behind.isnan().any())
    return spread_MK[:, : x_MK.shape[1]].cpu()


@DTYPES
@pytest.mark.parametrize(("num_inputs", "block"), [(128, 128), (70, 32), (2500, 64), (5, 128)])
def test_rounding_is_the_oracles_bit_for_bit(num_inputs: int, block: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_inputs)
    x_MK = torch.randn(4, num_inputs) * 10.0
    x_MK[0, ::2] *= 1e-4
    x_MK[1] = 448.0 * torch.linspace(-1, 1, num_inputs)
    x_MK[1, 0], x_MK[2, 3], x_MK[3] = 448.0, 0.0, 0.0
    x_MK = x_MK.to(DEVICE, dtype)
    assert torch.equal(rounded_by_kernel(x_MK, block), rounded(x_MK.cpu(), block))


@DTYPES
def test_all_values_of_float16(dtype: torch.dtype) -> None:
    """Each beside 448, so that the scale is 1: every exponent and every tie of e4m3 occurs."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite() & (every.abs() <= 448)]
    x_MK = torch.cat([torch.full((1,), 448.0).half(), every]).view(1, -1)
    x_MK = torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % 127)).view(-1, 127)
    x_MK = torch.cat([torch.full((len(x_MK), 1), 448.0).half(), x_MK], 1).view(2, -1).to(DEVICE, dtype)
    assert torch.equal(rounded_by_kernel(x_MK, 128), rounded(x_MK.cpu(), 128))


def test_what_is_no_number_makes_all_outputs_none() -> None:
    weight = random_weight(8, 256, 128)
    x_MK = torch.randn(4, 256, device=DEVICE)
    x_MK[1, 130], x_MK[2, 5] = float("nan"), float("inf")
    y_MN = linear_of(weight)(x_MK)
    assert torch.equal(y_MN.isnan().all(1).cpu(), torch.tensor([False, True, True, False]))
    assert torch.equal(y_MN.isfinite().all(1).cpu(), torch.tensor([True, False, False, True]))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 17, 70])
@pytest.mark.parametrize(
    "weight",
    [
        random_weight(70, 256, 128, bias=True),
        random_weight(64, 160, 32),
        random_weight(130, 192, 64),
        random_weight(33, 512, 256),
        random_weight(5, 96, 96),
        replace(random_weight(9, 128, 64), input_order_K=torch.randperm(128)),
        fp8_weight(130, 200, (128, 128)),
        fp8_weight(7, 200, (1, 200)),
    ],
    ids=["bias", "groups of 32", "groups of 64", "two blocks a scale", "less than a block", "reordered", "fp8", "rows"],
)
def test_the_product(weight: GroupIntWeight | Fp8Weight, tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x_MK = (torch.randn(tokens, weight.in_features) * torch.rand(tokens, 1)).to(DEVICE, dtype)
    ours, expected = linear_of(weight)(x_MK), oracle(weight, x_MK)
    assert ours.dtype == dtype
    error = float((ours.float().cpu() - expected).abs().max() / expected.abs().max())
    assert error < PRODUCT[dtype] + SUMS


@pytest.mark.parametrize("bias", [False, True])
def test_a_tokens_bits_are_the_same_beside_others(bias: bool) -> None:
    """Parts of the inputs in programs of their own for few tokens, in one for many."""
    weight = random_weight(20, 2048, 128, bias)
    linear, x_MK = linear_of(weight), torch.randn(80, 2048, device=DEVICE)
    packed, target = linear.weight, Target.of(DEVICE)
    assert parts_of(20, 16, 128, target) == 4
    few, many = (fp8_launches(x_MK[:m], packed, linear.bias_N, x_MK.new_empty(m, 20), target) for m in (2, 80))
    assert (len(few), few[1].constants["PARTS"], len(many), many[1].constants["PARTS"]) == (3, 1, 2, 4)
    whole = linear(x_MK)
    for rows in (slice(0, 1), slice(3, 5), slice(0, 80)):
        assert torch.equal(linear(x_MK[rows]), whole[rows])
    assert float((whole.cpu() - oracle(weight, x_MK)).abs().max()) < (PRODUCT[torch.float32] + SUMS) * 3


def test_no_tokens_and_rows_that_lie_apart() -> None:
    linear, x_MK = linear_of(random_weight(8, 64, 64)), torch.randn(6, 64, device=DEVICE)
    assert linear(x_MK[:0]).shape == (0, 8)
    assert torch.equal(linear(x_MK[::2]), linear(x_MK[::2].contiguous()))


def test_a_weight_is_a_byte_each_and_nothing_beside() -> None:
    weight = random_weight(64, 256, 128)
    linear = linear_of(weight)
    assert linear.weight.num_bytes == 64 * 256 + 4 * 64 * 2
    kept = [value for value in vars(linear).values() if isinstance(value, torch.Tensor)]
    assert kept == []


def test_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    linears = fp8_linears(DEVICE)["fp8"]
    assert linears.prepare(DenseWeight(torch.randn(8, 64))) is None
    assert linears.prepare(random_weight(8, 96, 48)) is None
    for capability, served in [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(fp8, "has_scaled_mm", lambda device: False)
        assert ("fp8" in fp8_linears(torch.device("cuda"))) == served


@pytest.mark.parametrize("target", [A100, H100])
@pytest.mark.parametrize(("num_outputs", "num_blocks", "block"), [(4096, 112, 128), (28672, 32, 128), (128, 7, 32)])
def test_parts_cover_the_inputs(num_outputs: int, num_blocks: int, block: int, target: Target) -> None:
    parts = parts_of(num_outputs, num_blocks, block, target)
    per_part = -(-num_blocks // parts)
    assert (parts - 1) * per_part < num_blocks <= parts * per_part
    assert parts == 1 or per_part * block >= 512
    for tokens in (1, 16, 17, 64, 100_000):
        tile = tile_for(tokens, parts, block, target)
        assert tile.num_stages * (tile.outputs + tile.tokens) * block <= target.max_shared_bytes


# -- products by cuBLAS


def in_blocks(
    value_MK: torch.Tensor,
    value_KN: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What `torch._scaled_mm` is to compute, and the layouts that it asks for."""
    (tokens, inputs), outputs = value_MK.shape, value_KN.shape[1]
    assert value_MK.is_contiguous()
    assert value_KN.t().is_contiguous()
    assert (scale_a.shape, scale_a.stride()) == ((tokens, inputs // 128), (1, tokens))
    assert (scale_b.shape, scale_b.stride()) == ((inputs // 128, outputs), (outputs, 1))
    wide_MK = value_MK.float() * scale_a.repeat_interleave(128, 1)
    return (wide_MK @ (value_KN.float() * scale_b.repeat_interleave(128, 0))).to(out_dtype)


def test_many_tokens_by_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: taken.append(len(a[0])) or in_blocks(*a, **k))
    weight = random_weight(32, 384, 128, bias=True)
    linear = Fp8Linear(weight, 128, DEVICE, by_cublas=True)
    for tokens in (1, 64, 65, 130):
        x_MK = torch.randn(tokens, 384, device=DEVICE).bfloat16()
        error = (linear(x_MK).cpu() - oracle(weight, x_MK)).abs().max() / oracle(weight, x_MK).abs().max()
        assert float(error) < PRODUCT[torch.bfloat16] + SUMS
    assert linear(x_MK.half()).dtype == torch.float16, "which cuBLAS does not give"
    assert taken == [65, 130]
    for other in (random_weight(32, 384, 64), random_weight(32, 512, 256), random_weight(30, 384, 128)):
        block = fp8_block(other)
        assert block is not None
        assert not Fp8Linear(other, block, DEVICE, by_cublas=True).by_cublas


def test_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "_scaled_mm", in_blocks)
    assert scaled_mm.agrees(cpu)
    assert not scaled_mm.has_scaled_mm(cpu), "a CPU is not asked"

    def mixed_up(*tensors: torch.Tensor, scale_b: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        return in_blocks(*tensors, scale_b=scale_b.flip(0), **rest)

    def refuses(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("Invalid scaling configuration.")

    for wrong in (mixed_up, refuses):
        monkeypatch.setattr(torch, "_scaled_mm", wrong)
        assert not scaled_mm.agrees(cpu)
    monkeypatch.delattr(torch, "_scaled_mm")
    assert not scaled_mm.agrees(cpu)


def test_deterministic_kernels_never_take_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "has_scaled_mm", lambda device: True)
    weight = random_weight(32, 384, 128)
    for deterministic in (False, True):
        linears = fp8_linears(DEVICE, deterministic)["fp8"]
        linear = linears.prepare(weight)
        assert isinstance(linear, Fp8Linear)
        assert linear.by_cublas == ("cuBLAS" in linears.served_by) == (not deterministic)
