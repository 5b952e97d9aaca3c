"""Copy the package's presets to configs/, or list stale copies: `python -m tools.presets [--check]`."""

from pathlib import Path

from pipeline.presets import FOLDER, NAMES
from tools.generated import ROOT, check_or_write


def files() -> dict[Path, str]:
    """Return every copy with its current content."""
    return {ROOT / "configs" / f"{name}.yaml": (FOLDER / f"{name}.yaml").read_text(encoding="utf-8") for name in NAMES}


if __name__ == "__main__":
    check_or_write(files(), "tools.presets")
