"""Triton's compile cache, taken from machine to machine: a fresh one then compiles nothing that another did before.

Of each kernel only the binary and its metadata are kept; the listings of the compiler's stages, several times their
size, are read by nobody. Triton lists a kernel's files by absolute paths, which are those of the machine before and are
written anew.
"""

import json
import tarfile
from pathlib import Path

from pipeline.bench.gpu.session.packing import unpack
from pipeline.errors import ConfigError

FOLDER = "triton-cache"
LISTINGS = (".ttir", ".ttgir", ".llir", ".ptx", ".source", ".ttsource")
GROUP = "__grp__"


def drop_listings(cache: Path) -> None:
    """Remove the listings from a cache folder. Nothing may be compiling meanwhile."""
    for path in cache.rglob("*"):
        if path.suffix in LISTINGS and path.is_file():
            path.unlink()
    repoint(cache)


def repoint(cache: Path) -> None:
    """Let each group name the files that lie beside it, and no others. One without its binary or its metadata goes, or
    Triton would miss them when it loads the kernel."""
    for group in list(cache.rglob(f"{GROUP}*")):
        names = json.loads(group.read_text()).get("child_paths", {})
        there = {name: str(group.parent / name) for name in names if (group.parent / name).is_file()}
        if len({name.endswith(".json") for name in there}) < 2:
            group.unlink()
        elif there != names:
            group.write_text(json.dumps({"child_paths": there}))


def unpack_cache(archives: list[Path], work: Path) -> None:
    """Unpack a cache that another session left. Raises ConfigError for what is none."""
    for path in archives:
        try:
            unpack(path, work)
        except (OSError, tarfile.TarError) as error:
            raise ConfigError(
                f"--cache {path}: cannot be unpacked ({error}); expected {FOLDER}.tar.gz of a session"
            ) from None
    if not (work / FOLDER).is_dir():
        raise ConfigError(f"--cache {archives[0]}: holds no folder {FOLDER}; expected {FOLDER}.tar.gz of a session")
    repoint(work / FOLDER)
