"""What is made of measured times: sums over linears, crossovers, shares of floors, and what predictions go by."""

import pytest
import torch

from pipeline.bench.gpu.kernels.kernel_times import KernelTime, KernelTimes, _skewed
from pipeline.bench.gpu.kernels.linear_times import LinearTime, summed_up
from pipeline.bench.gpu.rates import MIN_RUNS, WARM_UPS, Rates, Stopwatch, measure_rates
from pipeline.bench.gpu.results.figures import reached_of
from pipeline.bench.gpu.shares import of_data_sheet, shares_to_text
from pipeline.roofline.cards import card_of_device
from pipeline.roofline.cost_model import AWQ, DENSE, DecoderSize, Reached

SIZE = DecoderSize(256, 512, 2, 4, 2, 64, 1000)
RATES = Rates(1e9, 1e12)
PARAMETERS = SIZE.linear_parameters / 2


def times(**paths):
    """path -> microseconds at 1, 64 and 1,024 tokens, halved over two linears."""
    names = {"dense": "16 bit", "fused": "int4 fused", "scratch": "scratch", "fp8": "fp8", "served": "served"}
    return [
        LinearTime(linear, names[path], tokens, us / 2e6)
        for path, of in paths.items()
        for linear in ("qkv", "down")
        for tokens, us in zip((1, 64, 1024), of)
    ]


def test_paths_cross_where_16_bit_is_faster_from_there_on():
    measured = times(dense=(100, 110, 400), fused=(30, 120, 900), scratch=(180, 190, 390), served=(30, 115, 400))
    found = summed_up(measured, SIZE, AWQ, RATES)
    assert found.layer_s("int4 fused") == pytest.approx({1: 30e-6, 64: 120e-6, 1024: 900e-6})
    assert found.crossovers == {"int4 fused": 64, "scratch": None}
    assert found.behind == pytest.approx({1: 1.0, 64: 115 / 110, 1024: 400 / 390})
    assert found.floors_s["dense"][1] == pytest.approx(2 * PARAMETERS / 1e9)
    assert found.floors_s["int4"][1] == pytest.approx(AWQ.packed_bytes * PARAMETERS / 1e9)
    assert found.floors_s["int4"][1024] == pytest.approx(2 * PARAMETERS * 1024 / 1e12)
    text = found.to_text()
    assert "16 bit is faster than int4 fused from 64 tokens on." in text
    assert "16 bit is faster than scratch at no number measured." in text
    assert "no number of tokens." in text
    slow = summed_up(times(dense=(100, 110, 400), served=(106, 110, 400)), SIZE, DENSE, RATES)
    assert "behind the best path at 1 tokens." in slow.to_text()
    assert set(slow.floors_s) == {"dense"}


def test_fp8_is_no_path_to_the_same_result():
    found = summed_up(times(dense=(100, 110, 400), fp8=(50, 120, 200), served=(100, 110, 440)), SIZE, AWQ, RATES)
    assert found.behind == pytest.approx({1: 1.0, 64: 1.0, 1024: 1.1})
    assert found.crossovers == {"fp8": None}
    assert " fp8 " in found.to_text()


def test_a_path_that_broke_off_is_left_out():
    whole, last = times(dense=(1, 2, 3), fused=(1, 2, 3), served=(1, 2, 3)), times(fused=(1, 2, 3))[-1]
    found = summed_up([time for time in whole if time != last], SIZE, AWQ, RATES)
    assert found.paths == ["16 bit", "served"]
    assert found.crossovers == {}
    alone = summed_up(times(fused=(1, 2, 3)), SIZE, AWQ, RATES)
    assert (alone.behind, alone.crossovers) == ({}, {})
    assert "int4 fused" in alone.to_text()


def kernel(case, seconds, flops=0.0, floor_s=1e-6):
    return KernelTime("attention", case, seconds, floor_s, 1e3, flops)


def test_predictions_go_by_what_the_kernels_reached():
    kernels = KernelTimes((
        kernel("decoding, 4 at 100", 2e-6), kernel("decoding, 8 at 100", 4e-6), kernel("decoding, 1 at 1", 1.25e-6),
        kernel("2 prompts of 60", 1.0, flops=2e11), KernelTime("silu_mul", "decoding", 1.0, 1e-9, 1.0, 0.0),
    ))  # fmt: skip
    measured = times(dense=(9999, 110, 2000), fused=(30, 120, 4000), served=(1310.72, 115, 400))
    linears = summed_up(measured, SIZE, AWQ, RATES)
    found = reached_of(RATES, kernels, linears)
    assert (found.kv, found.attention) == (0.5, 0.2)
    rate = 2 * PARAMETERS * 1024 / 1e12
    assert found.gemm == pytest.approx(rate / 2000e-6)
    assert found.int4 == pytest.approx(rate / 4000e-6)
    assert found.bandwidth == pytest.approx(AWQ.packed_bytes * PARAMETERS / 1e9 / 1310.72e-6)
    assert reached_of(RATES, None, None) == Reached()
    fast = KernelTimes((kernel("decoding, 4 at 100", 0.5e-6),))  # from a cache
    assert reached_of(RATES, fast, None) == Reached()


def test_skewed_contexts_keep_the_mean():
    contexts = _skewed(256, 1000)
    assert sum(contexts) / 256 == pytest.approx(1000, rel=0.01)
    assert max(contexts) > 4000
    assert min(contexts) >= 1


def test_rates_are_bytes_and_operations_over_seconds(monkeypatch):
    monkeypatch.setattr(Stopwatch, "seconds", lambda self, call: (call(), 0.5)[1])
    found = measure_rates(Stopwatch(torch.device("cpu"), 0.0), torch.float32, 1000, (8, 16))
    assert found == Rates(2 * 1000 / 0.5, 2 * 16**3 / 0.5)
    assert found.floor_s(4000, 0) == 1.0
    assert found.floor_s(0, 2 * 16384) == 2.0


def test_a_stopwatch_warms_up_and_takes_the_median(monkeypatch):
    ticks = iter([0.0, 0, 1, 10, 15, 100, 102, 102])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    called = []
    assert Stopwatch(torch.device("cpu"), 0.0).seconds(lambda: called.append(1)) == 2
    assert len(called) == WARM_UPS + MIN_RUNS


def test_shares_of_the_data_sheet_count_what_the_card_itself_does_not_reach():
    card = card_of_device("NVIDIA H200")
    assert card is not None
    assert card_of_device("Some other card") is None
    rates = Rates(0.9 * card.bandwidth_bytes_per_s, 0.8 * card.bf16_flops)
    found = of_data_sheet(Reached(bandwidth=0.5, kv=1.0, gemm=0.5, int4=0.25, attention=1.0, fp8=0.7), rates, card)
    shares = (found.bandwidth, found.kv, found.gemm, found.int4, found.attention, found.fp8)
    assert shares == pytest.approx((0.45, 0.9, 0.4, 0.2, 0.8, 0.7))
    text = shares_to_text("m", Reached(bandwidth=0.5), rates, card)
    assert text == (
        "Kernels of m reached, of the data sheet of H200: bandwidth=0.45, kv=0.90, gemm=0.80, int4=0.80, attention=0.80"
    )
