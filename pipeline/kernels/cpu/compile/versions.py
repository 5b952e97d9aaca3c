"""Which sources a compiled kernel is made of. No torch.

numba keeps compiled functions on disk. It compiles a function again when its own file changes, but not when another
file changes whose functions or constants it uses. So a kernel's name ends in a hash of all its sources.
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., None])

_ROOT = Path(__file__).parents[4]
_IMPORT = re.compile(r"^from (pipeline\.kernels[\w.]*) import (.*)$", re.MULTILINE)


def made_of(*files: str) -> Callable[[Function], Function]:
    """A decorator below numba's: the function uses these files of the folder that it stands in."""

    def named(function: Function) -> Function:
        folder = Path(function.__code__.co_filename).parent
        return _with_version(function, [folder / name for name in files])

    return named


def made_of_imports(function: Function) -> Function:
    """A decorator below numba's: the function uses its own file and the kernel sources which that imports."""
    return _with_version(function, sources_of(Path(function.__code__.co_filename)))


def _with_version(function: Function, files: Iterable[Path]) -> Function:
    function.__qualname__ += f"-{version_of(tuple(sorted(files)))}"
    return function


@cache
def sources_of(file: Path) -> frozenset[Path]:
    """The file and the modules of `pipeline.kernels` that it imports from, directly or not."""
    found, left = {file}, [file]
    while left:
        for module, names in _IMPORT.findall(left.pop().read_text()):
            place = _ROOT / module.replace(".", "/")
            candidates = {place.with_suffix(".py"), *(place / f"{name}.py" for name in re.findall(r"\w+", names))}
            new = {path for path in candidates if path.is_file()} - found
            found |= new
            left += new
    return frozenset(found)


@cache
def version_of(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
