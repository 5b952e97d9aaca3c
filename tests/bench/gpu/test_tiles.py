"""Tiles that are tried: every one computes the same (in Triton's interpreter), the fastest is found, and what cannot be
had is left out with its reason."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pipeline.bench.gpu.kernels import tile_times
from pipeline.bench.gpu.kernels.kernel_times import DECODING, KernelTime, KernelTimes
from pipeline.bench.gpu.kernels.linear_times import LinearTime, summed_up
from pipeline.bench.gpu.kernels.tile_times import (
    OUT_OF_TIME,
    TileCase,
    TileSizes,
    TileTime,
    TileTimes,
    tile_measurements,
)
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.result import Found
from pipeline.bench.gpu.sections import tiles
from pipeline.bench.gpu.task import Task
from pipeline.roofline.cost_model import AWQ, DENSE, DecoderSize

pytest.importorskip("triton")

from pipeline.bench.gpu.kernels.tile_cases import tile_cases
from pipeline.kernels.triton.kernel_set import is_interpreted

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = DecoderSize(128, 128, 1, 4, 2, 32, 70)
SIZES = TileSizes(((2, 70),), ((1, 33),), (1,), (17,), (2,))
TABLES = ["prefill._tile", "decode._stages", "int4.tile_for", "fp8.tile_for", "sample"]


class ByTile:
    """Stands in for a stopwatch: a call's time is what `cost` says of the launches in it."""

    def __init__(self, cost):
        self.cost, self.calls = cost, 0

    def wait(self):
        pass

    def seconds(self, call):
        self.calls += 1
        return self.cost(call)


def fake_case(problems=(), case="work", group="g", shipped=None):
    """Tiles 1 to 4 of one size, of which 2 is shipped; a launch writes the same whatever its tile, but for problems."""
    out = torch.zeros(3)

    def launches(tile):
        def launch():
            size = tile["size"]
            if size in problems and problems[size] == "breaks":
                raise RuntimeError("at 7:12\nout of resource: shared memory")
            out[: 2 if problems.get(size) == "short" else 3] = 5.0 + (problems.get(size) == "wrong")
            return SimpleNamespace(n_spills=3 if problems.get(size) == "spills" else 0)

        return [SimpleNamespace(run=launch, size=tile["size"])]

    problems = dict(problems)
    tiles = tuple({"size": size} for size in (1, 3, 4))
    return TileCase("table", group, case, {"size": 2}, tiles, launches, out, 1e-3)


def measured(cases, cost, budget_s=1e9):
    watch = ByTile(cost)
    found = [time for each in tile_measurements([lambda c=c: c for c in cases], watch, budget_s) for time in each()]
    return TileTimes(tuple(found)), watch


def size_of(call):
    """Of the tile whose launches a call runs."""
    return call.__closure__[0].cell_contents[0].size


def test_the_fastest_tile_is_found_and_told_with_its_gain():
    found, watch = measured([fake_case()], lambda call: {1: 4.0, 2: 3.0, 3: 2.0, 4: 5.0}[size_of(call)])
    assert [(time.tile["size"], time.seconds, time.is_shipped) for time in found.times] == [
        (2, 3.0, True), (1, 4.0, False), (3, 2.0, False), (4, 5.0, False)
    ]  # fmt: skip
    assert watch.calls == 4 + 2  # the shipped one and the fastest again
    assert found.lines() == ["table, g (1 cases): size 2 -> size 3, 1.50x"]
    text = found.to_text()
    assert text.splitlines()[0].startswith("Tiles: 4 of 4 measured.")
    row = text.splitlines()[-1].split()
    assert row == ["table,", "g,", "work", "3,000,000.0", "2,000,000.0", "1.50", "size", "3"]
    assert json.loads(json.dumps(found.to_json()))["choices"][0]["best"] == {"size": 3}


def test_luck_does_not_count():
    times = iter([3.0, 4.0, 1.0, 5.0, 3.0, 2.98])  # the second time the fastest is as slow as the shipped one
    found, _ = measured([fake_case()], lambda call: next(times))
    assert found.lines() == ["table, g (1 cases): size 2 is as fast as any"]


def test_what_cannot_be_had_is_left_out_with_its_reason():
    problems = {1: "breaks", 3: "spills", 4: "wrong"}
    found, _ = measured([fake_case(problems)], lambda call: 1.0)
    assert {time.tile["size"]: time.skipped for time in found.times} == {
        2: "",
        1: "RuntimeError: out of resource: shared memory",
        3: "registers spilled: 3",
        4: "another result: off by 2.0e-01",
    }
    assert [time.seconds for time in found.times] == [1.0, None, None, None]
    assert "left out, table: 1 tiles, registers spilled" in found.to_text()
    short, _ = measured([fake_case({4: "short"})], lambda call: 1.0)
    assert short.times[-1].skipped == "another result: off by inf"
    (alone,) = measured([fake_case({2: "breaks"})], lambda call: 1.0)[0].times
    assert (alone.seconds, alone.is_shipped) == (None, True)
    gone = TileTimes((alone,))
    assert gone.choices == []
    assert "the shipped tile has no time: RuntimeError" in gone.to_text()
    spilled, _ = measured([fake_case({2: "spills"})], lambda call: 1.0)
    assert spilled.times[0].seconds == 1.0, "it is what runs, so its time counts"


def test_time_is_shared_among_the_cases_and_the_shipped_tile_always_has_its_own(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tile_times, "monotonic", lambda: now[0])

    def cost(call):
        now[0] += 2.0
        return float(size_of(call))

    found, _ = measured([fake_case(case="one"), fake_case(case="two"), fake_case(case="three")], cost, budget_s=9.0)
    tried = {name: [t.seconds for t in found.times if t.case == name] for name in ("one", "two", "three")}
    assert tried == {"one": [2.0, 1.0, None, None], "two": [2.0, None, None, None], "three": [2.0, None, None, None]}
    assert {time.skipped for time in found.times if time.seconds is None} == {OUT_OF_TIME}
    assert now[0] < 9.0 + 3 * 4.0


def test_a_group_has_the_tile_that_serves_all_its_cases():
    def times(case, *seconds):
        return [TileTime("t", "g", case, {"n": n}, n == 0, s) for n, s in enumerate(seconds)]

    # tile 1 is best at one case and bad at the other, tile 2 good at both, tile 3 was measured on one alone
    (choice,) = TileTimes((*times("a", 4.0, 1.0, 2.0, 0.1), *times("b", 4.0, 40.0, 2.0, None))).choices
    assert (choice.best, choice.gain, choice.num_cases) == ({"n": 2}, pytest.approx(2.0), 2)
    (same,) = TileTimes((*times("a", 1.0, 2.0),)).choices
    assert (same.best, same.gain) == ({"n": 0}, 1.0)


@pytest.mark.skipif(not is_interpreted(), reason="seconds of compilation for each of hundreds of tiles")
def test_tiles_of_every_kernel_compute_the_same():
    """Each table's shipped tile, two that differ in one size, and the last, which differs in the most."""
    cases = tile_cases(SIZE, AWQ, torch.float32, DEVICE, SIZES)
    assert [case.func.__name__ for case in tile_cases(SIZE, DENSE, torch.float32, DEVICE, SIZES)] == [
        "prefill", "decode", "decode", "prefill", "decode", "sample", "sample"
    ]  # fmt: skip
    seen = set()
    for build in cases:
        case = build()
        key = case.table, case.group if case.table in TABLES[:2] else ""
        if key in seen:
            continue
        seen.add(key)
        assert case.shipped not in case.others
        assert len({tuple(tile.items()) for tile in case.others}) == len(case.others) > 10
        differ = [sum(tile[name] != case.shipped[name] for name in tile) for tile in case.others]
        assert differ == sorted(differ)
        near = [tile for tile, count in zip(case.others, differ) if count == 1]
        few = TileCase(*(vars(case) | {"others": (near[0], near[-1], case.others[-1])}).values())
        found, _ = measured([few], lambda call: 1.0)
        assert {time.skipped for time in found.times} == {""}, (case.table, found.times)
    assert {table for table, _ in seen} == set(TABLES)


@pytest.mark.skipif(not is_interpreted(), reason="as the one above")
def test_a_tile_reaches_the_launch():
    """What a tile says is what is launched, grids and parts with it."""
    wide = replace(SIZE, intermediate=2048)
    of = {case.table: case for case in (build() for build in tile_cases(wide, AWQ, torch.float32, DEVICE, SIZES))}
    (prefill,) = of["prefill._tile"].launches({"keys": 32, "buffers": 3, "warps": 4})
    assert (prefill.constants["KEYS"], prefill.constants["STAGES"], prefill.num_warps) == (32, 7, 4)
    assert prefill.num_stages == 7
    sums, join = of["decode._stages"].launches({"buffers": 2, "warps": 8, "programs": 4})
    once, _ = of["decode._stages"].launches({"buffers": 2, "warps": 8, "programs": 1})
    assert (sums.constants["STAGES"], sums.num_warps, join.num_warps) == (5, 8, 4)
    assert sums.grid[1] == 4 * once.grid[1]
    product = of["int4.tile_for"].launches({"outputs": 128, "warps": 4, "stages": 2, "programs": 1})[0]
    assert (product.constants["OUTPUTS"], product.num_warps, product.num_stages) == (128, 4, 2)
    assert product.grid[0] == 1
    parts = [
        of["int4.tile_for"].launches({"outputs": 64, "warps": 4, "stages": 2, "programs": n})[0].grid[1] for n in (1, 4)
    ]
    assert parts == [2, 4]
    fp8 = of["fp8.tile_for"].launches({"outputs": 64, "tokens": 16, "warps": 8, "stages": 3})[1]
    assert (fp8.constants["OUTPUTS"], fp8.constants["TOKENS"], fp8.num_warps, fp8.num_stages) == (64, 16, 8, 3)
    assert fp8.grid[2] == 2
    _, sample = of["sample"].launches({"together": 16, "warps": 4})
    assert (sample.constants["TOGETHER"], sample.num_warps) == (16, 4)


def test_where_triton_does_not_run_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(tiles, "find_spec", lambda name: None if name == "triton" else object())
    assert tiles.left_out(torch.device("cuda")) == "triton is not installed"


def test_a_kernel_may_be_tried_alone():
    cases = tile_cases(SIZE, AWQ, torch.float32, DEVICE, SIZES, ["decode", "sample"])
    assert {case.func.__name__ for case in cases} == {"decode", "sample"}


def test_the_worst_kernel_is_the_one_that_costs_a_step_most():
    def found(**figures):
        return Found(Task("t", "s", 1.0), {"model": "m"} | figures, "", ())

    def kernels(decode_s, sample_s):
        times = (
            KernelTime("attention", "decoding, 64 at 1,024", decode_s, 1e-4, 1.0, 1.0, kind=DECODING),
            KernelTime("sample", "64 rows", sample_s, 1e-5, 1.0, 0.0),
            KernelTime("attention", "decoding, 512 at 512", 9.0, 1e-4, 1.0, 1.0, kind=DECODING),
        )
        return found(kernels=json.loads(json.dumps(KernelTimes(times).to_json())))

    def linears(fused_s):
        times = [LinearTime(name, "int4 fused", 64, fused_s) for name in ("qkv", "down")]
        told = summed_up(times, SIZE, AWQ, Rates(1e15, 1e18)).to_json()
        return found(linears=json.loads(json.dumps(told)))

    def worst(*results):
        return tiles.worst_kernel(dict(enumerate(results)), "m", 32)

    assert worst() == "int4"
    assert worst(kernels(2e-4, 1e-3)) == "decode"  # 32 layers of it
    assert worst(kernels(1.1e-4, 1e-3)) == "sample"
    assert worst(kernels(2e-4, 1e-3), linears(1e-4)) == "int4"
    assert tiles.worst_kernel({"a": kernels(2e-4, 1e-3)}, "other", 32) == "int4"
