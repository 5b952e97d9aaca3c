"""Steps: what a trace says of them, and points of falling numbers of rows in the engine's own loop."""

import gzip
import json

import pytest

from pipeline.bench.gpu.steps.step_times import (
    NUM_MIXED,
    NUM_MIXED_TRACED,
    OUTPUT,
    PROMPT,
    StepBench,
    StepTime,
    steps_to_text,
)
from pipeline.bench.gpu.steps.trace import NUM_KERNELS, OTHERS, Trace, Traced, Window, pauses
from pipeline.bench.shapes import bench_model
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig


def event(cat, name, ts, dur, correlation=0):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def two_steps():
    """Each a replay of two kernels, a launched one after it; the second waits 100 us for the host."""
    events = [{"ph": "M", "name": "process_name"}]
    for number, start in enumerate((1000.0, 1200.0)):
        graph, single = 10 + number, 20 + number
        events += [
            event("cuda_runtime", "cudaGraphLaunch", start - 30, 5, graph),
            event("cuda_driver", "cuLaunchKernelEx", start - 20, 5, single),
            event("kernel", "attend", start, 40, graph),
            event("kernel", "multiply", start + 42, 38, graph),
            event("kernel", "sample", start + 81, 19, single),
            event("gpu_user_annotation", "step", start, 100),
        ]
    return events


def test_a_captured_step_lasts_from_its_first_kernel_to_its_last():
    found = Trace(two_steps()).steps(2)
    assert found.replay_s == pytest.approx(80e-6)
    assert found.busy_s == pytest.approx(97e-6)
    assert found.idle_s == pytest.approx((2 * 3 + 100) / 2 * 1e-6)
    assert found.host_s == pytest.approx(50e-6), "the pauses of one and two microseconds are no waiting"
    assert found.kernels == pytest.approx({"attend": 40e-6, "multiply": 38e-6, "sample": 19e-6})
    assert list(found.kernels) == ["attend", "multiply", "sample"]
    assert found.idle_share == pytest.approx(53 / 150)


def test_small_kernels_are_told_together_and_launches_need_no_graph():
    events = [event("kernel", f"k{n}", 10.0 * n, 1.0 + (n < NUM_KERNELS), n) for n in range(NUM_KERNELS + 3)]
    found = Trace(events).steps(1)
    assert found.replay_s is None
    assert len(found.kernels) == NUM_KERNELS + 1
    assert found.kernels[OTHERS] == pytest.approx(3e-6)
    assert Trace([event("cpu_op", "add", 0, 5)]).steps(1) is None


def test_a_mixed_steps_host_is_until_its_last_launch():
    events = [
        event("user_annotation", "mixed step", 100, 500),
        event("user_annotation", "another", 0, 1000),
        event("cuda_runtime", "cudaLaunchKernel", 150, 10, 1),
        event("cuda_runtime", "cudaLaunchKernel", 390, 10, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 420, 170, 3),
        event("cuda_runtime", "cudaLaunchKernel", 700, 10, 4),
        event("kernel", "a", 170, 50, 1),
        event("kernel", "b", 410, 60, 2),
        event("kernel", "c", 720, 60, 4),
    ]
    (found,) = Trace(events).windows("mixed step")
    assert (found.launched_s, found.device_s, found.num_launches) == pytest.approx((300e-6, 110e-6, 2))
    assert Trace(events[:1]).windows("mixed step") == []


def test_a_trace_is_read_from_its_file(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": two_steps()}).encode()))
    assert Trace.read(path).steps(2) == Trace(two_steps()).steps(2)


def test_a_card_is_idle_where_nothing_runs():
    assert pauses([(5, 7), (0, 2), (1, 3), (1.5, 1.6), (7, 8)]) == [2]
    assert pauses([(1, 9), (2, 3), (10, 11), (14, 15)]) == [1, 3]
    assert pauses([]) == []


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = bench_model("tiny", str(tmp_path_factory.mktemp("shapes"))).folder
    options = {"max_model_len": 40 + OUTPUT + PROMPT, "max_num_seqs": 6, "max_num_batched_tokens": 128}
    with Engine(EngineConfig(str(folder), dtype="float32", **options)) as made:
        yield made


def test_rows_are_dropped_from_point_to_point(engine, tmp_path):
    steps = []
    real = engine.step

    def step():
        running = engine.scheduler.running
        steps.append((len(running), len(engine.scheduler.waiting)))
        return real()

    engine.step = step
    try:
        found = list(StepBench(engine, 4, 2, tmp_path, "it").measure((1, 5, 3), 40))
    finally:
        del engine.step
    assert [time.rows for time in found] == [5, 3, 1]
    assert 40 < found[0].context < found[1].context < found[2].context < 40 + OUTPUT
    assert engine.num_unfinished == 0
    mixed = [waiting for _, waiting in steps if waiting == 1]
    assert len(mixed) >= 3 * 6, "a prompt waits before each mixed step"
    assert not list(tmp_path.iterdir()), "nothing to trace on a processor"
    again = [StepTime.from_json(json.loads(json.dumps(time.to_json()))) for time in found]
    assert again == found


def test_more_rows_than_fit_are_as_many_as_fit(engine, tmp_path):
    found = list(StepBench(engine, 1, 1, tmp_path, "it").measure((1, 100), 40))
    assert [time.rows for time in found] == [5, 1], "a slot is left for the prompt of a mixed step"


def test_points_are_told_with_their_kernels():
    traced = Traced(8, 0.010, 0.0101, 0.0004, 0.0002, {"attend": 0.006, "multiply": 0.004})
    point = StepTime(64, 270.0, 0.0106, traced, 0.0138, (Window(0.009, 0.012, 340),), 0.0152)
    assert StepTime.from_json(json.loads(json.dumps(point.to_json()))) == point
    text = steps_to_text([point, StepTime(1, 20.0, 0.001, None, 0.002)])
    row = next(line for line in text.splitlines() if line.lstrip().startswith("64"))
    figures = ["10.600", "10.000", "10.100", "0.400", "0.200", "13.800", "15.200", "9.000", "12.000"]
    assert row.split() == ["64", "270", *figures, "340"]
    assert "64 rows at 270, milliseconds of a step by kernel:\n     6.0000 attend\n     4.0000 multiply" in text


def test_mixed_steps_are_timed_as_served_and_kernel_by_kernel(engine, tmp_path, monkeypatch):
    bench, seen = StepBench(engine, 1, 1, tmp_path, "it"), []
    mixed_step = bench._mixed_step

    def noted():
        seen.append(engine.runner.replays_mixed)
        mixed_step()

    monkeypatch.setattr(bench, "_on_card", True)
    for name, does in {"_mixed_step": noted, "_wait": lambda: None}.items():
        monkeypatch.setattr(bench, name, does)
    monkeypatch.setattr(bench, "_traced", lambda name, count, step: [step() for _ in range(count)] and None)
    (found,) = bench.measure((1,), 40)
    assert seen == [True] * NUM_MIXED + [False] * (NUM_MIXED + NUM_MIXED_TRACED)
    assert engine.runner.replays_mixed
    assert found.by_kernel_s > 0
