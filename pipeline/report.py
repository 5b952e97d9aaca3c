"""Writes a job's report out for people: text for a terminal, Markdown for `report.md`.

Owns number formats and layout; every number comes from `cost.RunReport`.
"""

from math import floor, log10
from typing import TYPE_CHECKING

from pipeline.metrics import PHASE_MEANING, per_second

if TYPE_CHECKING:
    from pipeline.cost import RunReport

_BAR_WIDTH = 30
_ENDED = {
    "finished": "finished",
    "stopped": "stopped by run.max_error_rate",
    "interrupted": "interrupted; the same command goes on",
    "failed": "failed; the same command goes on",
    "killed": "killed; the same command goes on",
    "running": "not finished",
}


def text(report: "RunReport") -> str:
    """The report as a terminal shows it at the end of a run."""
    lines = [f"{report.job}: {_ENDED.get(report.outcome, report.outcome)}", ""]
    lines += [f"  {label:<12}{value}" for label, value in _facts(report)]
    lines += ["", "  Where the machine time went"]
    for phase, us in report.phases_us.items():
        share = _share(us, report.machine_us)
        lines.append(f"    {phase:<10}{seconds(us):>10}{share * 100:>7.1f} %  {bar(share)}".rstrip())
    lines += ["", "  Cost"]
    lines += [f"    {label:<28}{value:>14}" for label, value in _cost(report)]
    if report.cost.total_usd is None:
        lines.append("    To price it, set cost.hourly_usd: what one actor's machine costs for an hour.")
    if len(report.runs) > 1:
        lines += ["", f"  Over {len(report.runs)} runs"]
        lines += [
            f"    {run.run_id:<26}{run.outcome:<12}{seconds(run.wall_us):>10}{run.rows_written:>12,} rows"
            for run in report.runs
        ]
    return "\n".join(lines)


def markdown(report: "RunReport") -> str:
    """The report as `report.md` keeps it."""
    lines = [f"# {_cell(report.job)}", "", f"Outcome: **{_ENDED.get(report.outcome, report.outcome)}**", ""]
    lines += _table(["", ""], _facts(report))
    lines += ["", "## Where the machine time went", ""]
    phases = []
    for phase, us in report.phases_us.items():
        share = _share(us, report.machine_us)
        phases.append(
            (
                phase,
                PHASE_MEANING[phase],
                seconds(us),
                f"{share * 100:.1f} %",
                f"`{bar(share)}`" if bar(share) else "",
            )
        )
    phases.append(("**all**", "machine time of all actors", seconds(report.machine_us), "", ""))
    lines += _table(["phase", "what it is", "time", "share", ""], phases)
    lines += ["", f"Writing results took {seconds(report.write_us)} beside it."]
    if report.driver_us:
        driver = ", ".join(f"{name.removesuffix('_us')} {seconds(us)}" for name, us in report.driver_us.items())
        lines += [f"The driver's own time, not in the machine time: {driver}."]
    lines += ["", "## Cost", ""]
    lines += _table(["", "US dollars"], _cost(report))
    if report.cost.total_usd is None:
        lines += ["", "Unpriced: set `cost.hourly_usd`, what one actor's machine costs for an hour."]
    lines += ["", f"How it is divided: {report.cost.method}."]
    if report.rows.errors_by_code:
        lines += ["", "## Error rows by code", ""]
        lines += _table(["code", "rows"], [(code, f"{n:,}") for code, n in report.rows.errors_by_code.items()])
    lines += ["", "## Runs", ""]
    lines += _table(
        [
            "run",
            "started",
            "outcome",
            "wall",
            "actors",
            "rows written",
            "tokens in",
            "tokens out",
            "USD per hour",
        ],
        [
            (
                run.run_id,
                run.started_at,
                run.outcome,
                seconds(run.wall_us),
                str(len(run.actors)),
                f"{run.rows_written:,}",
                f"{run.input_tokens:,}",
                f"{run.generated_tokens:,}",
                money(run.hourly_usd),
            )
            for run in report.runs
        ],
    )
    if report.runs:
        last = report.runs[-1]
        lines += ["", "## What it ran on (last run)", ""]
        lines += _table(["", ""], [(key, str(value)) for key, value in (last.resolved | last.versions).items()])
    return "\n".join(lines) + "\n"


def bar(share: float) -> str:
    """A text bar of a share; what is written as more than 0.0 % shows."""
    return "█" * max(round(share * _BAR_WIDTH), 1 if share >= 0.0005 else 0)


def seconds(us: int) -> str:
    """A duration to read: `850 ms`, `12.3 s`, `4 m 05 s`, `2 h 07 m`."""
    s = us / 1e6
    if s < 1:
        return f"{us / 1e3:.0f} ms"
    if s < 99.95:
        return f"{s:.1f} s"
    minutes, rest = divmod(round(s), 60)
    return f"{minutes} m {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} m"


def money(usd: float | None) -> str:
    """US dollars with three significant digits below one dollar; no price is `unpriced`, never 0."""
    if usd is None:
        return "unpriced"
    cents = usd * 100
    if usd == 0 or usd >= 1 or (cents > 0.5 and abs(cents - round(cents)) < 1e-9):
        return f"${usd:,.2f}"
    return f"${usd:.{2 - floor(log10(usd))}f}"


def _facts(report: "RunReport") -> list[tuple[str, str]]:
    rows, tokens, work = report.rows, report.tokens, report.work
    facts = [("Rows", f"{rows.written:,} of {rows.input:,}: {rows.completed:,} completed, {rows.errors:,} errors")]
    if rows.errors_by_code:
        facts.append(("Errors", ", ".join(f"{code} {n:,}" for code, n in rows.errors_by_code.items())))
    facts.append(("Tokens", f"{tokens.input:,} in ({tokens.cached:,} from cache), {tokens.generated:,} out"))
    facts.append(
        (
            "Speed",
            f"{report.input_tokens_per_s:,.0f} tok/s in, {report.generated_tokens_per_s:,.0f} tok/s"
            " out, by machine time",
        )
    )
    decode_rate = per_second(work.generated_tokens, report.phases_us["decode"])
    if work.steps:
        facts.append(
            (
                "Engine",
                f"{decode_rate:,.0f} tok/s while decoding; {work.mean_batch:.1f} sequences a step,"
                f" KV cache {work.mean_kv_used * 100:.0f} % used",
            )
        )
    facts.append(("Time", f"{seconds(report.wall_us)} wall, {seconds(report.machine_us)} of machine time"))
    lost = []
    if work.wasted_generated_tokens or work.wasted_is_lower_bound:
        least = "at least " if work.wasted_is_lower_bound else ""
        lost.append(f"{least}{work.wasted_generated_tokens:,} generated tokens not delivered")
    if work.recomputed_tokens:
        lost.append(f"{work.recomputed_tokens:,} tokens computed again after {work.preemptions:,} preemptions")
    if work.units_lost:
        lost.append(f"{work.units_lost:,} units found already written")
    if work.restarts:
        lost.append(f"{work.restarts:,} engine restarts")
    if lost:
        facts.append(("Lost work", ", ".join(lost)))
    facts.append(("Fingerprint", report.fingerprint[:8]))
    return facts


def _cost(report: "RunReport") -> list[tuple[str, str]]:
    cost = report.cost
    if cost.total_usd is None:
        why = f"unpriced ({cost.unpriced_runs} runs without a price)" if cost.unpriced_runs > 1 else "unpriced"
        return [("Total", why)]
    each = [
        ("Total", cost.total_usd),
        ("per 1M prompt tokens", cost.per_1m_prompt_usd),
        ("per 1M generated tokens", cost.per_1m_generated_usd),
        ("per 1M tokens, both", cost.per_1m_blended_usd),
        ("per row", cost.per_row_usd),
    ]
    return [(label, "n/a" if usd is None else money(usd)) for label, usd in each]


def _share(us: int, total_us: int) -> float:
    return us / total_us if total_us else 0.0


def _table(head: list[str], rows: list) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows
    ]


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
