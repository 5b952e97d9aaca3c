"""Generated files: `--check` names those that do not hold what they have to; without it they are written."""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def stale(files: Mapping[Path, str]) -> list[str]:
    """The files, below the repository's root, that are missing or hold something else than they have to."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def check_or_write(files: Mapping[Path, str], module: str) -> None:
    """With `--check` on the command line, exit with 1 where a file is stale; without, write all of them."""
    if "--check" in sys.argv[1:]:
        if found := stale(files):
            sys.exit(f"stale: {', '.join(found)}; run `python -m {module}`")
        return
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
