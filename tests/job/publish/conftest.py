"""A finished output in two states, and the fake Hub."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.job.publish.fake_hub import FakeHub
from tests.job.publish.kills import two_states, use_fake_hub


@pytest.fixture(scope="package")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return an output with an engine's error row, and the same after --retry-failed."""
    return two_states(tmp_path_factory.mktemp("states"))


@pytest.fixture
def output(states: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return a copy of the first state, to be changed by a test."""
    return Path(shutil.copytree(states[0], tmp_path / "out"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before another try
    with FakeHub() as hub:
        use_fake_hub(hub.url, monkeypatch)
        yield hub
