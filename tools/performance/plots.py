"""The plots of `docs/performance/plots/`: SVG text, the same to the byte for the same results.

Each has its own background and follows `prefers-color-scheme`, so that it is readable on light and dark pages. No
plotting library at hand writes colors as CSS, which that needs.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from tools.performance.results import Figure, Result, ResultError, newest, step_ms

WIDTH = 760
STYLE = """\
.page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 15px } .small { font-size: 12px } .muted { fill: #59636e }
.right { text-anchor: end } .middle { text-anchor: middle } .bold { font-weight: 600 }
.grid { stroke: #d1d9e0; stroke-width: 1 } .unit { stroke: #59636e; stroke-width: 1; stroke-dasharray: 4 3 }
.a { fill: #0969da } .b { fill: #bc4c00 } .c { fill: #8c959f }
.line { fill: none; stroke-width: 2 } .line.a { stroke: #0969da } .line.b { stroke: #bc4c00 } .line.c { stroke: #8c959f }
.line.a, .line.b, .line.c { fill: none }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .muted { fill: #9198a1 } .grid { stroke: #3d444d } .unit { stroke: #9198a1 }
.a { fill: #4493f8 } .b { fill: #e3893c } .c { fill: #6e7681 }
.line.a { stroke: #4493f8 } .line.b { stroke: #e3893c } .line.c { stroke: #8b949e }
}"""
# Of the engine plot, a panel each: title, model and type of the newest result with 48 requests and all contenders.
PANELS = (
    ("float32", "qwen3-0.6b", "float32"),
    ("bfloat16", "qwen3-0.6b", "bfloat16"),
    ("AWQ int4", "qwen3-0.6b-awq", "bfloat16"),
)
CONTENDERS = {
    "this engine": ("a", "this engine"),
    "vllm": ("b", "vLLM, CPU build"),
    "transformers": ("c", "transformers"),
}
BATCHES = {1: "a", 8: "b", 32: "c"}  # of the history: rows at once, and the class of their line


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(content)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:.1f}" rx="2" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def legend(x: float, y: float, names: dict[str, str]) -> Iterator[str]:
    """names: class -> text."""
    for kind, name in names.items():
        yield bar(x, y - 10, 12, 12, kind)
        yield text(x + 18, y, name, "small")
        x += 34 + 7 * len(name)


def svg(title: str, note: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
    back = f'<rect width="{WIDTH}" height="{height}" class="page"/>'
    top = [text(20, 28, title, "title"), text(20, 48, note, "small muted")]
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", back, *top, *parts, "</svg>\n"]
    )


def engine(results: Sequence[Result]) -> str:
    """Tokens a second of this engine, vLLM's CPU build and transformers on the same requests, a panel a data type."""
    parts, y, left, room = [], 78, 130, 380
    for title, model, dtype in PANELS:
        result = _compared(results, model, dtype)
        parts.append(text(20, y, f"{title}, {result.machine}", "bold"))
        speeds = {name: Figure.of(result.speed(name)["tokens_per_s"]).cautious for name in CONTENDERS}
        for name, (kind, label) in CONTENDERS.items():
            y += 24
            width = room * speeds[name] / max(speeds.values())
            faster = result.speed(name).get("faster")
            by = "" if faster is None else f" (this engine is {Figure.of(faster).cautious:.2f}x as fast)"
            parts += [text(left - 10, y + 4, label, "right small"), bar(left, y - 9, width, 18, kind)]
            parts.append(text(left + width + 8, y + 4, f"{speeds[name]:,.1f}{by}", "small"))
        y += 38
    note = "Output tokens a second on two CPU cores: a 0.6B shape with random weights, 48 ragged requests, two threads each."
    return svg("This engine against vLLM and transformers", note, y - 14, parts)


def _compared(results: Sequence[Result], model: str, dtype: str) -> Result:
    """The newest run of 48 requests in which all contenders took part, without rounded activations."""
    for result in reversed(results):
        if result.bench != "engine" or result.dtype != dtype or result.option("--model", "qwen3-0.6b") != model:
            continue
        names = [speed["name"] for speed in result.data["speeds"]]
        everyone = all(any(name.startswith(each) for name in names) for each in CONTENDERS)
        if everyone and result.option("--requests", "48") == "48" and not result.option("--activation-dtype"):
            return result
    raise ResultError(f"no result of bench engine with {model}, {dtype}, 48 requests and {', '.join(CONTENDERS)}")


def speculation(results: Sequence[Result]) -> str:
    """Drafts against plain steps by rows at once: lookup forced, and the engine's own choice."""
    result = newest(results, "speculation", text="reports")
    batches = [told["batch"] for told in result.data["batches"]]
    ways = {"lookup, forced": "c", "auto": "a"}
    bottom, top, left, right = 300, 100, 60, WIDTH - 20
    most = max(result.speedup(batch, way).cautious for batch in batches for way in ways)  # type: ignore[union-attr]
    scale = (bottom - top) / max(1.0, most)
    parts = [*legend(left, 76, {kind: way for way, kind in ways.items()})]
    for value in range(int(most) + 1):
        y = bottom - value * scale
        parts += [
            line(left, y, right, y, "unit" if value == 1 else "grid"),
            text(left - 8, y + 4, f"{value}x", "right small"),
        ]
    step = (right - left) / len(batches)
    for number, batch in enumerate(batches):
        center = left + step * (number + 0.5)
        for x, (way, kind) in zip((center - 44, center + 4), ways.items(), strict=True):
            figure = result.speedup(batch, way)
            assert figure is not None
            height = figure.cautious * scale
            parts.append(bar(x, bottom - height, 40, height, kind))
            parts.append(text(x + 20, bottom - height - 6, f"{figure.cautious:.2f}", "small middle"))
        parts.append(text(center, bottom + 20, str(batch), "middle small"))
    parts.append(text((left + right) / 2, bottom + 42, "rows at once", "middle small muted"))
    note = f"How many times as fast as plain steps; {result.place}; rows of the demonstration job; {result.date[:10]}."
    return svg("Speculative decoding by batch size", note, bottom + 58, parts)


def history(results: Sequence[Result]) -> str:
    """Over the log's time: what drafts by choice gain at some batch sizes, and the host time of a step."""
    drafts = [result for result in results if result.bench == "speculation" and result.data.get("text") == "reports"]
    steps = [(result, cost) for result in results if result.bench == "scheduler" for cost in result.data["costs"]]
    steps = [(result, cost) for result, cost in steps if cost["sequences"] == 1024]
    left, right, top, bottom = 60, WIDTH - 20, 112, 290
    most = max(figure.cautious for result in drafts for batch in BATCHES if (figure := result.speedup(batch, "auto")))
    scale = (bottom - top) / most
    at = [left + 24 + (right - left - 48) * number / max(1, len(drafts) - 1) for number in range(len(drafts))]
    parts = [
        text(20, 76, "Drafts by choice (auto), by plain steps", "bold"),
        *legend(320, 76, {k: f"{b} at once" for b, k in BATCHES.items()}),
    ]
    for value in range(int(most) + 1):
        y = bottom - value * scale
        parts += [
            line(left, y, right, y, "unit" if value == 1 else "grid"),
            text(left - 8, y + 4, f"{value}x", "right small"),
        ]
    for batch, kind in BATCHES.items():
        points: dict[str, list[tuple[float, float]]] = {}  # by place: no line joins two machines
        for x, result in zip(at, drafts):
            if figure := result.speedup(batch, "auto"):
                points.setdefault(result.place, []).append((x, bottom - figure.cautious * scale))
        for run in points.values():
            parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in run)}" class="line {kind}"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kind}"/>' for x, y in run]
    for number, (x, result) in enumerate(zip(at, drafts), start=1):
        if number == 1 or result.machine != drafts[number - 2].machine:
            parts += [line(x - 14, top - 8, x - 14, bottom, "unit"), text(x - 8, top - 4, result.place, "small muted")]
        parts.append(text(x, bottom + 18, f"{result.date[8:10]}.", "middle small"))
        parts.append(text(x, bottom + 33, result.date[11:], "middle small muted"))
    parts.append(text(20, bottom + 66, "Host time of a step with 1,024 rows, ms", "bold"))
    widest, y = max(cost["step_us"] for _, cost in steps), bottom + 80
    for result, cost in steps:
        width = 380 * cost["step_us"] / widest
        parts += [
            text(210, y + 13, f"{result.date[8:10]}. {result.date[11:]}  {result.machine}", "right small"),
            bar(220, y, width, 17, "a" if result.machine == "AVX2" else "b"),
        ]
        parts.append(text(228 + width, y + 13, step_ms(cost).to_text(2), "small"))
        y += 24
    note = "By the hour at which the log tells the figures, November 2026. Machines differ: read a line within one machine."
    return svg("Speed over the log's time", note, y + 12, parts)


PLOTS: dict[str, Callable[[Sequence[Result]], str]] = {"engine": engine, "speculation": speculation, "history": history}
