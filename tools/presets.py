"""`python -m tools.presets [--check]`: copies the package's presets to configs/, or says which copies are stale."""

from pathlib import Path

from pipeline.presets import FOLDER, NAMES
from tools.generated import ROOT, check_or_write


def files() -> dict[Path, str]:
    """Every copy, with what it has to hold."""
    return {ROOT / "configs" / f"{name}.yaml": (FOLDER / f"{name}.yaml").read_text(encoding="utf-8") for name in NAMES}


if __name__ == "__main__":
    check_or_write(files(), "tools.presets")
