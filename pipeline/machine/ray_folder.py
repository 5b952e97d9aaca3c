"""The folder in which a Ray on this machine keeps its sockets, logs and spilled objects. No Ray: `doctor` checks it,
too."""

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.machine.caches import write_problem

MAX_SOCKET_BYTES = 107  # unix(7): sun_path, less its final zero
_LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # process ids end at 2^22


def ray_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that Ray itself takes: below RAY_TMPDIR, else TMPDIR, else /tmp."""
    return Path(environ.get("RAY_TMPDIR", environ.get("TMPDIR", "/tmp"))) / "ray"


def ray_folder_problem(folder: Path) -> str:
    """Return why Ray cannot start in this folder and what to do; "" where it can."""
    exists = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    num_bytes = len(os.fsencode(folder / _LONGEST_SOCKET))
    if num_bytes > MAX_SOCKET_BYTES:
        reason = f"the path of its sockets would have {num_bytes} bytes and may have {MAX_SOCKET_BYTES}"
    elif not folder.is_absolute():
        reason = "not an absolute path"
    elif refused := write_problem(exists):  # Ray creates the rest, with rights for all users
        reason = f"{exists} cannot be written ({refused})"
    else:
        return ""
    return f"Ray cannot keep its files in {folder}: {reason}. Set RAY_TMPDIR to a short folder that can be written"
