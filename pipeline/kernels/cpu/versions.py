"""Which sources a compiled kernel is made of. No torch.

numba keeps compiled functions on disk. It compiles them anew when the file changes in which they stand, but not when
another one does whose functions or constants they use. So their names say which version of those files they have.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., None])


def made_of(*files: str) -> Callable[[Function], Function]:
    """A decorator below that of numba: the function uses what stands in these files of this folder."""

    def named(function: Function) -> Function:
        function.__qualname__ += f"-{version_of(files)}"
        return function

    return named


@cache
def version_of(files: tuple[str, ...]) -> str:
    contents = ((Path(__file__).parent / name).read_bytes() for name in files)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:12]
