"""Sections of a job's report, declared once and rendered by `render.py` for terminals, Markdown and html."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.formatting import counted, duration, money, percent
from pipeline.report.faults import FAULTS
from pipeline.report.record.row_stats import HISTOGRAM_ERROR
from pipeline.report.record.run_record import PHASE_MEANING, RunRecord, per_second, summed
from pipeline.report.run_report import RunReport

_LATENCIES = {
    "first_token_us": "to first token",
    "per_token_us": "between tokens",
    "row_us": "to last token",
}
_ESTIMATED = {
    "rows": "rows",
    "prompt_tokens": "prompt tokens computed",
    "generated_tokens": "generated tokens",
    "machine_us": "machine time",
    "wall_us": "time",
    "usd": "US dollars",
}
_ENDED = {
    "finished": "finished",
    "sampled": "a sample was computed; run the same command without --sample for the other rows",
    "stopped": "stopped by run.max_error_rate",
    "interrupted": "interrupted; run the same command to resume",
    "failed": "failed; run the same command to resume",
    "killed": "killed; run the same command to resume",
    "running": "not finished",
}


@dataclass(frozen=True)
class Bar:
    """Table cell with a bar of this share."""

    share: float


Cell = str | Bar


@dataclass(frozen=True, kw_only=True)
class Section:
    """Table with notes below. sides: alignment `<` or `>` per column; the last one applies to all further columns.
    on_terminal: False for sections that only Markdown and html show."""

    title: str
    columns: Sequence[str] = ()
    sides: str = "<>"
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    on_terminal: bool = True


def sections(report: RunReport) -> list[Section]:
    """Return the sections that are not empty."""
    return [section for section in _sections(report) if section.rows]


def outcome_text(report: RunReport) -> str:
    """Return how the job's last run ended, and what to do."""
    limit = report.runs[-1].stopped_by if report.runs else ""
    if limit and report.outcome == "interrupted":
        raised = "raise it and " * (limit != "run.max_runtime")
        return f"stopped at {limit}; {raised}run the same command to resume"
    return _ENDED.get(report.outcome, report.outcome)


def _sections(report: RunReport) -> Iterator[Section]:
    yield Section(title="Summary", sides="<", rows=[row for row in _summary(report) if row[1]])
    yield _phases(report)
    yield _cost(report)
    yield from _estimate(report)
    yield Section(
        title="Latency per row",
        columns=("", "p50", "p95", "p99"),
        rows=[
            (label, *("n/a" if us is None else _time(us) for us in (p.p50, p.p95, p.p99)))
            for name, label in _LATENCIES.items()
            if (p := report.latency.get(name)) is not None and p.rows
        ],
        notes=[
            "From when the row was added to the engine, including its time in the queue: batching trades latency for "
            f"throughput. From histograms with an error of at most {percent(HISTOGRAM_ERROR)}."
        ],
    )
    yield _steps(report)
    yield _lengths(report)
    yield _speculation(report)
    yield Section(
        title="Error rows",
        columns=("code", "rows", "tokens computed", "time", "USD"),
        rows=[
            (code, f"{cost.rows:,}", f"{cost.computed_tokens.all:,}", _time(cost.machine_us), money(cost.usd))
            for code, cost in report.error_costs.items()
        ],
    )
    yield Section(
        title="Examples of error rows",
        columns=("code", "row", "message"),
        sides="<",
        rows=[
            (code, f"{example.source_file} row {example.row}", " ".join(example.message.split()))
            for code, examples in report.examples.items()
            for example in examples
        ],
    )
    yield from _faults(report)
    runs = report.runs
    yield Section(
        title="Skipped damaged files (input.on_corrupt: skip)",
        columns=("file", "bytes", "reason"),
        sides="<><",
        rows=[(f.file, f"{f.bytes:,}", f.reason) for f in (runs[-1].skipped_files if runs else ())],
        on_terminal=False,
    )
    yield Section(
        title="Runs",
        columns=("run", "outcome", "time", "engines", "rows written", "tokens in", "tokens out", "USD per hour"),
        sides="<<>",
        rows=[
            (run.run_id, run.outcome, _time(run.wall_us), str(len(run.actors)), f"{run.rows_written:,}",
             f"{run.input_tokens:,}", f"{run.generated_tokens:,}", money(run.hourly_usd))
            for run in runs
        ],
        on_terminal=len(runs) > 1,
    )  # fmt: skip
    yield Section(
        title="Environment of the last run",
        sides="<",
        rows=[(key, str(value)) for key, value in (runs[-1].resolved | runs[-1].versions).items()] if runs else [],
        on_terminal=False,
    )


def _time(us: float) -> str:
    return duration(us / 1e6)


def _share(us: int, whole_us: int) -> float:
    return us / whole_us if whole_us else 0.0


def _phases(report: RunReport) -> Section:
    work = report.work
    counts = {
        "draft tokens rejected": work.rejected_draft_tokens,
        "tokens recomputed after preemptions": work.recomputed_tokens,
        "tokens lost or computed twice": work.wasted_prompt_tokens + work.wasted_generated_tokens,
    }
    wasted = ", ".join(f"{count:,} {label}" for label, count in counts.items() if count)
    meaning = PHASE_MEANING | {"wasted": wasted or PHASE_MEANING["wasted"]}
    rows: list[tuple[Cell, ...]] = []
    for phase, us in report.phases_us.items():
        if us:
            share = _share(us, report.machine_us)
            rows.append((phase, _time(us), percent(share), Bar(share), meaning[phase]))
    rows.append(("total", _time(report.machine_us), "", "", "machine time of all engines"))
    notes = [f"Writing results took {_time(report.write_us)}, in parallel to computing."] if report.write_us else []
    if report.driver_us:
        driver = ", ".join(f"{name.removesuffix('_us')} {_time(us)}" for name, us in report.driver_us.items())
        notes.append(f"Time of the driver, not part of the machine time: {driver}.")
    columns = ("phase", "time", "share", "", "")
    return Section(title="Machine time by phase", columns=columns, sides="<>><", rows=rows, notes=notes)


def _server(report: RunReport, requests: int) -> str:
    """Return the facts of a server's requests. requests: answered ones, over all runs."""

    def total(name: str) -> int:
        return sum(run.stat(name) for run in report.runs)

    facts = [
        f"{requests:,} requests answered, {total('batch_sum') / requests:.1f} open at once",
        f"{total('num_rejected'):,} rejected for load and {total('num_retries'):,} failed, then sent again",
        f"{total('client_us') / requests / 1000:.2f} ms of our processor time each",
    ]
    if frames := total("num_first_frames"):
        facts.append(
            f"{counted(frames, 'image')} from files with more frames or pages, of which only the first was sent"
        )
    unmetered = summed([run.unmetered for run in report.runs])
    if count := unmetered.get("num_unmetered", 0):
        prompt, generated = (unmetered.get(f"unmetered_{name}_tokens", 0) for name in ("prompt", "generated"))
        facts.append(
            f"{count:,} of unknown usage (answers without token counts, cut, or given up), not in tokens and cost: at "
            f"most {prompt:,} prompt and {generated:,} generated tokens"
        )
    return "; ".join(facts)


def _cost(report: RunReport) -> Section:
    cost = report.cost
    if cost.total_usd is None:
        runs = f" ({cost.unpriced_runs} runs without a price)" if cost.unpriced_runs > 1 else ""
        note = "Set cost.hourly_usd (--hourly-price), the price of one engine's machine per hour, to see the cost."
        return Section(title="Cost", rows=[("total", f"unpriced{runs}")], notes=[note])
    rows = [
        ("total", cost.total_usd),
        ("per 1M prompt tokens", cost.per_1m_prompt_usd),
        ("  including cached ones", cost.per_1m_with_cached_usd),
    ]
    if report.has_generated:
        rows += [
            ("per 1M generated tokens", cost.per_1m_generated_usd),
            ("per 1M tokens of both", cost.per_1m_blended_usd),
            ("per row", cost.per_row_usd),
        ]
    else:
        rows.append(("per 1,000 rows", None if cost.per_row_usd is None else 1000 * cost.per_row_usd))
    if report.rows.images:
        rows.append(("per 1,000 images", cost.per_1k_images_usd))
    note = "Prefill is charged to prompt tokens, decode to generated tokens, and all other time to both in proportion."
    if of_tokens := sum(sum(run.token_usd()) for run in report.runs):
        note = f"{money(of_tokens)} of it are the server's prices for tokens. {note}"
    if unmetered := cost.unmetered_usd:
        note = f"Requests of unknown usage may have cost up to {money(unmetered)} more. {note}"
    priced = [(label, "n/a" if usd is None else money(usd)) for label, usd in rows]
    return Section(title="Cost", columns=("", "USD"), rows=priced, notes=[note])


def _estimate(report: RunReport) -> Iterator[Section]:
    if report.estimate is None:
        return

    def figure(what: str, value: float) -> str:
        if what in ("rows", "prompt_tokens", "generated_tokens"):
            return f"{value:,.0f}"
        return money(value) if what == "usd" else _time(value)

    plan = report.estimate.estimate
    yield Section(
        title="Estimate and actual",
        columns=("", "estimate", "actual", "ratio"),
        rows=[
            (_ESTIMATED.get(line.what, f"  {line.what}"), figure(line.what, line.expected),
             figure(line.what, line.actual), "" if line.ratio is None else f"{line.ratio:.2f}")
            for line in report.estimate.lines
            if line.expected or line.actual
        ],
        notes=[f"Estimated {plan.made_at} from {plan.speeds_from}; completion lengths: {plan.lengths_from}."],
    )  # fmt: skip


def _lengths(report: RunReport) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for length in report.lengths:
        counts = length.completed
        tokens = (f"{n:,}" for n in (counts.rows, counts.input_tokens, counts.cached_tokens, counts.generated_tokens))
        share = _share(length.machine_us, report.machine_us)
        label = f"up to {length.max_prompt_tokens:,}"
        rows.append((label, *tokens, _time(length.machine_us), money(length.usd), percent(share), Bar(share)))
    note = "Completed rows only. Rows share steps, so machine time is divided by tokens, like the cost."
    unrecorded = report.rows.completed - sum(length.completed.rows for length in report.lengths)
    if unrecorded > 0:
        note += f" Without {unrecorded:,} rows that a killed run wrote after its last record."
    columns = ("prompt tokens", "rows", "tokens in", "cached", "tokens out", "time", "USD", "share", "")
    sides = "<>>>>>>><"
    return Section(title="Rows by prompt length", columns=columns, sides=sides, rows=rows, notes=[note])


def _steps(report: RunReport) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for step in report.steps:
        counts, share = step.completed, _share(step.machine_us, report.machine_us)
        passed = percent(counts.rows / max(1, report.steps[0].completed.rows))
        cached = percent(counts.cached_tokens / max(1, counts.input_tokens))
        tokens = (f"{n:,}" for n in (counts.requests, counts.input_tokens))
        rows.append(
            (step.name or "first prompt", passed, *tokens, cached, f"{counts.generated_tokens:,}",
             _time(step.machine_us), money(step.usd), percent(share), Bar(share))
        )  # fmt: skip
    note = "Completed rows only. Rows: share of those that the step's condition did not skip. Time: divided by tokens."
    columns = ("step", "rows", "requests", "tokens in", "cached", "tokens out", "time", "USD", "share", "")
    return Section(title="Steps", columns=columns, sides="<>>>>>>>><", rows=rows, notes=[note])


def _speculation(report: RunReport) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for line in report.speculation.batches if report.speculation is not None else ():
        steps, on = line.plain_steps + line.drafted_steps, line.on_steps / (line.plain_steps + line.drafted_steps)
        tokens = f"{line.tokens_per_sequence_step:.2f}" if line.drafted_steps else ""
        saved = duration(line.saved_s)
        rows.append((line.batch, f"{steps:,}", f"{line.drafted_steps:,}", tokens, saved, percent(on), Bar(on)))
    return Section(
        title="Drafts by concurrent sequences",
        columns=("sequences", "steps", "with drafts", "tokens/step", "saved", "on", ""),
        sides="<>>>>><",
        rows=rows,
        notes=["On: share of steps with drafting on. Saved: compared with plain steps, by measured times."],
    )


def _faults(report: RunReport) -> Iterator[Section]:
    rows = []
    for fault in report.faults:
        cost = (f"{fault.tokens.all:,}", _time(fault.machine_us), money(fault.usd))
        rows.append((FAULTS[fault.kind], f"{fault.count:,}", *(cost if fault.machine_us else ("", "", ""))))
    notes = [f"{FAULTS[fault.kind]}: {node}" for fault in report.faults for node in fault.nodes]
    if retries := report.work.storage_retries:
        notes.append(f"Retried requests: {', '.join(f'{kind} {retries[kind]:,}' for kind in sorted(retries))}.")
    yield Section(
        title="Faults, estimated", columns=("fault", "times", "tokens lost", "time", "USD"), rows=rows, notes=notes
    )
    yield Section(
        title="Exits of engine processes",
        columns=("reason", "times"),
        rows=[(reason, f"{count:,}") for reason, count in report.work.restart_reasons.items()],
        notes=["Their output is in _pipeline/logs/<run>/engine-<actor>.log."],
        on_terminal=False,
    )


def _summary(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield (label, text); the text is empty if it does not apply."""
    rows, tokens, work = report.rows, report.tokens, report.work
    written = f"{rows.written:,} of {rows.input:,}: {rows.completed:,} completed, {counted(rows.errors, 'error row')}"
    uncomputed = f", {rows.uncomputed:,} not computed (input.when)" if rows.uncomputed else ""
    samples = f"; {rows.output:,} in the output, one for each sample" if rows.extra_samples else ""
    yield "Rows", written + uncomputed + samples
    if rows.rejected:
        completed = rows.completed + rows.extra_samples
        passed = f"{completed - rows.rejected:,} of {completed:,} completed rows"
        yield "Accepted", f"{passed}; {rows.rejected:,} were dropped by output.accept"
    yield "Errors", ", ".join(f"{code} {n:,}" for code, n in rows.errors_by_code.items())
    skipped = report.runs[-1].skipped_files if report.runs else ()
    if skipped:
        yield "Skipped", f"{len(skipped):,} damaged files, {sum(f.bytes for f in skipped):,} bytes"
    for warning in report.warnings:
        yield "Warning", warning.to_text()
    if report.loops is not None:
        loops = report.loops
        yield (
            "Loops",
            (
                f"{loops.rows:,} rows were stopped for repetition (sampling.repetition_detection);"
                f" {loops.tokens:,} generated tokens, about {_time(loops.machine_us)}{_priced(loops.usd)}"
            ),
        )
    if report.reasoning is not None:
        reasoning = report.reasoning
        yield (
            "Reasoning",
            (
                f"{reasoning.tokens:,} generated tokens before the answers of {reasoning.rows:,} rows,"
                f" {percent(reasoning.share)} of the total; about {_time(reasoning.machine_us)}{_priced(reasoning.usd)}"
            ),
        )
    refused = f"; another {tokens.error_input:,} in prompts of error rows, not priced" if tokens.error_input else ""
    computed = f"{tokens.computed:,} computed, {tokens.cached:,} from cache"
    yield "Tokens", f"{tokens.input:,} in ({computed}), {tokens.generated:,} out{refused}"
    if rows.images:
        yield "Images", f"{rows.images:,}"
    if rows.copied:
        yield "Copied", f"{rows.copied:,} rows equal to computed ones, with {tokens.copied:,} of the tokens out"
    speed_in = f"{report.input_tokens_per_s:,.0f} tok/s in (computed)"
    if report.has_generated:
        yield "Speed", f"{speed_in}, {report.generated_tokens_per_s:,.0f} tok/s out, per engine"
    else:
        yield "Speed", f"{report.rows_per_s:,.1f} rows/s, {speed_in}, per engine"
    yield "Drafts", _drafts(report)
    if requests := sum(run.stat("num_requests") for run in report.runs):
        yield "Server", _server(report, requests)
    elif work.steps:
        decode = per_second(work.computed_generated_tokens, report.phases_us["decode"])
        decoding = f"{decode:,.0f} tok/s while decoding; " if report.has_generated else ""
        kv = f"KV cache {percent(work.mean_kv_cache_usage)} used"
        yield "Engine", f"{decoding}{work.mean_batch_size:.1f} sequences per step, {kv}"
    if report.quality is not None:
        yield "Quality", f"{report.quality.to_text()}; {_time(report.quality.machine_us)} of machine time"
    if work.grammar_tokens or work.grammar_forced_tokens:
        masks = f"{work.grammar_masks:,} masks in {_time(work.grammar_mask_us)}"
        forced = f"{work.grammar_forced_tokens:,} forced, without a step"
        yield "Grammars", f"{work.grammar_tokens:,} tokens checked, {masks}; {forced}"
    yield "Time", f"{_time(report.wall_us)} wall, {_time(report.machine_us)} of machine time"
    yield "Energy", _energy(report)
    yield "Pool", _pool(report)
    yield "Retried", "; ".join(_retried(run) for run in report.runs if run.retry_limits and run.rows_written)
    if work.wasted_generated_tokens or work.wasted_prompt_tokens or work.wasted_is_lower_bound:
        least = "at least " if work.wasted_is_lower_bound else ""
        lost = f"{work.wasted_generated_tokens:,} generated and {work.wasted_prompt_tokens:,} prompt tokens"
        yield "Lost work", f"{least}{lost}: about {_time(work.wasted_us)}{_priced(work.wasted_usd)}"
    yield "Events", _events(report)
    if work.engine_restarts:
        yield "Logs", "_pipeline/logs holds the output of the engine processes and how they exited"
    yield "Fingerprint", report.fingerprint[:8]


def _retried(run: RunRecord) -> str:
    """Return the rows that a run computed again, and its cost."""
    limits = ", ".join(f"{key} {value or 'default'}" for key, value in run.retry_limits.items())
    cost = f"{run.generated_tokens:,} tokens out, {_time(run.machine_us)}"
    return (
        f"{run.rows_written:,} {' or '.join(run.redo) or 'error'} rows with {limits} (run {run.run_id[:4]}): "
        f"{cost}{_priced(run.usd if run.prices.are_declared else None)}"
    )


def _priced(usd: float | None) -> str:
    return "" if usd is None else f", {money(usd)}"


def _drafts(report: RunReport) -> str:
    drafts = report.speculation
    if drafts is None:
        return ""
    if not drafts.draft_tokens_by_position:
        return "off (plain decoding was faster)"
    accepted, drafted = drafts.accepted_tokens_by_position, drafts.draft_tokens_by_position
    positions = ", ".join(percent(a / d) for a, d in zip(accepted, drafted))
    counts = f"{sum(accepted):,} of {sum(drafted):,} draft tokens accepted, by position {positions}"
    saved = drafts.saved_us
    effect = f"about {_time(abs(saved))} {'saved' if saved >= 0 else 'lost'} (estimated)"
    return f"in {drafts.draft_steps:,} of {drafts.steps:,} steps; {counts}; " + (
        effect if drafts.batches else "forced in every step"
    )


def _energy(report: RunReport) -> str:
    if report.energy_uj is None:
        return ""
    each, unit = report.joules_per_generated_token, "generated token"
    if each is None and report.rows.completed:
        each, unit = report.energy_uj / 1e6 / report.rows.completed, "row"
    if each is None:
        return ""
    kwh = report.energy_uj / 3.6e12
    counted = sorted({str(run.resolved["energy"]) for run in report.runs if "energy" in run.resolved})
    whole = f"{kwh:,.3g} kWh" if kwh >= 1 else f"{kwh * 1000:,.3g} Wh"
    return f"{whole}, {each:.3g} J per {unit} ({'; '.join(counted)})"


def _pool(report: RunReport) -> str:
    actors = [actor for run in report.runs for actor in run.actors]
    joined = sum(actor.started_us > 0 and actor.replaces is None for actor in actors)
    released = sum(actor.released for actor in actors)
    if not joined and not released:
        return ""
    return f"{len(actors)} engines: {joined} joined after the start, {released} released before the end"


def _events(report: RunReport) -> str:
    work = report.work
    counts = {
        "preemptions": work.preemptions,
        "tokens recomputed after preemptions": work.recomputed_tokens,
        "steps that ran out of memory": work.out_of_memory_steps,
        "units computed twice": work.duplicate_units,
        "rows resumed from a stopped run": work.resumed_rows,
        "failed writes of status, record or report": work.telemetry_failures,
    }
    return ", ".join(f"{label} {count:,}" for label, count in counts.items() if count)
