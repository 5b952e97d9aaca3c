"""Table of `docs/performance.md` and plot `benchmarks/plots/engine.svg`, from `benchmarks/results/engine/`.

python -m tools.performance            # write them
python -m tools.performance --check    # exit with 1 when one is stale

A results file is the last line of `pipeline bench engine --json`. `what` may name the work in words. The plot is SVG
text, the same to the byte for the same results, and follows `prefers-color-scheme`.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from tools.generated import ROOT, check_or_write

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "engine"
PLOT = ROOT / "benchmarks" / "plots" / "engine.svg"
BEGIN, END = "<!-- table: engine -->\n", "<!-- end of table -->"
VECTORS = {"avx512_bf16": "AVX-512", "avx2": "AVX2"}  # the best one first
OTHERS = ("transformers.generate", "vllm", "openvino", "llama.cpp")
WIDTH, LEFT, BAR = 760, 130, 380
STYLE = """\
.page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 15px } .small { font-size: 12px } .muted { fill: #59636e }
.right { text-anchor: end } .bold { font-weight: 600 }
.a { fill: #0969da } .b { fill: #bc4c00 } .c { fill: #8c959f }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .muted { fill: #9198a1 }
.a { fill: #4493f8 } .b { fill: #e3893c } .c { fill: #7d8590 }
}"""
PANELS = {  # title -> result
    "float32": "2026-11-21-0.6b-float32",
    "bfloat16": "2026-11-22-0.6b-bfloat16",
    "AWQ int4": "2026-11-22-0.6b-awq-bfloat16",
}
BARS = {"this engine": ("a", "this engine"), "vllm": ("b", "vLLM, CPU build"), "transformers": ("c", "transformers")}


def load() -> dict[str, dict[str, Any]]:
    """Return the results by name, newest first. Raises ValueError for a file that is none."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("bench") != "engine" or not {"command", "machine", "date", "dtype", "speeds"} <= set(data):
            raise ValueError(f"{path}: expected the last line of `pipeline bench engine --json`")
        found[path.stem] = data
    return dict(sorted(found.items(), key=lambda item: item[1]["date"], reverse=True))


def machine(result: dict[str, Any]) -> str:
    cpu = result["machine"]["cpu"]
    return next(name for flag, name in VECTORS.items() if flag in cpu)


def cautious(figure: Any) -> float:
    """Return the median, or the lower bound where only bounds are known."""
    if not isinstance(figure, dict):
        return float(figure)
    return figure["low"] if figure.get("median") is None else figure["median"]


def in_words(figure: Any) -> str:
    """Return `1.16x (1.15 to 1.18)`, without bounds for a single round."""
    if not isinstance(figure, dict) or figure.get("low") is None or figure.get("count") == 1:
        return f"{cautious(figure):.2f}x"
    bounds = f"{figure['low']:.2f} to {figure['high']:.2f}"
    return f"{bounds}x" if figure.get("median") is None else f"{figure['median']:.2f}x ({bounds})"


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return how many times as fast this engine is as each other one, on all requests and on one alone."""
    rows = [["work", "machine, type", "tokens/s", *OTHERS], ["---"] * (3 + len(OTHERS))]
    for name, result in results.items():
        ours, *theirs = result["speeds"]
        rate = ours.get("tokens_per_s")
        cells = dict.fromkeys(OTHERS, "")
        for speed in theirs:
            alone = f"; alone {in_words(speed['single_faster'])}" if speed.get("single_faster") else ""
            cells[speed["name"].split(",")[0]] = in_words(speed["faster"]) + alone
        work = result.get("what") or result["work"]
        link = f"[{work}](../benchmarks/results/engine/{name}.json)"
        place = f"{machine(result)}, {result['dtype']}"
        rows.append([link, place, f"{cautious(rate):,.1f}" if rate else "", *cells.values()])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(content)}</text>'


def plot(results: dict[str, dict[str, Any]]) -> str:
    """Return bars of tokens per second of this engine, vLLM and transformers on the same requests, a panel a type."""
    title = "This engine against vLLM and transformers"
    work = "a 0.6B shape with random weights, 48 ragged requests, two threads each"
    about = f"Output tokens a second on two CPU cores: {work}."
    parts = [text(20, 28, title, "title"), text(20, 48, about, "small muted")]
    y = 78
    for panel, name in PANELS.items():
        result = results[name]
        parts.append(text(20, y, f"{panel}, {machine(result)}", "bold"))
        speeds = {bar: next(s for s in result["speeds"] if s["name"].startswith(bar)) for bar in BARS}
        rates = {bar: cautious(speed["tokens_per_s"]) for bar, speed in speeds.items()}
        for bar, (kind, label) in BARS.items():
            y += 24
            width = BAR * rates[bar] / max(rates.values())
            faster = speeds[bar].get("faster")
            by = "" if faster is None else f" (this engine is {cautious(faster):.2f}x as fast)"
            parts.append(text(LEFT - 10, y + 4, label, "right small"))
            parts.append(f'<rect x="{LEFT:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="18.0" class="{kind}"/>')
            parts.append(text(LEFT + width + 8, y + 4, f"{rates[bar]:,.1f}{by}", "small"))
        y += 38
    height = y - 14
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    page = f'<rect x="0" y="0" width="{WIDTH}" height="{height}" class="page"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>\n"])


def files() -> dict[Path, str]:
    """Return every generated file with its current content."""
    results, page = load(), PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    return {PAGE: f"{head}{BEGIN}\n{table(results)}\n{END}{tail}", PLOT: plot(results)}


if __name__ == "__main__":
    check_or_write(files(), "tools.performance")
