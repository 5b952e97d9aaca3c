"""Folders that outlive a run: compiled kernels, downloaded models, measurements of earlier runs.

The variable of one kind of files takes precedence (`NUMBA_CACHE_DIR`, `TRITON_CACHE_DIR`). Everything else is below one
root: `$PIPELINE_CACHE`, else the cache in the user's home, else, if that is not writable, a private folder of this user
below the temporary folder. A folder that a variable names is never replaced by another one.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.errors import EnvironmentFailed

NAME = "parquet-batch-inference"
_HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
_PROBE = bytes(1 << 16)  # on a full disk an empty file can still be created


def _silent(text: str) -> None:
    pass


def cache_root(environ: Mapping[str, str] = os.environ, log: Callable[[str], None] = _silent) -> Path:
    """Return the root of all caches. A root that `PIPELINE_CACHE` names may be missing or read-only.

    log: receives the reason for a temporary root. Raises EnvironmentFailed if no folder is writable.
    """
    if named := environ.get("PIPELINE_CACHE"):
        return _absolute(named)
    home = Path(os.path.expanduser("~")) / ".cache" / NAME
    home_problem = _home_problem(home)
    if not home_problem:
        return home
    temporary, problem = _private_temporary_folder()
    if problem:
        raise EnvironmentFailed(
            f"Cannot write compiled kernels and models: neither {home} ({home_problem}) nor {temporary} ({problem}) is "
            "writable; set PIPELINE_CACHE to a writable folder"
        )
    log(
        f"{home} is not writable ({home_problem}): compiled kernels and models are kept in {temporary}; set "
        "PIPELINE_CACHE to a permanent folder"
    )
    return temporary


def cpu_kernel_folder(environ: Mapping[str, str] = os.environ, log: Callable[[str], None] = _silent) -> Path:
    """Return the folder of compiled CPU kernels: `$NUMBA_CACHE_DIR`, numba's own variable, else below the root."""
    own = environ.get("NUMBA_CACHE_DIR")
    return _absolute(own) if own else cache_root(environ, log) / "numba"


def gpu_kernel_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of compiled GPU kernels: `$TRITON_CACHE_DIR`, Triton's own variable, else below the root."""
    own = environ.get("TRITON_CACHE_DIR")
    return _absolute(own) if own else cache_root(environ) / "triton"


def hub_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of models from Hugging Face; None for the default of its library, which programs share."""
    own = Path(os.path.expanduser("~/.cache/huggingface/hub"))
    if any(environ.get(name) for name in _HUB_VARIABLES) or os.path.isdir(own) or not _home_problem(own):
        return None
    return cache_root(environ) / "huggingface"


def check_temporary_folder() -> None:
    """Raise EnvironmentFailed if no temporary folder is writable: some libraries need one when they are imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise EnvironmentFailed(
            f"{error.strerror}; mount one there (`docker run --tmpfs /tmp`), or set TMPDIR to a writable folder"
        ) from None


def write_problem(folder: Path) -> str:
    """Create `folder` if it is missing, and a file in it. Return the system's error message if that fails, else ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _home_problem(folder: Path) -> str:
    if not folder.is_absolute():  # HOME is relative, or neither HOME nor the user database names a home
        return "no home directory"
    return write_problem(folder)


def _private_temporary_folder() -> tuple[Path, str]:
    """Return a folder below the temporary one, and the reason why it cannot be used ("" if it can).

    Kernels are loaded from it as code, and in a shared /tmp any user may have created a folder of this name.
    """
    check_temporary_folder()
    folder = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        return folder, error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return folder, "not a folder of this user"
    if found.st_mode & 0o022:
        return folder, "other users may write in it"
    return folder, write_problem(folder)
