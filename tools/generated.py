"""Write generated files, or list those that are stale with `--check`."""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def stale(files: Mapping[Path, str]) -> list[str]:
    """Return the paths of missing or outdated files, relative to the repository's root."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def check_or_write(files: Mapping[Path, str], module: str) -> None:
    """Write all files. With `--check` on the command line, exit with 1 if a file is stale instead."""
    if "--check" in sys.argv[1:]:
        if found := stale(files):
            sys.exit(f"stale: {', '.join(found)}; run `python -m {module}`")
        return
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
