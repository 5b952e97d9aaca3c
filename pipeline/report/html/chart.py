"""A chart as a piece of SVG that stands in a page: as wide as a phone, in the colours of the page.

matplotlib draws with stand-in colours, which are then replaced by the page's CSS variables, so that one drawing serves
a dark page and a light one. Text stays text.
"""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GRID = "#010101", "#020202"
SERIES = ("#0a0101", "#0a0202", "#0a0303")  # of at most three; each also has a line style and a hatch
STYLES, HATCHES = ("-", "--", ":"), ("", "////", "....")
_VARIABLES = {INK: "--ink", GRID: "--grid"} | {colour: f"--series-{i}" for i, colour in enumerate(SERIES, 1)}
WIDTH_IN, HEIGHT_IN = 3.6, 2.3
_SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 8,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a dollar in a name is a dollar
}


@dataclass(frozen=True)
class Chart:
    """title: what it shows; says: its finding in words, for those who do not see it."""

    name: str
    title: str
    says: str
    svg: str


def chart(name: str, title: str, says: str, draw: Callable[[Axes], None], height_in: float = HEIGHT_IN) -> Chart:
    """`draw` gets empty axes. name: distinguishes the chart in its page."""
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": name}):  # pyright: ignore[reportArgumentType]  # a dict of any values
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return Chart(name, title, says, _for_page(out.getvalue(), name))


def _for_page(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)
