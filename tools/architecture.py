"""Writes the tree of `docs/architecture.md` from the first sentence of every module's docstring.

python -m tools.architecture            # write it
python -m tools.architecture --check    # exit with 1 when it is stale
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree: python -m tools.architecture -->\n", "<!-- end of tree -->"
MAX_SENTENCE = 140  # characters of a line's description


def first_sentence(path: Path) -> str:
    """What a module's docstring says first, without its full stop. Empty where there is no docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    for mark in (". ", ": "):
        if len(paragraph) > MAX_SENTENCE or mark == ". ":
            paragraph = paragraph.split(mark)[0]
    return paragraph.removesuffix(".").removesuffix(":")


def tree(folder: Path, depth: int = 0) -> Iterator[str]:
    """A line for each folder and module of a package, files before folders."""
    pad = "  " * depth
    yield f"{pad}{folder.name + '/':<{max(24 - len(pad), 1)}}{first_sentence(folder / '__init__.py')}".rstrip()
    for module in sorted(folder.glob("*.py")):
        if module.name != "__init__.py":
            yield f"{pad}  {module.name:<{max(22 - len(pad), 1)}} {first_sentence(module)}"
    for package in sorted(folder.iterdir()):
        if (package / "__init__.py").exists():
            yield from tree(package, depth + 1)


def written(page: str) -> str:
    """The page with the tree as it is now between the two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(tree(ROOT / "pipeline"))
    return f"{before}{BEGIN}```\n{lines}\n```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
