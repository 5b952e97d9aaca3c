"""Cache folders for a user without rights: homes, temporary folders and variables of many kinds."""

import importlib.util
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from pipeline.checkpoints.locate import model_kind
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.errors import EnvironmentFailed
from pipeline.kernels.select import keep_cpu_kernels_in, keep_gpu_kernels_in
from pipeline.machine.caches import cache_root, cpu_kernel_folder, gpu_kernel_folder, hub_folder, write_problem

IS_ROOT = os.getuid() == 0
OTHER = 54321 if IS_ROOT else os.getuid()  # a user id without a name
NAME = "parquet-batch-inference"


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as created:
        os.chmod(created, 0o755)
        yield Path(created)


def folder(path: Path, mode: int = 0o755, owner: int = OTHER) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if IS_ROOT:
        os.chown(path, owner, owner)
    path.chmod(mode)
    return path


def as_other_user(call: Callable[[], Any]) -> Any:
    """Return or raise what `call` does in a fork with the rights of `OTHER` only."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            if IS_ROOT:
                os.setgroups([])
                os.setresgid(OTHER, OTHER, OTHER)
                os.setresuid(OTHER, OTHER, OTHER)
            tempfile.tempdir = None  # Python remembers it
            try:
                found = call()
            except BaseException as error:
                found = error
            with open(writing, "wb") as out:
                pickle.dump(found, out)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        found = pickle.load(answer)
    os.waitpid(child, 0)
    if isinstance(found, BaseException):
        raise found
    return found


HOMES = {
    "writable": lambda at: folder(at),
    "read-only": lambda at: folder(at, 0o555),
    "of another user": lambda at: folder(at, 0o755, 0),
    "closed": lambda at: folder(at, 0o700, 0),
    "a file": lambda at: (at.write_text("") and at) or at,
    "missing": lambda at: folder(at.parent / "closed", 0o555) / "home",
    "relative": lambda at: Path("home"),
    "the root": lambda at: Path("/"),
    "unset": lambda at: None,
}
TEMPORARY = {
    "shared": lambda at: folder(at, 0o1777, 0),
    "made before": lambda at: folder(folder(at, 0o1777, 0) / f"{NAME}-{OTHER}", 0o700).parent,
    "planted": lambda at: folder(folder(at, 0o1777, 0) / f"{NAME}-{OTHER}", 0o777, 0).parent,
    "open to others": lambda at: folder(folder(at, 0o1777, 0) / f"{NAME}-{OTHER}", 0o777).parent,
    "a link": lambda at: linked(folder(at, 0o1777, 0)),
}
NEEDS_ROOT = {"of another user", "closed", "unset", "the root", "planted"}
HOSTILE = {"planted", "open to others", "a link"}


def linked(at: Path) -> Path:
    (at / f"{NAME}-{OTHER}").symlink_to(folder(at.parent / "elsewhere"))
    return at


@pytest.mark.parametrize("named", [False, True])
def test_where_caches_are_kept(shared_folder, monkeypatch, named):
    """All pairs of homes and temporary folders; `PIPELINE_CACHE` wins over both."""
    seen = set()
    for home_kind, make_home in HOMES.items():
        for kind, make_temporary in TEMPORARY.items():
            if not IS_ROOT and {home_kind, kind} & NEEDS_ROOT:
                continue
            at = folder(shared_folder / f"{home_kind}, {kind}")
            home, temporary = make_home(at / "home"), make_temporary(at / "tmp")
            monkeypatch.delenv("HOME", raising=False)
            if home is not None:
                monkeypatch.setenv("HOME", str(home))
            monkeypatch.setenv("TMPDIR", str(temporary))
            environ = {"PIPELINE_CACHE": str(at / "named")} if named else {}

            def find(environ=environ, at=at) -> tuple[Path, Path, Path | None, list[str]]:
                os.chdir(at)
                notes: list[str] = []
                found = cache_root(environ, notes.append), cpu_kernel_folder(environ), hub_folder(environ), notes
                assert named or write_problem(found[1]) == ""
                return found

            case = f"{home_kind}, {kind}"
            if named:
                root, *_, notes = as_other_user(find)
                assert (root, notes) == (at / "named", []), case
                seen.add("named")
            elif home_kind == "writable":
                assert as_other_user(find) == (home / ".cache" / NAME, home / ".cache" / NAME / "numba", None, []), case
                seen.add("home")
            elif kind in HOSTILE:
                with pytest.raises(EnvironmentFailed, match=r"Cannot write compiled kernels .* set PIPELINE_CACHE to"):
                    as_other_user(find)
                seen.add("refused")
            else:
                own = temporary / f"{NAME}-{OTHER}"
                root, kernels, hub, notes = as_other_user(find)
                assert (root, kernels, hub) == (own, own / "numba", own / "huggingface"), case
                assert own.stat().st_mode & 0o777 == 0o700, case
                (note,) = notes
                assert str(own) in note
                assert "set PIPELINE_CACHE" in note
                seen.add("temporary")
    assert seen == ({"named"} if named else {"home", "temporary", "refused"})


def test_a_variable_of_one_kind_of_files_wins(monkeypatch):
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("TMPDIR", "/dev/null")
    given = {"PIPELINE_CACHE": "/big", "NUMBA_CACHE_DIR": "/own/numba", "TRITON_CACHE_DIR": "own", "HF_HOME": "/hub"}
    assert cpu_kernel_folder(given) == Path("/own/numba")
    assert gpu_kernel_folder(given) == Path("own").absolute()
    assert hub_folder(given) is None
    assert cpu_kernel_folder({"PIPELINE_CACHE": "~no-such-user/x"}).name == "numba", "no error of Python's own"


def test_a_full_disk_is_not_writable(tmp_path, monkeypatch):
    full = MagicMock()
    full.return_value.__enter__.return_value.write.side_effect = OSError(28, "No space left on device")
    full.return_value.__exit__.return_value = None
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert write_problem(tmp_path) == "No space left on device"


def test_kernels_that_cannot_be_kept_are_the_environment_s_failure(tmp_path, monkeypatch):
    """A folder that a variable names is not replaced; the engine ends before it loads anything."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "numba"))
    with pytest.raises(EnvironmentFailed, match=r"file/numba: .*set PIPELINE_CACHE or NUMBA_CACHE_DIR"):
        Engine(EngineConfig("demo", num_threads=1))
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 255)))
    with pytest.raises(EnvironmentFailed, match=r"noexec.* set PIPELINE_CACHE or TRITON_CACHE_DIR"):
        keep_gpu_kernels_in(tmp_path / "triton")


@pytest.mark.skipif(not IS_ROOT, reason="needs a folder of another user")
def test_a_kernel_folder_in_which_another_user_compiled(shared_folder):
    folder(folder(shared_folder / "numba", 0o777, 0) / "attention_0123", 0o755, 0)
    with pytest.raises(EnvironmentFailed, match="attention_0123 in it is not writable"):
        as_other_user(lambda: keep_cpu_kernels_in(shared_folder / "numba"))


def test_numba_keeps_kernels_in_the_folder_that_was_chosen(tmp_path, monkeypatch):
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    keep_cpu_kernels_in(tmp_path / "kept")
    (tmp_path / "double.py").write_text("import numba\n\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("double", tmp_path / "double.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.double(2) == 4
    assert Path(module.double.stats.cache_path).is_relative_to(tmp_path / "kept")
    assert list((tmp_path / "kept").rglob("*.nbi"))


@pytest.mark.skipif(not IS_ROOT, reason="needs a folder of another user")
def test_a_model_in_a_folder_that_this_user_may_not_enter(shared_folder):
    folder(shared_folder / "closed" / "model", 0o755, 0)
    folder(shared_folder / "closed", 0o700, 0)
    assert as_other_user(lambda: model_kind(str(shared_folder / "closed" / "model"))) == "missing"


def test_without_a_temporary_folder_a_command_names_the_variable_to_set(monkeypatch, pipe):
    """Simulate `docker run --read-only`, where libraries raise when they are imported."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    code, _, err = pipe("doctor")
    assert code == 3
    assert "['/proc']" in err
    assert "set TMPDIR" in err
