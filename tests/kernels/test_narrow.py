"""float32 linears on narrow weights: both ways through them against the dense float32 weight."""

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu import crossover as crossover_module
from pipeline.kernels.cpu import narrow
from pipeline.kernels.cpu.crossover import crossover
from pipeline.kernels.cpu.linear import DenseLinear, prepare_linear
from pipeline.kernels.cpu.narrow import Bfloat16Linear, GroupInt4Linear, NarrowLinear
from pipeline.quant.packed import DenseWeight, GroupIntWeight

SHAPES = [(1, 8), (31, 64), (32, 128), (100, 256), (257, 384), (1024, 1152)]


def dense_and_narrow(kind: str, shape_NK: tuple[int, int], group: int = 0) -> tuple[torch.Tensor, NarrowLinear]:
    num_outputs, num_inputs = shape_NK
    bias_N = torch.randn(num_outputs) if num_outputs % 2 else None
    if kind == "bfloat16":
        weight_NK = (torch.randn(shape_NK) * num_inputs**-0.5).to(torch.bfloat16)
        return weight_NK.float(), Bfloat16Linear(weight_NK, bias_N)
    group = group or min(128, num_inputs)
    groups = (num_outputs, num_inputs // group)
    weight = GroupIntWeight(
        torch.randint(0, 16, shape_NK, dtype=torch.uint8),
        (torch.rand(groups) + 0.5) * num_inputs**-0.5 / 4.6,
        torch.randint(0, 16, groups).float(),
        group,
        bias_N,
    )
    return weight.dequantize(torch.float32), GroupInt4Linear(weight)


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
@pytest.mark.parametrize("shape_NK", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_both_ways_give_what_the_dense_weight_gives(kind: str, shape_NK: tuple[int, int], tokens: int) -> None:
    torch.manual_seed(tokens)
    weight_NK, linear = dense_and_narrow(kind, shape_NK)
    x_MK = torch.randn(tokens, shape_NK[1])
    exact = x_MK.double() @ weight_NK.double().T
    if linear.bias_N is not None:
        exact += linear.bias_N.double()
    for way in (linear.few, linear.many):
        ours = way(x_MK)
        assert ours.shape == exact.shape
        assert ours.dtype == torch.float32
        assert float((ours - exact).abs().max() / exact.abs().max()) < 2e-6


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_of_each_size(group: int) -> None:
    weight_NK, linear = dense_and_narrow("int4", (96, 256), group)
    x_MK = torch.randn(3, 256)
    assert torch.allclose(linear.few(x_MK), x_MK @ weight_NK.T, atol=1e-5)
    assert torch.allclose(linear.many(x_MK), x_MK @ weight_NK.T, atol=1e-5)


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_widening_rounds_nothing(kind: str) -> None:
    """Unit vectors through a linear are its weight, bit for bit."""
    weight_NK, linear = dense_and_narrow(kind, (70, 256))
    linear.bias_N = None
    assert torch.equal(linear.many(torch.eye(256)).T, weight_NK)
    if kind == "bfloat16":
        assert torch.equal(linear.few(torch.eye(256)).T, weight_NK)


@pytest.mark.parametrize("lanes", narrow.LANES)
@pytest.mark.parametrize("buffer", [1 << 8, 1 << 18])
def test_tiles_of_each_width_and_buffers_of_one_tile_or_many(
    monkeypatch: pytest.MonkeyPatch, lanes: int, buffer: int
) -> None:
    monkeypatch.setattr(narrow, "LANES", (lanes,))
    monkeypatch.setattr(narrow, "BUFFER_ELEMENTS", buffer)
    for kind in ("bfloat16", "int4"):
        weight_NK, linear = dense_and_narrow(kind, (300, 128))
        x_MK = torch.randn(9, 128)
        assert linear.lanes == lanes
        assert torch.allclose(linear.few(x_MK), x_MK @ weight_NK.T, atol=1e-5)
        assert torch.allclose(linear.many(x_MK), x_MK @ weight_NK.T, atol=1e-5)


def test_a_tile_is_narrower_where_threads_would_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [narrow.lanes_of(n) for n in (8192, 4096, 2048, 1024, 8)] == [128, 128, 64, 32, 32]


@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_what_is_no_number_stays_in_its_row(kind: str) -> None:
    _, linear = dense_and_narrow(kind, (64, 128))
    x_MK = torch.randn(4, 128)
    clean = linear.few(x_MK)
    x_MK[2, 5] = float("nan")
    for way in (linear.few, linear.many):
        broken = way(x_MK)
        assert torch.isnan(broken[2]).all()
        assert torch.allclose(broken[[0, 1, 3]], clean[[0, 1, 3]], atol=1e-5)


def test_rows_that_lie_apart_in_memory() -> None:
    weight_NK, linear = dense_and_narrow("bfloat16", (64, 128))
    x_MK = torch.randn(4, 256)[:, ::2]
    assert torch.allclose(linear.few(x_MK), x_MK @ weight_NK.T, atol=1e-5)


def test_a_weight_stays_as_narrow_as_it_was_stored() -> None:
    torch.manual_seed(0)
    stored = torch.randn(64, 128)
    kinds = {
        torch.bfloat16: Bfloat16Linear,
        torch.float16: DenseLinear,  # its values have more digits than bfloat16 holds
        torch.float32: DenseLinear,
    }
    for dtype, kind in kinds.items():
        linear = prepare_linear(DenseWeight(stored.to(dtype)), torch.float32, keep_dense=False)
        assert type(linear) is kind
        x_MK = torch.randn(2, 128)
        assert torch.allclose(linear(x_MK), x_MK @ stored.to(dtype).float().T, atol=1e-5)
    short = stored.to(torch.bfloat16)
    assert type(prepare_linear(DenseWeight(short.float()), torch.float32, True)) is Bfloat16Linear
    assert type(prepare_linear(DenseWeight(short[:, :60]), torch.float32, True)) is DenseLinear
    quantized = GroupIntWeight(torch.ones(8, 32, dtype=torch.uint8), torch.ones(8, 1), torch.zeros(8, 1), 32)
    assert type(prepare_linear(quantized, torch.float32, True)) is GroupInt4Linear


@pytest.mark.parametrize("keep_dense", [True, False])
def test_many_tokens_go_through_the_dense_copy_where_one_is_kept(keep_dense: bool) -> None:
    stored = torch.randn(65, 128).to(torch.bfloat16)
    bias_N = torch.randn(65)
    linear = prepare_linear(DenseWeight(stored, bias_N), torch.float32, keep_dense)
    assert isinstance(linear, Bfloat16Linear)
    assert (linear.weight_NK is not None) == keep_dense
    x_MK = torch.randn(200, 128)
    assert torch.allclose(linear(x_MK), x_MK @ stored.float().T + bias_N, atol=1e-4)


def test_the_faster_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _, linear = dense_and_narrow("bfloat16", (64, 128))
    taken = []
    monkeypatch.setattr(linear, "few", lambda x_MK: taken.append(("few", len(x_MK))))
    monkeypatch.setattr(linear, "many", lambda x_MK: taken.append(("many", len(x_MK))))
    linear.most_tokens = 4
    for tokens in (1, 4, 5):
        linear(torch.randn(tokens, 128))
    assert taken == [("few", 1), ("few", 4), ("many", 5)]


def test_the_crossover_is_where_the_times_cross_and_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(crossover_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(crossover_module, "_measured", {})

    def takes(seconds_of):
        def multiply(x_TK: torch.Tensor) -> torch.Tensor:
            clock[0] += seconds_of(len(x_TK))
            return x_TK

        return multiply

    few, many = takes(lambda tokens: tokens * 1.0), takes(lambda tokens: 10.0)
    assert crossover("a", few, many, 8, torch.float32) == 8
    assert crossover("b", many, few, 8, torch.float32) == 0
    assert crossover("c", takes(lambda tokens: 0.1), few, 8, torch.float32) == crossover_module.TOKENS[-1]
    before = clock[0]
    assert crossover("a", few, many, 8, torch.float32) == 8
    assert clock[0] == before
    assert np.isfinite(before)
