"""`python -m tools.performance [--check]`: writes the tables and plots, or says which are stale."""

import sys
from pathlib import Path

from tools.performance.plots import PLOTS
from tools.performance.results import load
from tools.performance.tables import performance_page, scale_page

ROOT = Path(__file__).parents[2]
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


def stale() -> list[str]:
    """The generated files that are not as the results have them."""
    return [
        path.relative_to(ROOT).as_posix()
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        if found := stale():
            sys.exit(f"stale: {', '.join(found)}; run `python -m tools.performance`")
    else:
        for path, text in files().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
