"""Draw `docs/pictures/pipeline.svg`: the path of rows from Parquet to Parquet, for light and dark pages.

python -m tools.picture
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "pipeline.svg"
WIDTH, HEIGHT = 924, 332
TOP, BOTTOM = 62, 236  # of the area between the headings and the notes

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.head { font-size: 15px; font-weight: 600 }
.note { font-size: 12px; fill: #57606a }
.box { fill: #f6f8fa; stroke: #8c959f }
.unit { fill: #54aeff; stroke: none }
.done { fill: #4ac26b; stroke: none }
.engine { fill: #fff8c5; stroke: #bf8700 }
.way { stroke: #57606a; fill: none; stroke-width: 1.5 }
.back { stroke: #57606a; fill: none; stroke-width: 1.5; stroke-dasharray: 5 4 }
.tip { fill: #57606a }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .note { fill: #9198a1 }
  .box { fill: #212830; stroke: #656c76 }
  .unit { fill: #388bfd }
  .done { fill: #2ea043 }
  .engine { fill: #2e2a1f; stroke: #9e6a03 }
  .way, .back { stroke: #9198a1 }
  .tip { fill: #9198a1 }
}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'


def arrow(x: float, to: float, y: float = (TOP + BOTTOM) / 2) -> str:
    tip = f'<path class="tip" d="M{to:g} {y:g} l-8 -4.5 v9 z"/>'
    return f'<path class="way" d="M{x:g} {y:g} H{to - 7:g}"/>{tip}'


def column(x: float, head: str, *notes: str) -> Iterator[str]:
    """Draw a stage's heading and the notes below it."""
    yield text(x, 40, head, "head")
    for line, note in enumerate(notes):
        yield text(x, BOTTOM + 24 + 17 * line, note, "note")


def files(x: float, labels: list[str]) -> Iterator[str]:
    """Draw Parquet files as tables of a few rows, one below the other."""
    for i, label in enumerate(labels):
        y = TOP + 6 + 58 * i
        yield box(x, y, 124, 46)
        for line in (16, 31):
            yield f'<path class="way" stroke-opacity=".35" d="M{x:g} {y + line:g} h124"/>'
        yield text(x + 62, y + 28, label)


def windows(x: float) -> Iterator[str]:
    """Draw windows of rows with prompts of mixed lengths."""
    for i in range(2):
        y = TOP + 6 + 88 * i
        yield box(x, y, 104, 74)
        for row, width in enumerate((60, 24, 84, 36, 72)):
            yield box(x + 10, y + 9 + 12 * row, width, 7, "unit")


def units(x: float) -> Iterator[str]:
    """Draw units, each with rows of similar lengths, the longest first."""
    for i, width in enumerate((84, 72, 60, 36, 24)):
        y = TOP + 4 + 35 * i
        yield box(x, y, 104, 27)
        for row in range(2):
            yield box(x + 10, y + 6 + 10 * row, width - 8 * row, 6, "unit")


def engines(x: float) -> Iterator[str]:
    for i in range(2):
        y = TOP + 2 + 88 * i
        yield box(x, y, 168, 82, "engine")
        yield text(x + 84, y + 22, f"engine {i}", "head")
        yield text(x + 84, y + 43, "continuous batching")
        yield text(x + 84, y + 62, "paged KV cache, drafts")


def parts(x: float) -> Iterator[str]:
    for i in range(4):
        y = TOP + 4 + 34 * i
        yield box(x, y, 188, 27)
        yield box(x + 10, y + 8, 11, 11, "done")
        yield text(x + 32, y + 18, f"part-...-u{i:04}.parquet", anchor="start")
    for i, name in enumerate(("_SUCCESS", "report.md")):
        yield box(x + 98 * i, TOP + 144, 90, 27, "done")
        yield text(x + 98 * i + 45, TOP + 162, name)


def picture() -> str:
    """Return the whole drawing as SVG."""
    drawn = [
        *column(86, "Parquet", "a disk or S3,", "any columns"),
        *files(24, ["rows", "rows", "rows"]),
        arrow(154, 186),
        *column(246, "windows", "read as a whole,", "the same in every run"),
        *windows(194),
        arrow(304, 336),
        *column(396, "units", "similar prompts together,", "one unit, one part"),
        *units(344),
        arrow(454, 486),
        *column(580, "engines", "each in its own process,", "restarted after a crash"),
        *engines(496),
        arrow(670, 702),
        *column(806, "parts", "each written atomically, once;", "then _SUCCESS and the cost"),
        *parts(712),
        f'<path class="back" d="M806 {BOTTOM + 50} V{BOTTOM + 72} H396 V{BOTTOM + 58}"/>',
        f'<path class="tip" d="M396 {BOTTOM + 50} l-4.5 8 h9 z"/>',
        text(601, BOTTOM + 88, "after an interruption, only units without a part are computed again", "note"),
    ]
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    title = "Parquet files are read in windows, cut into units, computed by engines, and written as parts"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
    return "\n".join([head, f"<style>{STYLE}</style>", *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(picture(), encoding="utf-8")
