"""The plots of `docs/performance/plots/`: SVG text, the same to the byte for the same results.

Each has its own background and follows `prefers-color-scheme`, so it is readable on light and dark pages. It is written
as text because plotting libraries write fixed colors.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from tools.performance.results import Figure, Result, ResultError, newest, step_ms

WIDTH = 760
LEFT, RIGHT = 60, WIDTH - 20  # of a plot with a scale at its left
STYLE = """\
.page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 15px } .small { font-size: 12px } .muted { fill: #59636e }
.right { text-anchor: end } .middle { text-anchor: middle } .bold { font-weight: 600 }
.grid { stroke: #d1d9e0 } .unit { stroke: #59636e; stroke-dasharray: 4 3 }
.a { fill: #0969da; stroke: #0969da } .b { fill: #bc4c00; stroke: #bc4c00 } .c { fill: #8c959f; stroke: #8c959f }
polyline.a, polyline.b, polyline.c { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } text { fill: #e6edf3 } .muted { fill: #9198a1 }
.grid { stroke: #3d444d } .unit { stroke: #9198a1 }
.a { fill: #4493f8; stroke: #4493f8 } .b { fill: #e3893c; stroke: #e3893c } .c { fill: #7d8590; stroke: #7d8590 }
}"""
# Panels of the engine plot: title, model and type of the newest result with 48 requests and all contenders.
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
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(content)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def legend(x: float, y: float, names: dict[str, str]) -> Iterator[str]:
    """names: class -> text."""
    for kind, name in names.items():
        yield bar(x, y - 10, 12, 12, kind)
        yield text(x + 18, y, name, "small")
        x += 34 + 7 * len(name)


def times_scale(most: float, top: float, bottom: float) -> Iterator[str]:
    """Lines at 0x, 1x, 2x ... up to `most`; the one at 1x, plain speed, is dashed."""
    for value in range(int(most) + 1):
        y = bottom - value * (bottom - top) / most
        yield line(LEFT, y, RIGHT, y, "unit" if value == 1 else "grid")
        yield text(LEFT - 8, y + 4, f"{value}x", "right small")


def svg(title: str, note: str, height: float, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    page = bar(0, 0, WIDTH, height, "page")
    top = [text(20, 28, title, "title"), text(20, 48, note, "small muted")]
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", page, *top, *parts, "</svg>\n"]
    )


def engine(results: Sequence[Result]) -> str:
    """Tokens a second of this engine, vLLM's CPU build and transformers on the same requests, a panel a data type."""
    parts, y, left = [], 78, 130
    for title, model, dtype in PANELS:
        result = compared(results, model, dtype)
        parts.append(text(20, y, f"{title}, {result.machine}", "bold"))
        speeds = {name: Figure.of(result.speed(name)["tokens_per_s"]).cautious for name in CONTENDERS}
        for name, (kind, label) in CONTENDERS.items():
            y += 24
            width = 380 * speeds[name] / max(speeds.values())
            faster = result.speed(name).get("faster")
            by = "" if faster is None else f" (this engine is {Figure.of(faster).cautious:.2f}x as fast)"
            parts += [text(left - 10, y + 4, label, "right small"), bar(left, y - 9, width, 18, kind)]
            parts.append(text(left + width + 8, y + 4, f"{speeds[name]:,.1f}{by}", "small"))
        y += 38
    work = "a 0.6B shape with random weights, 48 ragged requests, two threads each"
    return svg(
        "This engine against vLLM and transformers", f"Output tokens a second on two CPU cores: {work}.", y - 14, parts
    )


def compared(results: Sequence[Result], model: str, dtype: str) -> Result:
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
    ways = {"lookup, forced": "c", "auto": "a"}
    found = {
        (told["batch"], way): figure.cautious
        for told in result.data["batches"]
        for way in ways
        if (figure := result.speedup(told["batch"], way))
    }
    batches = list(dict.fromkeys(batch for batch, _ in found))
    top, bottom, most = 110, 300, max(found.values())
    parts = [*legend(LEFT, 76, {kind: way for way, kind in ways.items()}), *times_scale(most, top, bottom)]
    step = (RIGHT - LEFT) / len(batches)
    for number, batch in enumerate(batches):
        center = LEFT + step * (number + 0.5)
        for x, (way, kind) in zip((center - 44, center + 4), ways.items(), strict=True):
            height = found[batch, way] * (bottom - top) / most
            parts.append(bar(x, bottom - height, 40, height, kind))
            parts.append(text(x + 20, bottom - height - 6, f"{found[batch, way]:.2f}", "small middle"))
        parts.append(text(center, bottom + 20, str(batch), "middle small"))
    parts.append(text((LEFT + RIGHT) / 2, bottom + 42, "rows at once", "middle small muted"))
    note = f"How many times as fast as plain steps; {result.place}; rows of the demonstration job; {result.date[:10]}."
    return svg("Speculative decoding by batch size", note, bottom + 58, parts)


def history(results: Sequence[Result]) -> str:
    """Over the log's time: what drafts by choice gain at some batch sizes, and the host time of a step."""
    drafts = [result for result in results if result.bench == "speculation" and result.data.get("text") == "reports"]
    steps = [(result, cost) for result in results if result.bench == "scheduler" for cost in result.data["costs"]]
    steps = [(result, cost) for result, cost in steps if cost["sequences"] == 1024]
    names = {kind: f"{batch} at once" for batch, kind in BATCHES.items()}
    parts = [text(20, 76, "Drafts by choice (auto), by plain steps", "bold"), *legend(320, 76, names)]
    parts += [*gains(drafts, 120, 290), text(20, 356, "Host time of a step with 1,024 rows, ms", "bold")]
    y = 370
    for result, cost in steps:
        width = 380 * cost["step_us"] / max(cost["step_us"] for _, cost in steps)
        parts.append(text(150, y + 13, f"{result.date[5:]}, {result.machine}", "right small"))
        parts.append(bar(160, y, width, 17, "a" if result.machine == steps[0][0].machine else "b"))
        parts.append(text(168 + width, y + 13, step_ms(cost).to_text(2), "small"))
        y += 24
    note = "Each figure stands at the time of its report. Machines differ, so a line stays within one machine and type."
    return svg("Speed over the log's time", note, y + 12, parts)


def gains(drafts: Sequence[Result], top: float, bottom: float) -> Iterator[str]:
    """A line a batch size on each machine: auto by plain steps, results side by side in their order."""
    most = max(figure.cautious for result in drafts for batch in BATCHES if (figure := result.speedup(batch, "auto")))
    at = [LEFT + 24 + (RIGHT - LEFT - 48) * number / max(1, len(drafts) - 1) for number in range(len(drafts))]
    yield from times_scale(most, top, bottom)
    for batch, kind in BATCHES.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for x, result in zip(at, drafts):
            if figure := result.speedup(batch, "auto"):
                points.setdefault(result.place, []).append((x, bottom - figure.cautious * (bottom - top) / most))
        for run in points.values():
            yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in run)}" class="{kind}"/>'
            yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="{kind}"/>' for x, y in run)
    place = ""
    for x, result in zip(at, drafts):
        if result.place != place:
            place = result.place
            yield from (line(x - 16, top - 14, x - 16, bottom, "unit"), text(x - 10, top - 10, place, "small muted"))
        yield text(x, bottom + 18, result.date[5:10], "middle small")
        yield text(x, bottom + 33, result.date[11:], "middle small muted")


PLOTS: dict[str, Callable[[Sequence[Result]], str]] = {
    "engine": engine,
    "speculation": speculation,
    "history": history,
}
