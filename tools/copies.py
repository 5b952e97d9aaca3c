"""Copy the package's presets to configs/ and the example job to jobs/, and list the pages in llms.txt; or list stale
files:

    python -m tools.copies [--check]
"""

import re
from pathlib import Path

from pipeline.demo.example import JOB
from pipeline.presets import FOLDER, NAMES
from tools.generated import ROOT, check_or_write

_SENTENCE = re.compile(r"(?<=[a-z)`]{2})[.:](?=\s|$)")


def files() -> dict[Path, str]:
    """Return every file with its current content."""
    copies = {ROOT / "configs" / f"{name}.yaml": FOLDER / f"{name}.yaml" for name in NAMES}
    copies[ROOT / "jobs" / "summarize.yaml"] = JOB
    found = {copy: original.read_text(encoding="utf-8") for copy, original in copies.items()}
    return found | {ROOT / "llms.txt": pages()}


def pages() -> str:
    """Return the list of all pages, each with its first sentence."""
    head = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    lines = [head[0], "", f"> {head[1].strip('*')}", "", "## Pages", ""]
    for page in sorted((ROOT / "docs").glob("*.md")):
        title, *texts = page.read_text(encoding="utf-8").split("\n\n")
        first = " ".join(next(text for text in texts if text[0] not in "#`!<|").split())
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", _SENTENCE.split(first)[0])
        lines.append(f"- [{title.removeprefix('# ').strip()}](docs/{page.name}): {plain}")
    return "\n".join(
        [*lines, "- [For coding agents](AGENTS.md): how to run jobs for a user, and to change the code", ""]
    )


if __name__ == "__main__":
    check_or_write(files(), "tools.copies")
