"""Settings of the whole suite, which must be made before torch is imported, and the command line in this process."""

import io
import os
import sys
from pathlib import Path

import pytest

# The models of the tests are tiny: a second thread saves nothing, and on a busy machine waiting for it costs a lot.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton reads this when it is imported. Where there is a GPU the same tests run compiled, on it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the console script in this process: exit code, standard output, standard error."""
    from pipeline import cli

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
