"""4-bit weights on a GPU: their stored order, the fused product, and the two paths of a linear."""

import pytest
import torch

from pipeline.kernels.triton.launch import A100, H100, CompileTarget
from pipeline.kernels.triton.linear.crossover import CROSSOVERS, crossover_of
from pipeline.kernels.triton.linear.dispatch import (
    DequantBuffer,
    TorchLinear,
    TwoPathLinear,
    prepare_linear,
)
from pipeline.kernels.triton.linear.int4 import CHUNK, TiledInt4, dequantize_launch, int4_launches, supports, tile_for
from pipeline.weights.packed import DenseWeight, GroupIntWeight
from tests.kernels.triton.problems import DEVICE, DTYPES, PRODUCT, random_weight


def relative_error(ours: torch.Tensor, weight: GroupIntWeight, x_MK: torch.Tensor) -> float:
    exact = x_MK.double().cpu() @ weight.dequantize(torch.float32).double().T
    if weight.bias_N is not None:
        exact += weight.bias_N.to(x_MK.dtype)
    return float((ours.double().cpu() - exact).abs().max() / exact.abs().max())


SHAPES = [(1, 32, 32), (70, 256, 128), (64, 160, 32), (130, 192, 64), (33, 512, 256)]


@DTYPES
@pytest.mark.parametrize(("num_outputs", "num_inputs", "group"), SHAPES)
def test_the_fused_product_and_the_weight_itself(
    num_outputs: int, num_inputs: int, group: int, dtype: torch.dtype
) -> None:
    weight = random_weight(num_outputs, num_inputs, group, bias=num_outputs % 2 == 1)
    linear = TwoPathLinear(weight, dtype, DEVICE)
    assert torch.equal(linear.kept_NK.cpu(), weight.dequantize(dtype))
    for tokens in (1, 17, 65):
        x_MK = torch.randn(tokens, num_inputs).to(DEVICE, dtype)
        ours = linear.fused(x_MK)
        assert ours.dtype == dtype
        assert relative_error(ours, weight, x_MK) < PRODUCT[dtype], tokens


@DTYPES
@pytest.mark.parametrize("change", ["fractions", "large"])
def test_zero_points_that_are_minima(change: str, dtype: torch.dtype) -> None:
    """Those of GGUF's groups are; so is one above those that bfloat16 represents next to 16."""
    weight = random_weight(70, 160, 32, bias=True)
    if change == "fractions":
        weight.zeros_NG.mul_(1.3).sub_(2.7)
    else:
        weight.zeros_NG[0, 0] = 241
    linear = TwoPathLinear(weight, dtype, DEVICE)
    assert linear.tiled.has_minima
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert torch.allclose(linear.kept_NK.cpu().float(), weight.dequantize(torch.float32), rtol=rounding, atol=rounding)
    for tokens in (1, 17):
        x_MK = torch.randn(tokens, 160).to(DEVICE, dtype)
        assert relative_error(linear.fused(x_MK), weight, x_MK) < 2 * PRODUCT[dtype], tokens


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_inputs_in_parts(bias: bool, dtype: torch.dtype) -> None:
    weight = random_weight(20, 1152, 128, bias)
    linear, x_MK = TwoPathLinear(weight, dtype, DEVICE), torch.randn(2, 1152).to(DEVICE, dtype)
    launches = int4_launches(
        x_MK, linear.tiled, linear.bias_N, x_MK.new_empty(2, 20), CompileTarget.from_device(torch.device("cpu"))
    )
    assert [launch.grid for launch in launches] == [(1, 3, 1), (1,)]
    ours = linear.fused(x_MK)
    assert relative_error(ours, weight, x_MK) < PRODUCT[dtype]
    assert torch.equal(linear.fused(x_MK), ours)


def test_rows_that_lie_apart_in_memory() -> None:
    weight = random_weight(40, 128, 128)
    x_MK = torch.randn(4, 256, device=DEVICE)[:, 128:]
    assert relative_error(TwoPathLinear(weight, torch.float32, DEVICE).fused(x_MK), weight, x_MK) < 2e-6


def test_what_is_no_number_stays_in_its_row() -> None:
    linear = TwoPathLinear(random_weight(40, 128, 64), torch.float32, DEVICE)
    x_MK = torch.randn(4, 128, device=DEVICE)
    clean = linear(x_MK)
    x_MK[2, 5] = float("nan")
    broken = linear(x_MK)
    assert torch.isnan(broken[2]).all()
    assert torch.equal(broken[[0, 1, 3]], clean[[0, 1, 3]])


@DTYPES
@pytest.mark.parametrize("adjacent", [2, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_order_of_words_changes_no_result(group: int, adjacent: int, dtype: torch.dtype) -> None:
    weight, x_MK = random_weight(20, 384, group), torch.randn(3, 384).to(DEVICE, dtype)
    tiled, out_MN = TiledInt4.repack(weight, DEVICE, adjacent), x_MK.new_empty(3, 20)
    weight_NK = torch.empty(20, 384, dtype=dtype, device=DEVICE)
    for launch in (
        *int4_launches(x_MK, tiled, None, out_MN, CompileTarget.from_device(DEVICE)),
        dequantize_launch(tiled, weight_NK),
    ):
        launch.run()
    assert relative_error(out_MN, weight, x_MK) < PRODUCT[dtype]
    assert torch.equal(weight_NK.cpu(), weight.dequantize(dtype))


@DTYPES
@pytest.mark.parametrize("zero", [0, 8, 240])
def test_zero_points_of_symmetric_and_odd_weights(zero: int, dtype: torch.dtype) -> None:
    weight = random_weight(20, 256, 128)
    weight.zeros_NG[:] = zero
    x_MK = torch.randn(2, 256).to(DEVICE, dtype)
    ours = TwoPathLinear(weight, dtype, DEVICE).fused(x_MK)
    assert relative_error(ours, weight, x_MK) < PRODUCT[dtype]


@pytest.mark.parametrize("scale", [1 + 2**-10, 2.0**100, 1 + 2**-20], ids=["float16", "bfloat16", "float32"])
def test_scales_are_exact_in_each_type_that_stores_them(scale: float) -> None:
    q_NK, zeros_NG = torch.ones(1, 32, dtype=torch.uint8), torch.zeros(1, 1)
    weight = GroupIntWeight(q_NK, torch.tensor([[scale]]), zeros_NG, 32)
    assert (TwoPathLinear(weight, torch.float32, DEVICE).kept_NK == scale).all()


# -- two paths


@pytest.mark.parametrize("with_scratch", [False, True])
def test_the_crossover_separates_the_paths(with_scratch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = DequantBuffer(torch.float32, DEVICE) if with_scratch else None
    weight = random_weight(40, 128, 64, bias=True)
    linear = TwoPathLinear(weight, torch.float32, DEVICE, scratch, crossover=3)
    paths = []
    fused, dense = linear.fused, linear.dense
    monkeypatch.setattr(linear, "fused", lambda x: paths.append("fused") or fused(x))
    monkeypatch.setattr(linear, "dense", lambda x: paths.append("dense") or dense(x))
    for tokens in (0, 1, 3, 4):
        x_MK = torch.randn(tokens, 128, device=DEVICE)
        ours = linear(x_MK)
        assert ours.shape == (tokens, 40)
        assert tokens == 0 or relative_error(ours, weight, x_MK) < PRODUCT[torch.float32]
    assert paths == ["dense", "fused", "fused", "dense"]


def test_cards_without_an_entry_use_the_crossover_of_the_next_older_one() -> None:
    assert crossover_of((8, 6)) == crossover_of((8, 0))
    assert crossover_of((12, 0)) == CROSSOVERS[10, 0]
    assert crossover_of((7, 5)) == CROSSOVERS[8, 0]


def test_linears_share_a_scratch() -> None:
    scratch = DequantBuffer(torch.float16, DEVICE)
    weights = [random_weight(8, 64, 64, seed=1), random_weight(40, 128, 64, seed=2), random_weight(16, 32, 32, seed=3)]
    linears = [TwoPathLinear(weight, torch.float16, DEVICE, scratch, crossover=0) for weight in weights]
    assert scratch.num_bytes == 2 * 40 * 128
    for weight, linear in zip(weights * 2, linears * 2):
        x_MK = torch.randn(2, weight.in_features).to(DEVICE, torch.float16)
        assert relative_error(linear(x_MK), weight, x_MK) < PRODUCT[torch.float16]
        assert not hasattr(linear, "kept_NK")


def test_what_the_kernels_do_not_serve_goes_to_cublas() -> None:
    weight = random_weight(8, 96, 48)
    assert not supports(weight)
    linear = prepare_linear(weight, torch.float32, DEVICE)
    assert isinstance(linear, TorchLinear)
    x_MK = torch.randn(2, 96, device=DEVICE)
    assert relative_error(linear(x_MK), weight, x_MK) < PRODUCT[torch.float32]


def test_dense_weights_go_to_cublas() -> None:
    weight_NK, bias_N, x_MK = torch.randn(5, 6), torch.randn(5), torch.randn(3, 6)
    linear = prepare_linear(DenseWeight(weight_NK, bias_N), torch.float32, DEVICE)
    assert torch.allclose(linear(x_MK.to(DEVICE)).cpu(), x_MK @ weight_NK.T + bias_N, atol=1e-5)


def test_tiles_cover_the_inputs_and_parts_stay_small() -> None:
    for target in (A100, H100):
        for num_outputs, num_inputs in ((4096, 4096), (28672, 4096), (4096, 14336), (128, 64)):
            num_chunks = -(-num_inputs // CHUNK)
            for tokens in (1, 16, 17, 64, 500):
                tile = tile_for(tokens, num_outputs, num_chunks, target)
                per_part = -(-num_chunks // tile.parts)
                assert (tile.parts - 1) * per_part < num_chunks <= tile.parts * per_part
                assert tile.parts == 1 or 4 * tile.parts * tile.tokens * num_outputs <= num_outputs * num_inputs // 2
