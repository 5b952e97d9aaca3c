"""The tables of a job's report, as rows of text. `render.py` and `html/page.py` show them alike."""

from pipeline.formatting import printable
from pipeline.report.estimate import EstimateAndActual
from pipeline.report.number_formats import bar, money, percent, seconds
from pipeline.report.record.row_stats import ErrorExample
from pipeline.report.record.run_record import RunRecord
from pipeline.report.run_report import RunReport
from pipeline.report.sections.drafts import Speculated


def phase_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Phase, time, share, and the share as a bar; those that took no time are left out."""
    shares = [(phase, us, _share(us, report.machine_us)) for phase, us in report.phases_us.items() if us]
    return [(phase, seconds(us), percent(share), bar(share)) for phase, us, share in shares]


def run_row(run: RunRecord) -> tuple[str, ...]:
    tokens = run.input_tokens, run.cached_tokens, run.error_input_tokens, run.generated_tokens
    counts = [f"{count:,}" for count in (run.rows_written, *tokens)]
    ran = run.run_id, run.started_at, run.outcome, seconds(run.wall_us), str(len(run.actors))
    return *ran, *counts, money(run.hourly_usd)


def latency_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
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


def length_rows(report: RunReport) -> list[tuple[str, str, str, str, str, str, str, float]]:
    """Label, rows, tokens in, those of them from cache, tokens out, time, money, and its share."""
    return [
        (
            f"up to {length.longest:,}",
            f"{length.rows.rows:,}",
            f"{length.rows.input_tokens:,}",
            f"{length.rows.cached_tokens:,}",
            f"{length.rows.generated_tokens:,}",
            seconds(length.machine_us),
            money(length.usd),
            _share(length.machine_us, report.machine_us),
        )
        for length in report.lengths
    ]


def unseen_rows(report: RunReport) -> str:
    rows = report.rows.completed - sum(length.rows.rows for length in report.lengths)
    return f" {rows:,} rows that a killed run wrote after its last record are not among them." if rows > 0 else ""


def fault_rows(report: RunReport) -> list[tuple[str, str, str, str, str]]:
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


def draft_rows(speculated: Speculated | None) -> list[tuple[str, str, str, str, str, float]]:
    """By sequences at once: steps, those with drafts, tokens a sequence got in one of these, time saved, and the share
    of the steps in which drafting was on."""
    told = []
    for line in speculated.batches if speculated is not None else ():
        steps, saved = line.plain_steps + line.drafted_steps, f"{line.saved_s:+,.2f} s"
        tokens = f"{line.tokens_per_sequence_step:.2f}" if line.drafted_steps else ""
        told.append((line.batch, f"{steps:,}", f"{line.drafted_steps:,}", tokens, saved, line.on_steps / steps))
    return told


def target_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Target, its limit, what came, and whether it was kept."""

    def shown(value: float | None) -> str:
        return "unknown" if value is None else f"{value:,.4g}"

    return [(t.key, shown(t.limit), shown(t.actual), "missed" if t.is_missed else "kept") for t in report.targets]


_SHOWN = {"rows": "rows", "prompt_tokens": "prompt tokens computed", "generated_tokens": "generated tokens",
          "machine_us": "machine time", "wall_us": "time", "usd": "US dollars"}  # fmt: skip


def estimate_rows(both: EstimateAndActual) -> list[tuple[str, str, str, str]]:
    """What, expected, what came, and the ratio; phases of which nothing was expected and nothing came are left out."""

    def shown(what: str, value: float) -> str:
        if what in ("rows", "prompt_tokens", "generated_tokens"):
            return f"{value:,.0f}"
        return money(value) if what == "usd" else seconds(round(value))

    return [
        (
            _SHOWN.get(line.what, f"  {line.what}"),
            shown(line.what, line.expected),
            shown(line.what, line.actual),
            "" if line.ratio is None else f"{line.ratio:.2f}",
        )
        for line in both.lines
        if line.expected or line.actual
    ]


def saving_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """What saved, how much time and money, and against what."""
    return [
        (saving.title, seconds(saving.saved_us), money(saving.usd), f"{saving.basis}: {saving.against}")
        for saving in report.savings
    ]


def error_rows(report: RunReport) -> list[tuple[str, str, str, str, str]]:
    """Code, rows, tokens that were computed for them, time and money."""
    return [
        (code, f"{cost.rows:,}", f"{cost.lost.all:,}", seconds(cost.machine_us), money(cost.usd))
        for code, cost in report.error_costs.items()
    ]


def example_line(example: ErrorExample) -> str:
    return printable(" ".join(example.line().split()))


def cost_rows(report: RunReport) -> list[tuple[str, str]]:
    cost = report.cost
    if cost.total_usd is None:
        why = f"unpriced ({cost.unpriced_runs} runs without a price)" if cost.unpriced_runs > 1 else "unpriced"
        return [("Total", why)]
    each = [
        ("Total", cost.total_usd),
        ("per 1M prompt tokens", cost.per_1m_prompt_usd),
        ("  those from cache included", cost.per_1m_with_cached_usd),
        ("per 1M generated tokens", cost.per_1m_generated_usd),
        ("per 1M tokens, both", cost.per_1m_blended_usd),
        ("per row", cost.per_row_usd),
    ]
    if not report.has_generated:
        thousand = None if cost.per_row_usd is None else 1000 * cost.per_row_usd
        each = [*each[:3], ("per 1,000 rows", thousand)]
    return [(label, "n/a" if usd is None else money(usd)) for label, usd in each]


def _share(us: int, total_us: int) -> float:
    return us / total_us if total_us else 0.0
