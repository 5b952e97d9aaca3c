"""Write the table of `docs/performance.md` and `benchmarks/plots/engine.svg` from `benchmarks/results/engine/`.

python -m tools.performance            # write them
python -m tools.performance --check    # exit with 1 if one is stale

A results file is the last line of `python -m benchmarks.engine --json`, with an optional key `what` that describes the
work. The plot takes its H200 figures from the page. It is SVG text, byte-identical for the same results, and follows
`prefers-color-scheme`.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from tools.generated import ROOT, check_or_write

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "engine"
PLOT = ROOT / "benchmarks" / "plots" / "engine.svg"
BEGIN, END = "<!-- table: engine -->\n", "<!-- end of table -->"
VECTORS = {"avx512_bf16": "AVX-512", "avx2": "AVX2"}  # best first
OTHERS = ("transformers.generate", "vllm", "openvino", "llama.cpp")
WIDTH, LEFT, BAR_PER_X = 760, 330, 130
STYLE = """\
.page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 15px } .small { font-size: 12px } .muted { fill: #59636e }
.right { text-anchor: end } .bold { font-weight: 600 } .bar { fill: #0969da } .vllm { stroke: #bc4c00; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .muted { fill: #9198a1 } .bar { fill: #4493f8 } .vllm { stroke: #e3893c }
}"""
CPU_BARS = {  # label -> result
    "AWQ int4, 48 requests": "2026-11-22-0.6b-awq-bfloat16",
    "bfloat16, 48 requests": "2026-11-22-0.6b-bfloat16",
    "float32 on AVX2, 48 requests": "2026-11-21-0.6b-float32",
}
GPU_ROW = re.compile(r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+)x \|$", re.MULTILINE)


def load() -> dict[str, dict[str, Any]]:
    """Return the results by name, newest first. Raises ValueError for a file that is not a result."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("bench") != "engine" or not {"command", "machine", "date", "dtype", "speeds"} <= set(data):
            raise ValueError(f"{path}: expected the last line of `python -m benchmarks.engine --json`")
        found[path.stem] = data
    return dict(sorted(found.items(), key=lambda item: item[1]["date"], reverse=True))


def machine(result: dict[str, Any]) -> str:
    cpu = result["machine"]["cpu"]
    return next(name for flag, name in VECTORS.items() if flag in cpu)


def cautious(figure: Any) -> float:
    """Return the median, or the lower bound if only bounds are known."""
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
    """Return a table of this engine's speedup over each other engine, on all requests and on one alone."""
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
        rows.append(
            [link, f"{machine(result)}, {result['dtype']}", f"{cautious(rate):,.1f}" if rate else "", *cells.values()]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(content)}</text>'


def plot(results: dict[str, dict[str, Any]], page: str) -> str:
    """Return a bar plot of this engine's speedup over vLLM, on the H200 (from the page) and on CPUs."""
    speeds = {label: results[name]["speeds"] for label, name in CPU_BARS.items()}
    on_cpu = {
        label: cautious(next(speed["faster"] for speed in each if speed["name"].startswith("vllm")))
        for label, each in speeds.items()
    }
    panels = {
        "One H200: Llama-3-8B shape, AWQ int4, bfloat16; vLLM 0.26": dict(GPU_ROW.findall(page)),
        "Two CPU cores: 0.6B shape; vLLM 0.32, CPU build": on_cpu,
    }
    title = "Speed relative to vLLM"
    note = "Whole request sets with random weights, each engine alone on the machine. The line is vLLM."
    parts = [text(20, 28, title, "title"), text(20, 48, note, "small muted")]
    y = 50
    for panel, bars in panels.items():
        y += 30
        parts.append(text(20, y, panel, "bold"))
        top = y + 10
        for label, faster in bars.items():
            y += 24
            width = BAR_PER_X * float(faster)
            parts.append(text(LEFT - 10, y + 4, label, "right small"))
            parts.append(f'<rect x="{LEFT:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="18.0" class="bar"/>')
            parts.append(text(LEFT + width + 8, y + 4, f"{float(faster):.2f}x", "small"))
        x = LEFT + BAR_PER_X
        parts.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{y + 12}" class="vllm"/>')
    height = y + 26
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    background = f'<rect x="0" y="0" width="{WIDTH}" height="{height}" class="page"/>'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", background, *parts, "</svg>\n"])


def files() -> dict[Path, str]:
    """Return every generated file with its current content."""
    results, page = load(), PAGE.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    return {PAGE: f"{head}{BEGIN}\n{table(results)}\n{END}{tail}", PLOT: plot(results, page)}


if __name__ == "__main__":
    check_or_write(files(), "tools.performance")
