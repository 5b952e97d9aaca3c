"""Charts of a job's report in html: bars in CSS, and curves in scalable SVG.

Colors are defined by the page, so that charts work in dark and light mode. A chart without data is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor, log10

from markupsafe import Markup

from pipeline.formatting import duration, money, percent
from pipeline.report.record.row_stats import Histogram
from pipeline.report.record.run_record import PHASES, Moment
from pipeline.report.run_report import RunReport

MAX_ACTORS = 16  # in the chart of engines: those with the most machine time
MAX_BINS = 16  # per histogram
_COMPUTING = ("prefill", "decode", "wasted", "quality")
_LATENCIES = {"first_token_us": "to first token", "row_us": "to last token"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 360, 200, 44, 34, 8, 8  # of an SVG chart


@dataclass(frozen=True)
class BarRow:
    """One bar with a label and a value. parts: (start, length) of each part as shares of the track, in legend
    colors."""

    label: str
    value: str
    parts: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Chart with bars or an SVG picture. summary: its result in words. unit: of the bars."""

    name: str
    title: str
    summary: str
    bars: Sequence[BarRow] = ()
    unit: str = ""
    svg: Markup | None = None
    legend: Sequence[str] = ()


@dataclass(frozen=True)
class Rates:
    """Average rates between two moments. from_s, to_s: since the start of the first run, without pauses between runs.
    running: rows in a step, over all engines. kv_usage: used share of the KV cache."""

    from_s: float
    to_s: float
    prompt_per_s: float
    generated_per_s: float
    running: float
    kv_usage: float


def stretches(moments: Sequence[Moment], began_s: float = 0.0) -> list[Rates]:
    """Return the rates between the moments of one run. A counter that fell, because an engine process was replaced,
    counts as unchanged."""
    found = []
    for before, now in pairwise(moments):
        span_s = (now.at_us - before.at_us) / 1e6
        if span_s <= 0:
            continue
        steps = max(0, now.steps - before.steps)
        batch, kv = now.batch_sum - before.batch_sum, now.kv_used_ppm_sum - before.kv_used_ppm_sum
        found.append(
            Rates(
                began_s + before.at_us / 1e6,
                began_s + now.at_us / 1e6,
                max(0, now.prompt_tokens - before.prompt_tokens) / span_s,
                max(0, now.generated_tokens - before.generated_tokens) / span_s,
                max(0.0, batch / steps * max(1, now.actors_computing)) if steps else 0.0,
                max(0.0, kv / steps / 1e6) if steps else 0.0,
            )
        )
    return found


def charts(report: RunReport) -> list[Chart]:
    return [
        *_over_time(report),
        *_phases(report),
        *_phase_costs(report),
        *_estimate(report),
        *_prompt_lengths(report),
        *_completion_lengths(report),
        *_latency(report),
        *_engines(report),
    ]


def _curves(
    edges: Sequence[float],
    series: Sequence[Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    title: str,
    marks: Sequence[float] = (),
    filled: bool = False,
) -> Markup:
    """Draw step curves or a histogram: value i spans edge i to edge i + 1. marks: positions of dotted vertical
    lines."""
    x0, x1 = edges[0], max(edges[-1], edges[0] + 1e-9)
    top = max(max(values) for values in series) or 1.0

    def x(value: float) -> str:
        return f"{_LEFT + (value - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{_HEIGHT - _BOTTOM - value / top * (_HEIGHT - _BOTTOM - _TOP):.1f}"

    ground, shapes = y(0), []
    for tick in _ticks(0, top):
        shapes.append(f'<path class="grid" d="M{_LEFT} {y(tick)}H{_WIDTH - _RIGHT}"/>')
        shapes.append(f'<text x="{_LEFT - 4}" y="{float(y(tick)) + 3:.1f}" text-anchor="end">{tick:,.6g}</text>')
    for tick in _ticks(x0, x1):
        shapes.append(f'<text x="{x(tick)}" y="{_HEIGHT - 20}" text-anchor="middle">{tick:,.6g}</text>')
    shapes += [f'<path class="mark" d="M{x(mark)} {_TOP}V{ground}"/>' for mark in marks]
    for number, values in enumerate(series, 1):
        steps = "".join(f"V{y(value)}H{x(end)}" for value, end in zip(values, edges[1:]))
        path = f"M{x(x0)} {ground}{steps}V{ground}"
        shapes.append(f'<path class="curve {"fill" if filled else "line"}-{number}" d="{path}"/>')
    shapes.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 5}" text-anchor="middle">{x_label}</text>')
    turned = f"translate(9 {(_HEIGHT - _BOTTOM) / 2}) rotate(-90)"
    shapes.append(f'<text transform="{turned}" text-anchor="middle">{y_label}</text>')
    picture = "".join(shapes)
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{picture}</svg>')


def _ticks(low: float, high: float) -> list[float]:
    """Return up to six round numbers from low to high."""
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = -(-low // step)
    return [(first + i) * step for i in range(7) if (first + i) * step <= high * 1.0001]


def _over_time(report: RunReport) -> Iterator[Chart]:
    spans: list[Rates] = []
    starts, began_s = [], 0.0
    for run in report.runs:
        starts.append(began_s)
        spans += stretches(run.moments, began_s)
        began_s += run.wall_us / 1e6
    if not spans:
        return
    edges = [spans[0].from_s, *(span.to_s for span in spans)]

    def curve(name: str, title: str, summary: str, unit: str, **series: list[float]) -> Chart:
        x_label = "seconds since the job started"
        svg = _curves(edges, [*series.values()], x_label=x_label, y_label=unit, title=title, marks=starts[1:])
        return Chart(name=name, title=title, summary=summary, svg=svg, legend=[*series] if len(series) > 1 else ())

    prompt, generated = [s.prompt_per_s for s in spans], [s.generated_per_s for s in spans]
    again = f" Dotted lines: starts of the {len(report.runs)} runs." if len(report.runs) > 1 else ""
    summary = f"Up to {max(prompt):,.0f} prompt tokens and {max(generated):,.0f} generated tokens per second.{again}"
    yield curve("speed", "Tokens per second", summary, "tokens/s", prompt=prompt, generated=generated)
    busy = [span for span in spans if span.running]
    mean = sum(s.running * (s.to_s - s.from_s) for s in busy) / max(1e-9, sum(s.to_s - s.from_s for s in busy))
    summary = f"{mean:,.1f} on average while any row ran."
    yield curve("running", "Rows running concurrently", summary, "rows", rows=[s.running for s in spans])
    kv = [100 * s.kv_usage for s in spans]
    yield curve("kv", "KV cache in use", f"At most {percent(max(kv) / 100)}.", "%", kv=kv)


def _bars(values: dict[str, tuple[float, str]]) -> list[BarRow]:
    """Return a bar for each label -> (value, text). The largest value fills its track."""
    whole = max((value for value, _ in values.values()), default=0.0) or 1.0
    return [BarRow(label, text, ((0.0, value / whole),)) for label, (value, text) in values.items()]


def _phases(report: RunReport) -> Iterator[Chart]:
    shares = {phase: us / report.machine_us for phase, us in report.phases_us.items() if us}
    if shares:
        largest = max(shares, key=lambda phase: shares[phase])
        summary = f"Largest: {largest}, {percent(shares[largest])} of {duration(report.machine_us / 1e6)}."
        texts = {p: (s, f"{duration(report.phases_us[p] / 1e6)}, {percent(s)}") for p, s in shares.items()}
        yield Chart(name="phases", title="Machine time by phase", summary=summary, bars=_bars(texts),
                    unit="machine time")  # fmt: skip


def _phase_costs(report: RunReport) -> Iterator[Chart]:
    total = report.cost.total_usd
    if not total:
        return
    bars, offset = [], 0.0
    for phase, usd in (report.cost.phases_usd or {}).items():
        if usd:
            bars.append(BarRow(phase, money(usd), ((offset / total, usd / total),)))
            offset += usd
    bars.append(BarRow("total", money(total), ((0.0, 1.0),)))
    summary = f"{money(total)} in total."
    yield Chart(name="waterfall", title="Cost by phase", summary=summary, bars=bars, unit="US dollars")


def _estimate(report: RunReport) -> Iterator[Chart]:
    lines = () if report.estimate is None else report.estimate.lines
    lines = [line for line in lines if line.what in PHASES and (line.expected or line.actual)]
    if report.estimate is None or not lines:
        return
    longest, bars = max(max(line.expected, line.actual) for line in lines), []
    for line in lines:
        bars.append(BarRow(line.what, duration(line.actual / 1e6), ((0.0, line.actual / longest),)))
        expected = ((0.0, 0.0), (0.0, line.expected / longest))
        bars.append(BarRow("", duration(line.expected / 1e6), expected))
    ratio = report.estimate.ratio
    summary = "" if ratio is None else f"{ratio:.2f} times the estimated machine time."
    yield Chart(name="estimate", title="Estimate and actual", summary=summary, bars=bars, unit="machine time",
                legend=("actual", "estimate"))  # fmt: skip


def _prompt_lengths(report: RunReport) -> Iterator[Chart]:
    rows = {f"up to {b.max_prompt_tokens:,}": b.completed.rows for b in report.lengths}
    if rows:
        largest = max(rows, key=lambda name: rows[name])
        bars = _bars({label: (count, f"{count:,}") for label, count in rows.items()})
        yield Chart(name="prompts", title="Length of prompts", summary=f"Most frequent: {largest} tokens.",
                    bars=bars, unit="completed rows, by prompt tokens")  # fmt: skip


def _completion_lengths(report: RunReport) -> Iterator[Chart]:
    outputs = (run.row_stats.outputs.values() for run in report.runs)
    whole = sum((histogram for each in outputs for histogram in each), Histogram())
    values = whole.values()
    if not any(value for value, _ in values):  # no rows generated any tokens
        return
    shortest, longest = min(value for value, _ in values), max(value for value, _ in values)
    size = max(1, -(-(longest + 1 - shortest) // MAX_BINS))
    first = shortest // size
    bins = [0.0] * (longest // size + 1 - first)
    for value, count in values:
        bins[value // size - first] += count
    edges = [float((first + i) * size) for i in range(len(bins) + 1)]
    title = "Length of completions"
    svg = _curves(edges, [bins], x_label="generated tokens per row", y_label="completed rows", title=title, filled=True)
    p50, p95 = whole.percentile(50), whole.percentile(95)
    summary = f"50% have at most {p50:,} tokens, 95% at most {p95:,}."
    yield Chart(name="completions", title=title, summary=summary, svg=svg)


def _latency(report: RunReport) -> Iterator[Chart]:
    known = {label: report.latency[name] for name, label in _LATENCIES.items() if name in report.latency}
    values = {
        f"{label}, {name}": getattr(latency, name) or 0
        for label, latency in known.items()
        if latency.rows
        for name in ("p50", "p95", "p99")
    }
    if values:
        half = duration(list(values.values())[-3] / 1e6)
        bars = _bars({label: (us, duration(us / 1e6)) for label, us in values.items()})
        yield Chart(name="latency", title="Latency per row", summary=f"50% finish within {half}.", bars=bars,
                    unit="since the row was added to the engine")  # fmt: skip


def _engines(report: RunReport) -> Iterator[Chart]:
    """Yield the chart of the last run with machine time."""
    run = next((run for run in reversed(report.runs) if run.machine_us), None)
    if run is None:
        return
    actors = sorted(run.actors, key=lambda actor: -actor.machine_us)[:MAX_ACTORS]
    end = max(actor.started_us + actor.machine_us for actor in actors)
    bars = []
    for actor in actors:
        phases, offset, parts = actor.phases_us, actor.started_us, []
        for names in (("startup", "load"), _COMPUTING, ("idle",)):
            us = sum(phases[name] for name in names)
            parts.append((offset / end, us / end))
            offset += us
        bars.append(BarRow(str(actor.actor), duration(actor.machine_us / 1e6), tuple(parts)))
    some = f" The {MAX_ACTORS} with the most time, of {len(run.actors):,}." if len(run.actors) > MAX_ACTORS else ""
    summary = f"{percent(run.phase_us('idle') / run.machine_us)} of it idle.{some}"
    yield Chart(name="actors", title="Time by engine", summary=summary, bars=bars, unit="time of the last run",
                legend=("starting", "computing", "idle"))  # fmt: skip
