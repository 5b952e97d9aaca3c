"""Names in backticks in docstrings and comments of the package that exist nowhere: see `tools/english.py`."""

import ast
import keyword
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

CITED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
MODULE = re.compile(r"(?:\w+/)*\w*\.py|(?:[a-z]\w*/)+")
NAME = re.compile(r"[A-Za-z_][\w./]*(?:\(\))?")
COMMENT = re.compile(r"(?:^|\s)# .*")
WORD = re.compile(r"[A-Za-z_]\w*")


def missing_names(paths: Sequence[Path], root: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and text of each cited name that is neither a file nor a folder of the project, nor made of the
    package's identifiers, their endings, and words of its text constants, such as keys of the job file."""
    parts = [path.relative_to(root).parts for path in paths]
    files = {"/".join(each[at:]) for each in parts for at in range(len(each))}
    folders = {"/".join(each[at:end]) + "/" for each in parts for end in range(1, len(each)) for at in range(end)}
    texts = {path: path.read_text() for path in paths if path.match("*.py") and path.is_relative_to(root / "pipeline")}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    known = {word for tree in trees.values() for word in words_of_code(tree)}.union(keyword.kwlist)
    endings = {word[at:] for word in known for at, letter in enumerate(word) if letter == "_"}
    for path, tree in trees.items():
        for number, line in prose_of(texts[path], tree):
            for text in CITED.findall(line):
                exists = text in files or text in folders
                if not MODULE.fullmatch(text):
                    exists |= not NAME.fullmatch(text) or {*WORD.findall(text)} <= known or text in endings
                if not exists:
                    yield path, number, text


def words_of_code(tree: ast.Module) -> Iterator[str]:
    """Yield the identifiers of a module, and the words of its text constants without spaces."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and (field != "value" or " " not in value):
                yield from WORD.findall(value)


def prose_of(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the lines of a module's comments and of its string statements: docstrings, and texts after a field."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)
    for number, line in enumerate(text.splitlines(), 1):
        if comment := COMMENT.search(line):
            yield number, comment[0]
