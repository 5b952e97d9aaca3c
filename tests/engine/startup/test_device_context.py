"""Several engines in one process: each computes with its own threads and on its own device, and the caller's settings
stay as they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from numba import get_num_threads

from pipeline import SamplingParams
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.forward.runner import DeviceContext
from pipeline.engine.request import Request
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.startup import build
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.kernels.cpu.attention import attention
from pipeline.kernels.cpu.compile.threads import use_threads
from tests.engine.hash_runner import before_each_step, hash_engine
from tests.model_folders import Family, make_family
from tests.parity.harness import float32_engine, greedy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("device_context"), Family("llama3", "llama"), seed=8)


@pytest.fixture(params=[1, 2, 3])
def callers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Set the caller's number of torch threads, with enough processors for all."""
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def recorded_threads(engine: Engine) -> list[int]:
    """Return a list that receives torch's threads in each step from now on."""
    seen = list[int]()
    before_each_step(engine, lambda step, future: seen.append(torch.get_num_threads()))
    return seen


def test_each_engine_has_its_own_threads_and_the_callers_stay(
    folder: Path, callers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_with, load = list[int](), LoadedModel.load

    def load_and_record(*parts, **options) -> LoadedModel:
        loaded_with.append(torch.get_num_threads())
        return load(*parts, **options)

    monkeypatch.setattr(build.LoadedModel, "load", load_and_record)
    engines = {n: float32_engine(folder, num_threads=n or None) for n in (1, 2, 0)}
    assert loaded_with == [1, 2, callers]
    assert torch.get_num_threads() == callers
    assert [engine.resolved["num_threads"] for engine in engines.values()] == [1, 2, callers]
    seen = {n: recorded_threads(engine) for n, engine in engines.items()}
    for engine in engines.values():
        engine.warm_up()
        engine.generate([[1, 2, 3]], greedy(3))
        assert torch.get_num_threads() == callers
        engine.add(Request(0, [1, 2], greedy(2)))
        engine.step()
        assert torch.get_num_threads() == callers
        engine.abort(0)
    streams = {n: engine.stream([Request(0, [5, n], greedy(4))] * 3) for n, engine in engines.items()}
    while streams:
        for n in list(streams):
            if next(streams[n], None) is None:
                del streams[n]
            assert torch.get_num_threads() == callers
    assert all(set(steps) == {n or callers} for n, steps in seen.items())
    torch.set_num_threads(4)
    engines[0].generate([[1, 2, 3]], greedy(3))
    assert seen[0][-1] == 4, "without a number it uses the caller's current threads"
    for engine in engines.values():
        engine.close()


def test_compiled_kernels_run_on_the_threads_of_their_own_engine(
    folder: Path, callers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def use_and_record(parallel: bool) -> int:
        num_threads = use_threads(parallel)
        assert get_num_threads() == num_threads
        if parallel:
            seen.append(num_threads)
        return num_threads

    monkeypatch.setattr(attention, "use_threads", use_and_record)
    prompts = [[row, *range(1, 200)] for row in range(40)]  # enough for several threads
    for num_threads in (1, 2, 1):
        with float32_engine(folder, num_threads=num_threads, max_num_seqs=40) as engine:
            seen.clear()
            engine.generate(prompts, greedy(3))
            assert set(seen) == {num_threads}


def test_a_step_that_raises_leaves_the_caller_s_threads(callers: int) -> None:
    engine = hash_engine(60, 4)
    engine.device_context = DeviceContext(4 - callers, CPU)

    def interrupt(step: StepInput, future: FutureTokens | None) -> None:
        assert torch.get_num_threads() == 4 - callers
        raise KeyboardInterrupt

    before_each_step(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2]], SamplingParams())
    assert torch.get_num_threads() == callers
    with engine.device_context, engine.device_context:
        assert torch.get_num_threads() == 4 - callers
    assert torch.get_num_threads() == callers


def test_each_engine_launches_on_its_own_device_and_the_callers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    current, launched = [2], set[tuple[int, str, int]]()

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])

    def recording_device(index: int, method: str, call: Callable) -> Callable:
        def recorded(*arguments):
            launched.add((index, method, current[-1]))
            return call(*arguments)

        return recorded

    engines = {}
    for index, name in ((0, "cuda:0"), (1, "cuda:1"), (3, "cuda:3")):
        engine = engines[index] = hash_engine(60, 4, is_asynchronous=True, bad_token=77)
        engine.device_context = DeviceContext(None, torch.device(name))
        for method in ("execute", "greedy", "sample", "zero_pages"):
            setattr(engine.runner, method, recording_device(index, method, getattr(engine.runner, method)))
    for engine in engines.values():
        engine.warm_up()
        streams = [engine.stream([Request(0, [n, 5], SamplingParams(max_tokens=9))]) for n in (1, 2)]
        next(streams[0])
        assert current == [2]
        engine.generate([[1, 77, 2], [4]], [SamplingParams(), SamplingParams(temperature=1.0)])
        engine.add(Request(0, [1, 77, 2], SamplingParams()))
        engine.step()
        engine.abort(0)
        assert current == [2]
    assert {(index, current) for index, _, current in launched} == {(0, 0), (1, 1), (3, 3)}
    assert {method for _, method, _ in launched} == {"execute", "greedy", "sample", "zero_pages"}
