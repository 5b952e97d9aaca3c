"""Check the language of code, messages and pages: the words of the field, and one name for one class.

    python -m tools.english              list every hit that is not allowed; exit code 1 if there are any
    python -m tools.english --counts     count the hits of each rule, allowed ones too
    python -m tools.english --messages   print fifty texts that users see, picked at random, to be read

A rule is a regular expression. It applies to whole lines, to the first words of docstrings, or to the names that the
code defines (words like `where` are fine in sentences, and in `np.where`). Names in backticks must exist
(`tools/cited_names.py`). `tools/english_allowed.txt` lists the exceptions, each with its reason.
"""

import ast
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.cited_names import missing_names

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "tools" / "english_allowed.txt"
OUTSIDE = ("benchmarks/log/", "benchmarks/results/", "tools/english", "schemas/", "jobs/job.schema.json")
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".jinja", ".cfg", ".sh", ".ipynb", ".patch", ".cff", ".txt"}

# Everywhere in code, help texts, messages and pages
WORDS = {
    r"told(?![a-z])": "passed, logged, reported, known",
    r"\bbeside\b": "next to, with",
    r"\bso many\b": "n, up to n",
    r"\bas many as\b": "up to n, the same number of",
    r"\b(no|some)body\b": "no sequence, the caller",
    r"\bwhoever\b": "the caller, which, anyone who",
    r"(?<!at )(?<!\.)(?<![a-z])(most|least|fewest)_(?!common\b|recent|significant)": "max_, min_",
    r"\breckon": "compute, estimate",
    r"\bdearer\b": "more expensive",
    r"\b(goes|go|went|going) on\b": "continue, resume, proceed",
    r"\b(lets|let|letting) go of\b": "free, release",
    r"\btakes? after\b": "resemble",
    r"\bin the place of\b": "instead of, replaces",
    r"\bat hand\b": "available",
    r"\b(stands|stood)\b": "is at, is written, is",
    r"\blies\b": "is, is at, is stored",
    r"\bof (its|their|your|our) own accord\b": "unprompted",
    r"\b(is|are|was|were) (away|gone)\b": "is missing, was removed, exited",
    r"\bthis program\b": "pipeline",
    r"\bhas to be\b": "must be",
}
# The first words of a docstring
OPENINGS = {
    r"(Of|Whose|Both|That|As|With|In|By|For|From|At|On|To|Into|Until|So|Such)\b": "begin with a verb or a noun phrase",
    r"(What|Who|Where|When|Whether|Which|How|Why)\b": "begin with a verb or a noun phrase",
}
# A whole word of a name that the code defines: functions but tests, classes, arguments, variables, attributes
NAMES = {
    r"(say|says|said|tell|tells|asked|asks|ask)": "log, report, request",
    r"(where|whither|whence)": "attn_metadata, index, device, condition",
    r"(how|why|what|who|whose)": "params, reason",
    r"(take|takes|taken|took)": "consume, append, pop",
    r"(place|places)": "index, position, device",
    r"(about|there|beside|stood)": "settings, existing",
}
CONSTRUCTOR = "of"
CLASSES = "two classes of one name"
CITED = "cited name"


class Hit(NamedTuple):
    path: str
    line_number: int
    rule: str
    advice: str
    line: str

    def to_text(self) -> str:
        return f"{self.path}:{self.line_number}: {self.rule} ({self.advice}): {self.line.strip()}"


def tracked_files() -> list[Path]:
    """Return the text files of the project that people read."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.splitlines() if not name.startswith(OUTSIDE)]
    return [path for name in names if (path := ROOT / name).suffix in SUFFIXES and path.is_file()]


def hits_of_file(path: Path) -> Iterator[Hit]:
    name, text = str(path.relative_to(ROOT)), path.read_text()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        for rule, advice in WORDS.items():
            if re.search(rule, line, re.IGNORECASE):
                yield Hit(name, number, rule, advice, line)
    if path.suffix == ".py":
        tree = ast.parse(text)
        for number, opening in docstrings(tree):
            for rule, advice in OPENINGS.items():
                if re.match(rule, opening):
                    yield Hit(name, number, f"^{rule}", advice, opening)
        seen = set()
        for number, identifier in defined_names(tree):
            if identifier == CONSTRUCTOR:
                yield Hit(name, number, CONSTRUCTOR, "from_...", lines[number - 1])
            if identifier.startswith("test_"):
                continue
            for rule, advice in NAMES.items():
                if (identifier, rule) not in seen and re.search(rf"(^|_){rule}(_|$)", identifier.lower()):
                    seen.add((identifier, rule))
                    yield Hit(name, number, f"_{rule}_", advice, identifier)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and isinstance(node.body[0], ast.Expr):
                yield node.body[0].lineno, text.splitlines()[0]


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def repeated_classes(paths: list[Path]) -> Iterator[Hit]:
    places = defaultdict(list)
    for path in paths:
        name = str(path.relative_to(ROOT))
        if name.startswith("pipeline/") and path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append((name, node.lineno))
    for class_name, found in places.items():
        for name, number in found if len(found) > 1 else []:
            yield Hit(name, number, CLASSES, "a name of its own", class_name)


def cited_hits(paths: list[Path]) -> Iterator[Hit]:
    for path, number, name in missing_names(paths, ROOT):
        yield Hit(str(path.relative_to(ROOT)), number, CITED, "a name that exists", f"`{name}`")


def allowed_hits() -> list[tuple[str, str]]:
    """Return pairs of a path's beginning and a text of the line. A line of the file is `path: text  # reason`."""
    pairs = []
    for line in ALLOWED.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            entry, reason = line.rsplit("  # ", 1)
            path, text = entry.split(": ", 1)
            assert reason.strip(), f"{ALLOWED}: no reason in {line!r}"
            pairs.append((path, text))
    return pairs


def messages(path: Path) -> Iterator[str]:
    """Yield the texts that a product file shows to users: of exceptions, logs, printed lines, help and descriptions,
    with the formatted values as they are in the code."""
    if path.suffix != ".py" or path.relative_to(ROOT).parts[0] != "pipeline":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            given = [*node.args[:1], *(each.value for each in node.keywords if each.arg in ("help", "description"))]
            yield from (ast.unparse(value) for value in given if _is_sentence(value))


def _is_sentence(value: ast.expr) -> bool:
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    return sum(str(part.value).count(" ") for part in parts if isinstance(part, ast.Constant)) >= 4


def main() -> int:
    paths = tracked_files()
    if "--messages" in sys.argv:
        found = [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in messages(path)]
        for text in random.sample(found, min(50, len(found))):
            print(text)
        return 0
    hits = [*(hit for path in paths for hit in hits_of_file(path)), *repeated_classes(paths), *cited_hits(paths)]
    if "--counts" in sys.argv:
        for rule, count in Counter(hit.rule for hit in hits).most_common():
            print(f"{count:6} {rule}")
        return 0
    allowed = allowed_hits()
    wrong = [hit for hit in hits if not any(hit.path.startswith(path) and text in hit.line for path, text in allowed)]
    for hit in wrong:
        print(hit.to_text())
    unused = [f"{p}: {t}" for p, t in allowed if not any(h.path.startswith(p) and t in h.line for h in hits)]
    for entry in unused:
        print(f"{ALLOWED.relative_to(ROOT)}: nothing matches {entry!r} any more; remove the line")
    if wrong or unused:
        print(f"{len(wrong)} hits, {len(unused)} unused exceptions")
    return int(bool(wrong or unused))


if __name__ == "__main__":
    sys.exit(main())
