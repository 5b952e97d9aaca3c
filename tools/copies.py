"""Copy the package's presets to configs/, and the example job to jobs/, or list stale copies:

python -m tools.copies [--check]
"""

from pathlib import Path

from pipeline.demo.example import JOB
from pipeline.presets import FOLDER, NAMES
from tools.generated import ROOT, check_or_write


def files() -> dict[Path, str]:
    """Return every copied text with its current content."""
    copies = {ROOT / "configs" / f"{name}.yaml": FOLDER / f"{name}.yaml" for name in NAMES}
    copies[ROOT / "jobs" / "summarize.yaml"] = JOB
    return {copy: original.read_text(encoding="utf-8") for copy, original in copies.items()}


if __name__ == "__main__":
    check_or_write(files(), "tools.copies")
