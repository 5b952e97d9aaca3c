"""The charts of a job's report. Each is left out where there is nothing to show."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.report.html.chart import HATCHES, INK, SERIES, STYLES, Chart, chart
from pipeline.report.number_formats import money, percent, seconds
from pipeline.report.record.moments import Stretch, stretches
from pipeline.report.record.row_stats import Histogram
from pipeline.report.record.run_record import PHASES, ActorRecord
from pipeline.report.run_report import RunReport

MAX_ACTORS = 16  # in the chart of actors: those that took longest
MAX_BARS = 16  # of a distribution
_COMPUTING = ("prefill", "decode", "drafts", "preempted", "retried", "quality")
_LATENCIES = {"first_token_us": "to first token", "row_us": "to last token"}


def charts(report: RunReport) -> list[Chart]:
    made = [
        *_over_time(report),
        _phases(report),
        _waterfall(report),
        _estimate(report),
        _prompt_lengths(report),
        _completion_lengths(report),
        _latency(report),
        _actors(report),
    ]
    return [each for each in made if each is not None]


def _over_time(report: RunReport) -> Iterator[Chart]:
    spans: list[Stretch] = []
    starts, began_s = [], 0.0
    for run in report.runs:
        starts.append(began_s)
        spans += stretches(run.moments, began_s)
        began_s += run.wall_us / 1e6
    if not spans:
        return
    busy = [span for span in spans if span.running]

    def draw(axes: Axes, series: Sequence[tuple[str, Sequence[float]]], unit: str) -> None:
        edges = [spans[0].from_s, *(span.to_s for span in spans)]
        for (label, values), colour, style in zip(series, SERIES, STYLES):
            axes.stairs(values, edges, color=colour, linestyle=style, linewidth=1.4, label=label)
        for start in starts[1:]:
            axes.axvline(start, color=INK, linewidth=0.6, linestyle=(0, (1, 3)))
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds since the job began")
        axes.set_ylabel(unit)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}{'%' * (unit == '%')}"))
        if len(series) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=len(series))

    most_in, most_out = (max(getattr(s, name) for s in spans) for name in ("prompt_per_s", "generated_per_s"))
    again = f" Dotted lines: where one of {len(report.runs)} runs began." if len(report.runs) > 1 else ""
    yield chart(
        "speed",
        "Tokens a second",
        f"Up to {most_in:,.0f} prompt tokens and {most_out:,.0f} generated tokens a second.{again}",
        lambda axes: draw(
            axes,
            [("prompt", [s.prompt_per_s for s in spans]), ("generated", [s.generated_per_s for s in spans])],
            "tokens/s",
        ),
    )
    mean = sum(s.running * (s.to_s - s.from_s) for s in busy) / max(1e-9, sum(s.to_s - s.from_s for s in busy))
    yield chart(
        "running",
        "Rows running at once",
        f"{mean:,.1f} on average while anything ran.",
        lambda axes: draw(axes, [("rows", [s.running for s in spans])], "rows"),
    )
    yield chart(
        "kv",
        "KV cache in use",
        f"At most {percent(max(s.kv_used for s in spans))} of it.",
        lambda axes: draw(axes, [("KV", [100 * s.kv_used for s in spans])], "%"),
    )


def _bars(
    axes: Axes, labels: Sequence[str], values: Sequence[float], told: Sequence[str], lefts: Sequence[float] = ()
) -> None:
    """Horizontal bars, the first on top, each with its figure beside it."""
    places = range(len(labels))
    starts = lefts or [0.0] * len(labels)
    axes.barh(places, values, left=starts, color=SERIES[0], edgecolor=INK, linewidth=0.4)
    most = max((start + value for start, value in zip(starts, values)), default=0.0) or 1.0
    for place, start, value, text in zip(places, starts, values, told):
        axes.annotate(
            text, (start + value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7.5
        )
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.32)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="y", visible=False)


def _phases(report: RunReport) -> Chart | None:
    shown = {phase: us for phase, us in report.phases_us.items() if us}
    if not shown:
        return None
    shares = {phase: us / report.machine_us for phase, us in shown.items()}
    told = [f"{seconds(us)}, {percent(shares[phase])}" for phase, us in shown.items()]
    largest = max(shares, key=lambda phase: shares[phase])

    def draw(axes: Axes) -> None:
        _bars(axes, list(shown), [100 * share for share in shares.values()], told)
        axes.set_xlabel("% of the machine time")
        axes.set_xlim(0, max(shares.values()) * 155)

    says = f"Most went to {largest}: {percent(shares[largest])} of {seconds(report.machine_us)}."
    return chart("phases", "Where the machine time went", says, draw)


def _waterfall(report: RunReport) -> Chart | None:
    total = report.cost.total_usd
    if not total or not report.machine_us:
        return None
    usd = {phase: value for phase, value in (report.cost.phases_usd or {}).items() if value}
    lefts = [sum(list(usd.values())[:i]) for i in range(len(usd))]
    scale, unit = _scaled(total)

    def draw(axes: Axes) -> None:
        labels, values = [*usd, "total"], [value * scale for value in (*usd.values(), total)]
        _bars(axes, labels, values, [money(v / scale) for v in values], [left * scale for left in lefts] + [0.0])
        axes.set_xlabel(unit)

    return chart("waterfall", "What each phase cost", f"{money(total)} in all, phase by phase.", draw)


def _scaled(usd: float) -> tuple[float, str]:
    """A factor and the name of the unit it makes of dollars, for an axis."""
    for factor, unit in ((1.0, "US dollars"), (1e3, "thousandths of a US dollar")):
        if usd * factor >= 0.1:
            return factor, unit
    return 1e6, "millionths of a US dollar"


def _estimate(report: RunReport) -> Chart | None:
    if report.estimate is None:
        return None
    lines = [line for line in report.estimate.lines if line.what in PHASES and (line.expected or line.actual)]
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for offset, label, name, colour, hatch in (
            (-0.2, "expected", "expected", SERIES[1], HATCHES[1]),
            (0.2, "came", "actual", SERIES[0], HATCHES[0]),
        ):
            values = [getattr(line, name) / 1e6 for line in lines]
            places = [place + offset for place in range(len(lines))]
            axes.barh(places, values, 0.38, label=label, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.4)
        axes.set_yticks(range(len(lines)), [line.what for line in lines])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds of machine time")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2)

    ratio = report.estimate.ratio
    says = "" if ratio is None else f"{ratio:.2f} times the machine time that was expected."
    return chart("estimate", "Estimate and actual", says, draw)


def _prompt_lengths(report: RunReport) -> Chart | None:
    if not report.lengths:
        return None
    rows = {f"to {bucket.longest:,}": bucket.rows.rows for bucket in report.lengths}

    def draw(axes: Axes) -> None:
        _bars(axes, list(rows), list(rows.values()), [f"{count:,}" for count in rows.values()])
        axes.set_xlabel("completed rows")
        axes.set_ylabel("tokens of the prompt")

    most = max(rows, key=lambda name: rows[name])
    return chart("prompts", "Length of prompts", f"Most rows have prompts of up {most} tokens.", draw)


def _completion_lengths(report: RunReport) -> Chart | None:
    outputs = (run.row_stats.outputs.values() for run in report.runs)
    whole = sum((histogram for each in outputs for histogram in each), Histogram())
    values = whole.values()
    if not any(value for value, _ in values):  # no rows, or none that generated
        return None
    longest = max(value for value, _ in values)
    width = max(1, -(-(longest + 1 - min(value for value, _ in values)) // MAX_BARS))
    first = min(value for value, _ in values) // width
    bars = [0] * (longest // width + 1 - first)
    for value, count in values:
        bars[value // width - first] += count

    def draw(axes: Axes) -> None:
        edges = [(first + i) * width for i in range(len(bars) + 1)]
        axes.stairs(bars, edges, fill=True, color=SERIES[0])
        axes.set_xlabel("generated tokens of a row")
        axes.set_ylabel("completed rows")
        axes.set_ylim(bottom=0)

    p50, p95 = whole.percentile(50), whole.percentile(95)
    return chart(
        "completions", "Length of completions", f"Half have at most {p50:,} tokens, 95 % at most {p95:,}.", draw
    )


def _latency(report: RunReport) -> Chart | None:
    known = {label: report.latency[name] for name, label in _LATENCIES.items() if name in report.latency}
    known = {label: latency for label, latency in known.items() if latency.rows}
    if not known:
        return None
    labels, values = [], []
    for label, latency in known.items():
        for name in ("p50", "p95", "p99"):
            labels.append(f"{label}, {name}")
            values.append(getattr(latency, name) or 0)

    def draw(axes: Axes) -> None:
        _bars(axes, labels, [us / 1e6 for us in values], [seconds(us) for us in values])
        axes.set_xlabel("seconds since the engine took it in")

    return chart("latency", "Latency of a row", f"Half end within {seconds(values[-3])}.", draw)


def _actors(report: RunReport) -> Chart | None:
    """Of the last run that used a machine."""
    run = next((run for run in reversed(report.runs) if run.machine_us), None)
    if run is None:
        return None
    actors = sorted(run.actors, key=lambda actor: -actor.machine_us)[:MAX_ACTORS]

    def parts(actor: ActorRecord) -> tuple[int, int, int]:
        computing = sum(actor.phases_us[phase] for phase in _COMPUTING)
        starting = actor.phases_us["startup"] + actor.phases_us["load"]
        return starting, computing, actor.machine_us - computing - starting

    def draw(axes: Axes) -> None:
        begin = [actor.began_us / 1e6 for actor in actors]
        for i, label in enumerate(("starting", "computing", "idle")):
            values = [parts(actor)[i] / 1e6 for actor in actors]
            axes.barh(range(len(actors)), values, 0.7, left=begin, label=label, color=SERIES[i], hatch=HATCHES[i],
                      edgecolor=INK, linewidth=0.4)  # fmt: skip
            begin = [start + value for start, value in zip(begin, values)]
        axes.set_yticks(range(len(actors)), [str(actor.actor) for actor in actors])
        axes.set_ylim(max(3, len(actors)) - 0.5, -0.5)  # the first on top
        axes.grid(axis="y", visible=False)
        axes.set_ylabel("engine")
        axes.set_xlabel("seconds of its last run")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=3)

    idle = sum(parts(actor)[2] for actor in run.actors) / run.machine_us
    some = f" The {MAX_ACTORS} that took longest, of {len(run.actors):,}." if len(run.actors) > MAX_ACTORS else ""
    height = 1.2 + 0.16 * max(4, len(actors))
    return chart("actors", "Time of each engine", f"{percent(idle)} of it idle.{some}", draw, height)
