"""Settings of the whole suite that must precede the import of torch, the order of tests on several workers, and a
fixture that runs the command line in this process."""

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The models of the tests are tiny: a second thread saves nothing, and waiting for it is slow on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Engines of real jobs still have two; waiting ones leave the processor to the tests of other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Keep measurements of test runs out of the user's cache for `pipeline plan`.
os.environ.setdefault("PIPELINE_CACHE", tempfile.mkdtemp(prefix="pipeline-tests-"))
# Keep compiled kernels between runs of the suite.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".numba_cache"))

# Triton reads this at import. On a GPU the same tests run compiled.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests that start Ray and whole jobs on real engines, kill them and wait for the result: one at a time.
REAL_ENGINES = (
    "tests/cluster/test_submit.py",
    "tests/benchmarks/test_job.py",
    "tests/faults/",
)
JOBS = (*REAL_ENGINES, "tests/job/dataflow/")
# The slowest files, up to a minute each, by their folders.
LONG = ("tests/job/", "tests/engine/", "tests/gpu/", "tests/kernels/", "tests/parity/", "tests/benchmarks/",
        "tests/docs/test_console.py")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests that one worker must run alone to the front, with those that compile kernels at their end: by then
    other tests have filled numba's cache. The other files run in parallel and afterwards, short ones last, so that all
    workers end at about the same time."""

    def priority(item: pytest.Item) -> tuple[bool, bool, bool]:
        name = item.nodeid
        return not name.startswith(JOBS), name.startswith(REAL_ENGINES), not name.startswith(LONG)

    items.sort(key=priority)


@pytest.hookimpl(optionalhook=True)  # a hook of xdist, which may be missing
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """Scheduler that keeps each file on one worker, which makes its fixtures once, and all of JOBS on one. Tests of
        `tests/gpu` on a GPU mostly compile kernels, so each of them is scheduled alone."""

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/gpu/") and "card, " in nodeid:
                return nodeid
            return "jobs" if nodeid.startswith(JOBS) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # it sorts by the number of tests, which tells little about their time
    return ByFile(config, log)


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """Restore the default action of SIGHUP during a test that sends one.

    A suite that was started with `nohup` ignores SIGHUP and so do its child processes, and a run leaves an ignored
    SIGHUP ignored.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def engines_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run engines of jobs in threads of this process (`engine_thread.py`)."""
    from tests.engine_thread import run_engines_in_threads

    run_engines_in_threads(monkeypatch)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return a function that runs the console script in this process and returns exit code, stdout and stderr."""
    from pipeline.cli import main as cli

    def call(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipeline", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "reconfigure", lambda **_: None, raising=False)
        code: object = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = leave.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return code, out, err

    return call
