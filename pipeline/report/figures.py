"""A job's report as rows of text, which the terminal and the page show alike (`render`), and the formats of numbers."""

from collections.abc import Sequence
from math import floor, log10

from pipeline.formatting import printable
from pipeline.report.cost import RunReport, Work
from pipeline.report.estimate import EstimateAndActual
from pipeline.report.record.row_stats import ErrorExample
from pipeline.report.record.run_record import RunRecord, SkippedInput, per_second
from pipeline.report.sections.drafts import Speculated

BAR_WIDTH = 30


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A text bar of a share; what is written as more than 0.0 % shows."""
    return "█" * max(round(share * width), 1 if share >= 0.0005 else 0)


def seconds(us: int) -> str:
    """A duration to read: `850 ms`, `12.3 s`, `4 m 05 s`, `2 h 07 m`."""
    if us < 0:
        return f"-{seconds(-us)}"
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
    if usd < 0:
        return f"-{money(-usd)}"
    cents = usd * 100
    if usd == 0 or usd >= 1 or (cents > 0.5 and abs(cents - round(cents)) < 1e-9):
        return f"${usd:,.2f}"
    return f"${usd:.{2 - floor(log10(usd))}f}"


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """A line for each row, in columns as wide as they must be; the first `num_left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = ["<"] * num_left + [">"] * len(widths)
    return ["  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths)).rstrip() for row in rows]


def skipped_files(report: RunReport) -> list[SkippedInput]:
    return report.runs[-1].skipped_files if report.runs else []


def facts(report: RunReport) -> list[tuple[str, str]]:
    """Label and what there is to say; labels without anything to say are left out."""
    rows, tokens, work = report.rows, report.tokens, report.work
    errors = ", ".join(f"{code} {n:,}" for code, n in rows.errors_by_code.items())
    skipped = skipped_files(report)
    left_out = f"{len(skipped):,} damaged files, {sum(f.bytes for f in skipped):,} bytes"
    counts = (
        f"{tokens.input:,} in ({tokens.computed:,} computed, {tokens.cached:,} from cache), {tokens.generated:,} out"
    )
    if tokens.error_input:
        counts += f"; {tokens.error_input:,} more in prompts of error rows, not priced"
    speed_in, speed_out = report.input_tokens_per_s, report.generated_tokens_per_s
    decode_rate = per_second(work.generated_tokens, report.phases_us["decode"])
    speed = f"{speed_in:,.0f} tok/s in (computed), {speed_out:,.0f} tok/s out, by machine time"
    if not report.has_generated:
        speed = f"{report.rows_per_s:,.1f} rows/s, {speed_in:,.0f} tok/s in (computed), by machine time"
    decoding = f"{decode_rate:,.0f} tok/s while decoding; " if report.has_generated else ""
    engine = f"{decoding}{work.mean_batch:.1f} sequences a step, KV cache {work.mean_kv_used * 100:.0f} % used"
    logs = "_pipeline/logs has what the engines' processes printed, and how they ended"
    samples = f"; {rows.output:,} in the output, one for each sample" if rows.further_samples else ""
    written = f"{rows.written:,} of {rows.input:,}: {rows.completed:,} completed, {rows.errors:,} errors"
    facts = [
        ("Rows", written + samples),
        ("Errors", errors),
        ("Left out", left_out if skipped else ""),
        ("Looped", _looped(report)),
        ("Reasoning", _reasoning(report)),
        ("Tokens", counts),
        ("Speed", speed),
        ("Drafts", _drafting(report.speculated) if report.speculated is not None else ""),
        ("Engine", engine if work.steps else ""),
        ("Quality", _quality(report)),
        ("Grammars", _grammars(work)),
        ("Time", f"{seconds(report.wall_us)} wall, {seconds(report.machine_us)} of machine time"),
        ("Energy", _energy(report)),
        ("Pool", _pool(report)),
        ("Retried", _retried(report)),
        ("Lost work", _lost(report)),
        ("Faults", _counts(work)),
        ("Logs", logs if work.restarts else ""),
        ("Fingerprint", report.fingerprint[:8]),
    ]
    return [(label, value) for label, value in facts if value]


def _grammars(work: Work) -> str:
    """Structured outputs in a sentence; empty where no row had any."""
    if not work.masked_tokens and not work.forced_tokens:
        return ""
    masks = f"{work.filled_masks:,} masks in {seconds(work.mask_us)}"
    return f"{work.masked_tokens:,} tokens allowed, {masks}; {work.forced_tokens:,} forced, without a step"


def _energy(report: RunReport) -> str:
    """Empty where no machine tells it."""
    each, what = report.joules_per_generated_token, "a generated token"
    if each is None and report.energy_uj is not None and report.rows.completed:
        each, what = report.energy_uj / 1e6 / report.rows.completed, "a row"
    if report.energy_uj is None or each is None:
        return ""
    kwh = report.energy_uj / 3.6e12
    counted = sorted({str(run.resolved["energy"]) for run in report.runs if "energy" in run.resolved})
    whole = f"{kwh:,.3g} kWh" if kwh >= 1 else f"{kwh * 1000:,.3g} Wh"
    return f"{whole}, {each:.3g} J {what} ({'; '.join(counted)})"


def _quality(report: RunReport) -> str:
    """How far what was served is from the reference model."""
    found = report.quality
    return "" if found is None else f"{found.told()}; {seconds(found.quality_us)} of machine time"


def _looped(report: RunReport) -> str:
    """Rows that repeated themselves, and what their tokens cost."""
    loops = report.loops
    if loops is None:
        return ""
    price = "" if loops.usd is None else f", {money(loops.usd)}"
    return (
        f"{loops.rows:,} rows repeated themselves and were ended (sampling.repetition_detection);"
        f" {loops.generated_tokens:,} generated tokens, about {seconds(loops.machine_us)}{price}"
    )


def _reasoning(report: RunReport) -> str:
    """How much of what was generated is reasoning, and what that cost."""
    found = report.reasoning
    if found is None:
        return ""
    price = "" if found.usd is None else f", {money(found.usd)}"
    return (
        f"{found.tokens:,} generated tokens before the answers of {found.rows:,} rows, {found.share:.0%} of all; about "
        f"{seconds(found.machine_us)}{price}"
    )


def _retried(report: RunReport) -> str:
    """What was computed again under other limits than the job's."""
    told = []
    for run in report.runs:
        if run.retried_limits and run.rows_written:
            limits = ", ".join(f"{key} {value or 'left out'}" for key, value in run.retried_limits.items())
            told.append(f"{run.rows_written:,} error rows again under {limits} (run {run.run_id[:4]})")
    return "; ".join(told)


def _pool(report: RunReport) -> str:
    """How elastic pools grew and shrank."""
    actors = [actor for run in report.runs for actor in run.actors]
    joined = sum(actor.began_us > 0 and actor.replaces is None for actor in actors)
    back = sum(actor.given_back for actor in actors)
    if not joined and not back:
        return ""
    return f"{len(actors)} engines: {joined} joined after the start, {back} given back before the end"


def phase_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """Phase, time, share, and the share as a bar; those that took no time are left out."""
    shares = [(phase, us, _share(us, report.machine_us)) for phase, us in report.phases_us.items() if us]
    return [(phase, seconds(us), percent(share), bar(share)) for phase, us, share in shares]


def run_row(run: RunRecord) -> tuple[str, ...]:
    tokens = run.input_tokens, run.cached_tokens, run.error_input_tokens, run.generated_tokens
    counts = [f"{count:,}" for count in (run.rows_written, *tokens)]
    ran = run.run_id, run.started_at, run.outcome, seconds(run.wall_us), str(len(run.actors))
    return *ran, *counts, money(run.hourly_usd)


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
        (work.machines_lost, "machines lost"),
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


def draft_rows(speculated: Speculated | None) -> list[tuple[str, str, str, str, str, float]]:
    """By sequences at once: steps, those with drafts, tokens a sequence got in one of these, time saved, and the share
    of the steps in which drafting was on."""
    told = []
    for line in speculated.batches if speculated is not None else ():
        steps, saved = line.plain_steps + line.drafted_steps, f"{line.saved_s:+.2f} s"
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


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"
