"""What a job's report says in sentences, each with its label: rows, tokens, speed, work, faults. `render.py` and
`html/page.py` show them alike."""

from pipeline.report.number_formats import money, seconds
from pipeline.report.record.run_record import SkippedInput, per_second
from pipeline.report.run_report import RunReport, Work
from pipeline.report.sections.drafts import Speculated


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
        *(("Warning", warning.to_text()) for warning in report.warnings),
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
