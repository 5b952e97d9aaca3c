"""`python -m tools.performance [--check]`: writes the tables and plots, or says which are stale."""

from pathlib import Path

from tools.generated import ROOT, check_or_write
from tools.performance.plots import PLOTS
from tools.performance.results import load
from tools.performance.tables import performance_page, scale_page

PAGE = ROOT / "docs" / "performance.md"
SCALE = ROOT / "docs" / "scale.md"
FOLDER = ROOT / "docs" / "performance"


def files() -> dict[Path, str]:
    """Every file that is generated, with what it has to hold now."""
    results = load(FOLDER / "results")
    made = {
        PAGE: performance_page(PAGE.read_text(encoding="utf-8"), results, FOLDER / "aims.json"),
        SCALE: scale_page(SCALE.read_text(encoding="utf-8"), results),
    }
    return made | {FOLDER / "plots" / f"{name}.svg": plot(results) for name, plot in PLOTS.items()}


if __name__ == "__main__":
    check_or_write(files(), "tools.performance")
