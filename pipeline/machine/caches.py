"""Folders that outlive a run: compiled kernels, downloaded models, figures of earlier runs.

A variable of one kind of files wins (`NUMBA_CACHE_DIR`, `TRITON_CACHE_DIR`). Everything else is below one root:
`$PIPELINE_CACHE`, else the cache in the user's home, else, where that cannot be written, a folder of this user alone
below the temporary one. A folder that a variable names is never replaced by another.
"""

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.errors import EnvironmentFailed

NAME = "parquet-batch-inference"
_HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
_PROBE = bytes(1 << 16)  # a full disk still takes the name of a new file


def _silent(text: str) -> None:
    pass


def cache_root(environ: Mapping[str, str] = os.environ, say: Callable[[str], None] = _silent) -> Path:
    """Find the root of all caches. One that `PIPELINE_CACHE` names need not exist and may refuse to be written.

    say: receives why the root is a temporary one. Raises EnvironmentFailed where no folder can be written.
    """
    if named := environ.get("PIPELINE_CACHE"):
        return _absolute(named)
    home = Path(os.path.expanduser("~")) / ".cache" / NAME
    home_problem = _why_not_in_home(home)
    if not home_problem:
        return home
    temporary, problem = _own_temporary_folder()
    if problem:
        raise EnvironmentFailed(
            f"No folder can be written for compiled kernels and models: neither {home} ({home_problem}) nor "
            f"{temporary} ({problem}); set PIPELINE_CACHE to a folder that can be written"
        )
    say(
        f"{home} cannot be written ({home_problem}): compiled kernels and models are kept in {temporary}; set "
        "PIPELINE_CACHE to a folder that lasts longer"
    )
    return temporary


def cpu_kernel_folder(environ: Mapping[str, str] = os.environ, say: Callable[[str], None] = _silent) -> Path:
    """Return the folder of compiled CPU kernels: `$NUMBA_CACHE_DIR`, numba's own variable, else below the root."""
    own = environ.get("NUMBA_CACHE_DIR")
    return _absolute(own) if own else cache_root(environ, say) / "numba"


def gpu_kernel_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of compiled GPU kernels: `$TRITON_CACHE_DIR`, Triton's own variable, else below the root."""
    own = environ.get("TRITON_CACHE_DIR")
    return _absolute(own) if own else cache_root(environ) / "triton"


def hub_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of models from Hugging Face. None: its library's own, which programs share."""
    own = Path(os.path.expanduser("~/.cache/huggingface/hub"))
    if any(environ.get(name) for name in _HUB_VARIABLES) or os.path.isdir(own) or not _why_not_in_home(own):
        return None
    return cache_root(environ) / "huggingface"


def check_temporary_folder() -> None:
    """Raise EnvironmentFailed where no temporary folder can be written, which libraries want when they are imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise EnvironmentFailed(
            f"{error.strerror}; mount one there (`docker run --tmpfs /tmp`), or set TMPDIR to a folder that can be "
            "written"
        ) from None


def write_problem(folder: Path) -> str:
    """Create the folder where it is missing and a file in it. Return the system's reason where that fails, else ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _why_not_in_home(folder: Path) -> str:
    if not folder.is_absolute():  # HOME is relative, or neither it nor the system's list of users names a home
        return "no home directory"
    return write_problem(folder)


def _own_temporary_folder() -> tuple[Path, str]:
    """A folder below the temporary one, and why it cannot be used.

    Kernels are loaded from it as code, and in a shared /tmp anybody may have created a folder of this name.
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
