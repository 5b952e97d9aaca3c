"""Settings of the whole suite that must be made before torch is imported, the order of tests on several workers, and a
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

# The models of the tests are tiny: a second thread saves nothing, and on a busy machine waiting for it costs a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Engines of real jobs have two all the same; those that wait leave the processor to the other workers' tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What runs remember for `pipeline plan` is not the user's here.
os.environ.setdefault("PIPELINE_CACHE", tempfile.mkdtemp(prefix="pipeline-tests-"))
# Compiled kernels are kept from one run of the suite to the next.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".numba_cache"))

# Triton reads this when it is imported. Where there is a GPU the same tests run compiled, on it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests that start Rays and whole jobs on real engines, kill them and wait for what follows: one at a time.
REAL_ENGINES = (
    "tests/cluster/test_submit.py",
    "tests/bench/test_job.py",
    "tests/docs/test_console.py",
    "tests/faults/",
)
JOBS = (*REAL_ENGINES, "tests/job/dataflow/")
# Where the files are that take longest, up to a minute each.
LONG = ("tests/job/", "tests/engine/", "tests/gpu/", "tests/kernels/", "tests/parity/", "tests/bench/",
        "tests/benchmarks/")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what one worker must do alone, and at its end those tests whose engines compile kernels: by then other
    tests have put these into numba's cache. The other files run beside it and after it, short ones last, so that no
    worker ends long before the other."""

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        name = item.nodeid
        return not name.startswith(JOBS), name.startswith(REAL_ENGINES), not name.startswith(LONG)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # of xdist, which a single file does without
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """A file stays on one worker, which makes its fixtures once, and all of JOBS on one too. On a GPU most of a
        test is compiling its kernels: there each test of `tests/gpu` runs on its own."""

        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/gpu/") and "card, " in nodeid:
                return nodeid
            return "jobs" if nodeid.startswith(JOBS) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # by the number of tests, which says little of their time
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
def pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the console script in this process: exit code, standard output, standard error."""
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
