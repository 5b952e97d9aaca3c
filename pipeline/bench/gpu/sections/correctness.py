"""One shard of the checks: kernels and linears on the inputs that are timed, the engine's ways of choosing tokens, and
the tests of `tests/gpu` where they and pytest are there. Times nothing, so that shards can run side by side."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from pipeline.bench.gpu.device import find_device
from pipeline.bench.gpu.engine_cases import engine_checks
from pipeline.bench.gpu.kernels.checks import Check
from pipeline.bench.gpu.kernels.kernel_times import kernel_cases
from pipeline.bench.gpu.kernels.linear_times import linear_cases
from pipeline.bench.gpu.rates import Rates, Stopwatch
from pipeline.bench.gpu.result import Result
from pipeline.bench.gpu.scale import scale_of
from pipeline.bench.roofline import model_size
from pipeline.kernels.select import select_kernels
from pipeline.model.config import DTYPES

TESTS = Path(__file__).parents[4] / "tests" / "gpu"
DETERMINISTIC = ("batch_invariance", "deterministic")  # words in the names of that mode's tests
UNTIMED = Rates(1.0, 1.0)  # of floors that nobody reads
Item = Callable[[], list[Check]]


def run(
    result: Result,
    models: Sequence[str],
    dtype: str,
    shard: int,
    shards: int,
    tests: str,
    is_deterministic: bool = False,
) -> None:
    """Every `shards`-th item from `shard` on. tests: words in the names of those of `tests/gpu` that are run. With
    `is_deterministic` the tests of that mode alone, else all but those. Raises RuntimeError when the card is lost:
    whatever would follow in this process would fail too."""
    found: list[Check] = []
    passed: list[str] = []

    def keep() -> None:
        result.keep(checks=[asdict(check) for check in found], tests=passed)

    if not is_deterministic:
        items = check_items(result, models, dtype)[shard::shards]
        for item in items:
            with torch.inference_mode():
                found += item()
            keep()
            if found[-1].failure and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises where the check before took the card with it
    if TESTS.is_dir() and find_spec("pytest") is not None:
        for name, why in run_tests(tests, is_deterministic, shard, shards).items():
            if why:
                found.append(Check("tests", name, dtype, "tests/gpu", None, 0.0, why))
            else:
                passed.append(name)
            keep()


def check_items(result: Result, models: Sequence[str], dtype: str) -> list[Item]:
    device, served = find_device(result.setting.device, result.setting.is_smoke), DTYPES[dtype]
    scale = scale_of(result.setting)
    kernels, stopwatch = select_kernels(device, served), Stopwatch(device, 0.0)
    items: list[Item] = list(engine_checks(device, served))
    for model in models:
        size, weights, _ = model_size(model)
        cases = kernel_cases(size, kernels, served, stopwatch, UNTIMED, scale.kernels, False)
        items += [lambda case=case: [case()[0]] for case in cases]
        paths = linear_cases(size, weights, kernels, served, stopwatch, scale.tokens, False)
        items += [lambda case=case: [checked for checked, _ in case()] for case in paths]
    return items


def run_tests(words: str, is_deterministic: bool, shard: int, shards: int) -> dict[str, str]:
    """The shard's tests by name, each with how it failed, else empty. What is skipped is left out."""
    import pytest

    found: dict[str, str] = {}

    class Sharded:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            meant = [item for item in items if words in item.nodeid]
            of_mode = [item for item in meant if is_deterministic == any(word in item.nodeid for word in DETERMINISTIC)]
            items[:] = of_mode[shard::shards]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                found[report.nodeid] = str(report.longrepr)[-500:]
            elif report.when == "call" and report.passed:
                found.setdefault(report.nodeid, "")

    root = TESTS.parents[1]
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(root), str(TESTS)]
    code = pytest.main(arguments, plugins=[Sharded()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        found["tests/gpu"] = f"pytest left with {code}; see the log"
    return found
