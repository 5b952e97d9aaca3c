"""Writes a job's report out for people: text for a terminal, Markdown for `report.md`.

Owns number formats and layout; every number comes from `cost.RunReport`. Names and messages in it are data: on a page
they are escaped, for a terminal spelled out.
"""

import re
from collections.abc import Sequence
from html import escape
from math import floor, log10
from textwrap import wrap

from pipeline.formatting import printable
from pipeline.report.cost import RunReport, Work
from pipeline.report.drafts import Speculated
from pipeline.report.row_stats import HISTOGRAM_ERROR, ErrorExample
from pipeline.report.run_record import PHASE_MEANING, SkippedInput, per_second

LATENCY_NOTE = "From when the engine took the row in, its queue included: a batch trades it for throughput"
LATENCY_ERROR = f"From histograms: off by at most {HISTOGRAM_ERROR * 100:.1f} % of itself"
LENGTHS_NOTE = (
    "Completed rows. Time is all machine time, divided as the cost is: what prompts are charged by prompt tokens"
    " computed, the rest by generated ones; rows share steps, so that no row has a time of its own"
)
DRAFTS_NOTE = (
    "Bars: the share of steps in which drafting was on. Saved: against plain steps, by the measured cost of steps"
)
_WIDTH = 100  # of a terminal
_NARROW = 20
_BAR_WIDTH = 30
_ENDED = {
    "finished": "finished",
    "stopped": "stopped by run.max_error_rate",
    "interrupted": "interrupted; the same command goes on",
    "failed": "failed; the same command goes on",
    "killed": "killed; the same command goes on",
    "running": "not finished",
}


class _Markdown(str):
    """A cell that is Markdown of our own making, not data."""


def text(report: RunReport) -> str:
    """The report as a terminal shows it at the end of a run."""
    lines = [f"{printable(report.job)}: {_ENDED.get(report.outcome, report.outcome)}", ""]
    for label, value in _facts(report):
        lines += wrap(value, _WIDTH, initial_indent=f"  {label:<12}", subsequent_indent=" " * 14)
    lines += ["", "  Where the machine time went"]
    for phase, us in report.phases_us.items():
        share = _share(us, report.machine_us)
        lines.append(f"    {phase:<10}{seconds(us):>10}{share * 100:>7.1f} %  {bar(share)}".rstrip())
    lines += ["", "  Cost"]
    lines += [f"    {label:<28}{value:>14}" for label, value in _cost(report)]
    if report.cost.total_usd is None:
        lines.append("    To price it, set cost.hourly_usd: what one actor's machine costs for an hour.")
    if latency := _latency(report):
        lines += ["", f"  Latency of a row{'p50':>17}{'p95':>12}{'p99':>12}"]
        lines += [f"    {label:<22}{p50:>9}{p95:>12}{p99:>12}" for label, p50, p95, p99 in latency]
        lines.append(f"    {LATENCY_NOTE}.")
    if report.lengths:
        lines += ["", f"  By length of prompt{'rows':>9}{'tokens in':>14}{'from cache':>13}{'out':>13}{'time':>9}"]
        lines += [
            f"    {label:<16}{rows:>9}{read:>14}{cached:>13}{generated:>13}{time:>9}  {bar(share, _NARROW)}".rstrip()
            for label, rows, read, cached, generated, time, share in _lengths(report)
        ]
    if report.speculated and report.speculated.batches:
        lines += ["", f"  Drafts by sequences at once{'steps':>9}{'with drafts':>14}{'tokens/step':>14}{'saved':>10}"]
        lines += [
            f"    {at_once:<24}{steps:>8}{drafted:>14}{tokens:>14}{saved:>10}  {bar(on, _NARROW)}".rstrip()
            for at_once, steps, drafted, tokens, saved, on in _drafts(report.speculated)
        ]
        lines.append(f"    {DRAFTS_NOTE}.")
    if report.examples:
        lines += ["", "  Error rows"]
        for code, examples in report.examples.items():
            lines.append(f"    {code}: {report.rows.errors_by_code.get(code, 0):,}")
            for example in examples:
                lines += wrap(
                    _example(example), _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8, break_on_hyphens=False
                )
    if report.faults:
        lines += ["", f"  What faults cost, estimated{'times':>24}{'tokens':>14}{'time':>10}{'USD':>15}"]
        lines += [
            f"    {title:<44}{count:>7}{tokens:>14}{time:>10}{usd:>15}".rstrip()
            for title, count, tokens, time, usd in _faults(report)
        ]
    if len(report.runs) > 1:
        lines += ["", f"  Over {len(report.runs)} runs"]
        lines += [
            f"    {run.run_id:<26}{run.outcome:<12}{seconds(run.wall_us):>10}{run.rows_written:>12,} rows"
            for run in report.runs
        ]
    return "\n".join(lines)


def markdown(report: RunReport) -> str:
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
                _bar_cell(share),
            )
        )
    phases.append((_Markdown("**all**"), "machine time of all actors", seconds(report.machine_us), "", ""))
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
    if latency := _latency(report):
        lines += ["", "## Latency of a row", ""]
        lines += _table(["", "p50", "p95", "p99"], latency)
        lines += ["", f"{LATENCY_NOTE}. {LATENCY_ERROR}."]
    if report.speculated and report.speculated.batches:
        lines += ["", "## Drafts by sequences at once", ""]
        head = ["sequences at once", "steps", "with drafts", "tokens a sequence and step", "saved", "on"]
        lines += _table(head, [(*told, _bar_cell(on, _NARROW)) for *told, on in _drafts(report.speculated)])
        lines += ["", f"{DRAFTS_NOTE}."]
    if report.lengths:
        lines += ["", "## Rows by length of prompt", ""]
        lines += _table(
            ["prompt tokens", "rows", "tokens in", "of them from cache", "tokens out", "machine time", "share", ""],
            [(*told, f"{share * 100:.1f} %", _bar_cell(share)) for *told, share in _lengths(report)],
        )
        lines += ["", f"{LENGTHS_NOTE}.{_unseen_rows(report)}"]
    if report.rows.errors_by_code:
        lines += ["", "## Error rows by code", ""]
        shown = [
            (code, f"{n:,}", _Markdown("<br>".join(_cell(_example(e)) for e in report.examples.get(code, ()))))
            for code, n in report.rows.errors_by_code.items()
        ]
        lines += _table(["code", "rows", "for example"], shown)
    if skipped := _skipped(report):
        lines += ["", "## Damaged files, left out as `input.on_corrupt: skip` asks", ""]
        lines += _table(["file", "bytes", "why"], [(f.file, f"{f.bytes:,}", f.reason) for f in skipped])
    if report.faults:
        lines += ["", "## What faults cost, estimated", ""]
        lines += _table(["fault", "times", "tokens", "machine time", "US dollars"], _faults(report))
        lines += ["", "Tokens that were computed for nothing or computed again. How the machine time is estimated:", ""]
        lines += [f"- {fault.title}: {fault.how}." for fault in report.faults]
        if any(fault.at_least for fault in report.faults):
            lines += ["", "At least: of a killed run's last second or two, after its last record, nothing is known."]
    if report.work.restart_reasons:
        lines += ["", "How engine processes ended (what they printed: `_pipeline/logs/<run>/engine-<actor>.log`):", ""]
        lines += [f"- {count:,} times: {_cell(reason)}" for reason, count in report.work.restart_reasons.items()]
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
            "of them from cache",
            "in error rows",
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
                f"{run.cached_tokens:,}",
                f"{run.error_input_tokens:,}",
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


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """A text bar of a share; what is written as more than 0.0 % shows."""
    return "█" * max(round(share * width), 1 if share >= 0.0005 else 0)


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


def _skipped(report: RunReport) -> list[SkippedInput]:
    return report.runs[-1].skipped_files if report.runs else []


def _facts(report: RunReport) -> list[tuple[str, str]]:
    rows, tokens, work = report.rows, report.tokens, report.work
    facts = [("Rows", f"{rows.written:,} of {rows.input:,}: {rows.completed:,} completed, {rows.errors:,} errors")]
    if rows.errors_by_code:
        facts.append(("Errors", ", ".join(f"{code} {n:,}" for code, n in rows.errors_by_code.items())))
    if skipped := _skipped(report):
        facts.append(("Left out", f"{len(skipped):,} damaged files, {sum(f.bytes for f in skipped):,} bytes"))
    counts = (
        f"{tokens.input:,} in ({tokens.computed:,} computed, {tokens.cached:,} from cache), {tokens.generated:,} out"
    )
    if tokens.error_input:
        counts += f"; {tokens.error_input:,} more in prompts of error rows, not priced"
    facts.append(("Tokens", counts))
    facts.append(
        (
            "Speed",
            f"{report.input_tokens_per_s:,.0f} tok/s in (computed), {report.generated_tokens_per_s:,.0f} tok/s"
            " out, by machine time",
        )
    )
    if report.speculated is not None:
        facts.append(("Drafts", _drafting(report.speculated)))
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
    if lost := _lost(report):
        facts.append(("Lost work", lost))
    if counts := _counts(work):
        facts.append(("Faults", counts))
    if work.restarts:
        facts.append(("Logs", "_pipeline/logs has what the engines' processes printed, and how they ended"))
    facts.append(("Fingerprint", report.fingerprint[:8]))
    return facts


def _lost(report: RunReport) -> str:
    """Work that nobody got, with its price; empty where there is none and none can be hidden."""
    work = report.work
    if not (work.wasted_generated_tokens or work.wasted_prompt_tokens or work.wasted_is_lower_bound):
        return ""
    least = "at least " if work.wasted_is_lower_bound else ""
    price = "" if work.wasted_usd is None else f", {money(work.wasted_usd)}"
    return (
        f"{least}{work.wasted_generated_tokens:,} generated and {work.wasted_prompt_tokens:,} prompt tokens:"
        f" about {seconds(work.wasted_us)}{price}"
    )


def _counts(work: Work) -> str:
    counts = [
        (work.restarts, "engine restarts"),
        (work.convicted_rows, "rows that ended the engine"),
        (work.actors_replaced, "actors replaced"),
        (work.preemptions, "preemptions"),
        (work.recomputed_tokens, "tokens computed again after them"),
        (work.steps_out_of_memory, "steps that did not fit the memory"),
        (work.units_begun_again, "units begun again"),
        (work.units_lost, "units computed that were already written"),
        (work.units_found, "units found written before any work"),
        (work.taken_rows, "rows taken over from a stopped run"),
        (work.telemetry_failures, "writes of status, record or report that failed"),
    ]
    told = [f"{what} {count:,}" for count, what in counts if count]
    if work.storage_retries:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(work.storage_retries.items()))
        told.append(f"requests to a store tried again {sum(work.storage_retries.values()):,} ({kinds})")
    return ", ".join(told)


def _latency(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Empty where no row was timed."""
    labels = {
        "first_token_us": "to the first token",
        "per_token_us": "between two tokens",
        "row_us": "to the last token",
    }
    found = [(label, report.latency[name]) for name, label in labels.items() if name in report.latency]
    return [(label, _brief(p.p50), _brief(p.p95), _brief(p.p99)) for label, p in found if p.rows]


def _brief(us: int | None) -> str:
    if us is None:
        return "n/a"
    return f"{us / 1e3:.2f} ms" if us < 10_000 else seconds(us)


def _lengths(report: RunReport) -> list[tuple[str, str, str, str, str, str, float]]:
    """Label, rows, tokens in, those of them from cache, tokens out, time, and its share."""
    return [
        (
            f"up to {length.longest:,}",
            f"{length.rows.rows:,}",
            f"{length.rows.input_tokens:,}",
            f"{length.rows.cached_tokens:,}",
            f"{length.rows.generated_tokens:,}",
            seconds(length.machine_us),
            _share(length.machine_us, report.machine_us),
        )
        for length in report.lengths
    ]


def _unseen_rows(report: RunReport) -> str:
    rows = report.rows.completed - sum(length.rows.rows for length in report.lengths)
    return f" {rows:,} rows that a killed run wrote after its last record are not among them." if rows > 0 else ""


def _faults(report: RunReport) -> list[tuple[str, str, str, str, str]]:
    """Title, times, tokens, time and money."""
    told = []
    for fault in report.faults:
        count = f"{fault.count:,}" if fault.count else ""
        if fault.machine_us or fault.tokens.all:
            least = "≥ " if fault.at_least else ""
            usd = "unpriced" if fault.usd is None else money(fault.usd)
            told.append((fault.title, count, f"{least}{fault.tokens.all:,}", seconds(fault.machine_us), usd))
        else:
            told.append((fault.title, count, "", "", ""))
    return told


def _drafting(speculated: Speculated) -> str:
    """Speculative decoding in a sentence."""
    if not speculated.drafted:
        return "none: they would not have paid"
    accepted, drafted = sum(speculated.accepted), sum(speculated.drafted)
    places = ", ".join(f"{share * 100:.0f}" for share in speculated.acceptance)
    told = (
        f"in {speculated.draft_steps:,} of {speculated.steps:,} steps; {accepted:,} of {drafted:,} draft tokens "
        f"accepted, by place {places} %"
    )
    if not speculated.batches:
        return f"{told}; forced in every step"
    saved = speculated.saved_us
    return f"{told}; about {seconds(abs(saved))} {'saved' if saved >= 0 else 'lost'} (estimated)"


def _drafts(speculated: Speculated) -> list[tuple[str, str, str, str, str, float]]:
    """By sequences at once: steps, those with drafts, tokens a sequence got in one of these, time saved, and the share
    of the steps in which drafting was on."""
    told = []
    for line in speculated.batches:
        steps, saved = line.plain_steps + line.drafted_steps, f"{line.saved_s:+.2f} s"
        tokens = f"{line.tokens_per_sequence_step:.2f}" if line.drafted_steps else ""
        told.append((line.batch, f"{steps:,}", f"{line.drafted_steps:,}", tokens, saved, line.on_steps / steps))
    return told


def _example(example: ErrorExample) -> str:
    return printable(" ".join(example.line().split()))


def _cost(report: RunReport) -> list[tuple[str, str]]:
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


def _bar_cell(share: float, width: int = _BAR_WIDTH) -> str:
    return _Markdown(f"`{bar(share, width)}`" if bar(share, width) else "")


def _table(head: list[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows
    ]


def _cell(value: str) -> str:
    """Of a table, or text in a line: data cannot be Markdown or HTML there."""
    if isinstance(value, _Markdown):
        return value
    shown = escape(printable(" ".join(value.split())), quote=False)
    return re.sub(r"([\\|\[`])", r"\\\1", shown)
