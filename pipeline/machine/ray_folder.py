"""The folder of a local Ray's sockets, logs and spilled objects. Does not import Ray, since `doctor` checks the folder
too."""

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.machine.caches import write_problem

MAX_SOCKET_BYTES = 107  # unix(7): sun_path, less its final zero
_LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # the largest process id is 2^22


def ray_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that Ray uses: below RAY_TMPDIR, else TMPDIR, else /tmp."""
    return Path(environ.get("RAY_TMPDIR", environ.get("TMPDIR", "/tmp"))) / "ray"


def ray_folder_problem(folder: Path) -> str:
    """Return why Ray cannot start in this folder and what to do, or ""."""
    exists = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    num_bytes = len(os.fsencode(folder / _LONGEST_SOCKET))
    if num_bytes > MAX_SOCKET_BYTES:
        reason = f"its socket paths would have {num_bytes} bytes; the limit is {MAX_SOCKET_BYTES}"
    elif not folder.is_absolute():
        reason = "not an absolute path"
    elif refused := write_problem(exists):  # Ray creates the rest, writable for all users
        reason = f"{exists} is not writable ({refused})"
    else:
        return ""
    return f"Ray cannot keep its files in {folder}: {reason}. Set RAY_TMPDIR to a short path that is writable"
