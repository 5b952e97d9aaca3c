"""Pages, their fenced blocks and the commands in them, for the tests in this folder."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "infra/*.md", "pipeline/demo/*.md")
    for path in ROOT.glob(pattern)
)  # fmt: skip
LOG = ROOT / "benchmarks"  # commands of the past, for the version of their time

_FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the fenced blocks of all pages in these languages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            if match[2] in languages:
                found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[2], match[3]))
    return found


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a block: in `console` the lines after `$ `, in `sh` all. A quoted text may span lines."""
    open_quote = ""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console":
            if line.startswith("$ "):
                yield line[2:]
        elif open_quote or (line.strip() and not line.startswith("#")):
            try:
                yield shlex.join(shlex.split(open_quote + line, comments=True))
                open_quote = ""
            except ValueError:
                open_quote += line + "\n"
    assert not open_quote, f"{block}: a quote is never closed: {open_quote}"
