"""Versions of compiled kernels, by the sources they are compiled from. Does not import torch.

numba caches compiled functions on disk. It recompiles a function when its own file changes, but not when another file
changes whose functions or constants it uses. So the name of a kernel ends in a hash of all its sources.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., None])

_ROOT = Path(__file__).parents[4]
_IMPORT = re.compile(r"^from (pipeline\.(?:kernels|engine\.drafts\.lookup)[\w.]*) import (.*)$", re.MULTILINE)


def made_of_imports(function: Function) -> Function:
    """Decorate a function, below numba's decorator: add a hash of its file and imported kernel sources to its name."""
    files = tuple(sorted(sources_of(Path(function.__code__.co_filename))))
    function.__qualname__ += f"-{version_of(files)}"
    return function


@cache
def sources_of(file: Path) -> frozenset[Path]:
    """Return the file and the modules of `pipeline.kernels` and of lookup that it imports, directly or indirectly."""
    found, left = {file}, [file]
    while left:
        for module, names in _IMPORT.findall(left.pop().read_text()):
            base = _ROOT / module.replace(".", "/")
            candidates = {base.with_suffix(".py"), *(base / f"{name}.py" for name in re.findall(r"\w+", names))}
            new = {path for path in candidates if path.is_file()} - found
            found |= new
            left += new
    return frozenset(found)


@cache
def version_of(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
