"""Describe a validated job for a terminal."""

from typing import Any

from pipeline.config import FromColumn, JobConfig
from pipeline.config.sections.sampling import RepetitionSection, SamplingSection
from pipeline.config.sections.steps import StepSection
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.reasoning.markers import ReasoningMarkers
from pipeline.formatting import counted, money, printable, shown_bytes
from pipeline.job.planning.checkpoint_values import shown_values
from pipeline.job.preview.prompt_preview import MAX_PROMPT_CHARS
from pipeline.job.preview.validation import ValidationResult
from pipeline.report.record.data_warnings import DataWarning
from pipeline.stores.redaction import shown_url

_MAX_LINES_SHOWN = 24
_MAX_SKIPPED_SHOWN = 5
_MAX_GRAMMAR_SHOWN = 60
_BAR_WIDTH = 40
_REQUEST_KINDS = {"chat": "chats", "text": "texts to continue", "embedding": "embeddings"}


def describe(found: ValidationResult) -> str:
    """Return the facts of a job as text."""
    head = [f"{printable(found.job)}: valid", ""]
    facts = [f"  {label:<10}{printable(value)}" for label, value in _facts(found)]
    lengths = _shown_lengths(found.facts["prompt_tokens"])
    warnings = [f"  Warning   {printable(DataWarning(**each).to_text())}" for each in found.facts["warnings"]]
    prompt = _shown_prompt(found.facts["first_prompt"], found)
    return "\n".join([*head, *facts, "", *prompt, *lengths, *([""] if warnings else []), *warnings])


def _facts(found: ValidationResult) -> list[tuple[str, str]]:
    facts, job, config = found.facts, found.resolution, found.resolution.config
    source, columns = facts["input"], facts["columns"]
    rows = counted(source["rows"], "row")
    if source["rows_to_do"] != source["rows"]:
        rows = f"the first {source['rows_to_do']:,} of {rows}"
    size = f"{counted(source['files'], 'file')}, {rows}, {shown_bytes(source['bytes'])}"
    chat = "a chat" if job.prompt.chat is not None else "text"
    given = {"max_tokens", *job.sampling.model_fields_set} - {"generation_config"}
    sampling = [f"{key} {_option(value)}" for key, value in job.sampling if key in given]
    num_existing = facts["output"]["rows_there"]
    revision = "" if config.model.revision is None else f"; revision {config.model.revision}"
    usd, tokens = config.cost.hourly_usd, config.cost.usd_per_million
    prices = [] if usd is None else [f"{money(usd)} an hour for each actor"]
    if tokens is not None:
        prices.append(f"{money(tokens.input)} for 1M prompt tokens, {money(tokens.output)} for 1M generated tokens")
    skipped = source["skipped_files"]
    more = f" and {len(skipped) - _MAX_SKIPPED_SHOWN} more" if len(skipped) > _MAX_SKIPPED_SHOWN else ""
    names = ", ".join(f"{f['file']} ({f['reason']})" for f in skipped[:_MAX_SKIPPED_SHOWN])
    return [
        ("Paths", f"relative paths are below {facts['paths_below']}, the working directory"),
        ("Input", f"{shown_url(config.input.path)}: {size}; {counted(source['windows'], 'window')}"),
        *([("", requests)] if (requests := _shown_requests(facts.get("requests"))) else []),
        *([("Skipped", f"{counted(len(skipped), 'damaged file')}: {names}{more}")] if skipped else []),
        ("Prompt", f"{chat} from {', '.join(columns['prompt'])}"),
        ("Keeps", ", ".join(columns["kept"]) or "no input columns"),
        ("Model", f"{facts['model']['path']} ({facts['model']['kind']}{revision})"),
        *([("Draft", f"{draft['path']} ({draft['kind']})")] if (draft := facts.get("draft model")) else []),
        *([("Adapters", _shown_adapters(used, config))] if (used := facts.get("adapters")) else []),
        *([("Quality", _quality(facts.get("reference model"), config))] if config.quality.sample else []),
        *([("Task", _shown_task(task))] if (task := facts.get("task")) else [("Sampling", ", ".join(sampling))]),
        *([] if task else _own_sampling(facts["model_sampling"], job.sampling)),
        *([("Steps", ", ".join(map(_shown_step, config.steps)))] if config.steps else []),
        ("Output", f"{facts['output']['path']}: {f'{num_existing:,} rows exist' if num_existing else 'empty'}"),
        ("Adds", ", ".join(name for name in facts["output_columns"] if name not in columns["kept"])),
        ("Price", "; ".join(prices) or "not declared (cost.hourly_usd)"),
    ]


def _shown_adapters(used: dict[str, dict[str, str]], config: JobConfig) -> str:
    shown = ", ".join(f"{name} {found['path']} ({found['kind']})" for name, found in used.items())
    return f"{shown}; {_option(config.model.adapter)}" if isinstance(config.model.adapter, FromColumn) else shown


def _quality(reference: dict[str, str] | None, config: JobConfig) -> str:
    given = config.quality
    against = f"{reference['path']} ({reference['kind']})" if reference else "the model's stored weights"
    column = "" if given.column is None else f"; right answers from {given.column}"
    return f"{100 * given.sample:g}% of the rows against {against}{column}"


def _shown_task(task: dict[str, Any]) -> str:
    given = {key: value for key, value in task.items() if key not in ("type", "columns_known")}
    values = [f"{key} {value!r}" for key, value in given.items() if value is not None]
    unknown = "" if task["columns_known"] else "; its columns depend on the checkpoint, which is not on this machine"
    return ": ".join(part for part in (task["type"], ", ".join(values)) if part) + unknown


def _shown_step(step: StepSection) -> str:
    given = [step.task.type]
    if step.when is not None:
        given.append(f"when {step.when}")
    if step.vote is not None:
        given.append(f"up to {step.vote.n} votes")
    if step.repeat is not None:
        given.append(f"repeated from {step.repeat.from_step} up to {counted(step.repeat.at_most, 'time')}")
    return f"{step.name} ({', '.join(given)})"


def _shown_requests(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    kind_of_requests = _REQUEST_KINDS[found["endpoint"]]
    own = "" if found["endpoint"] == "embedding" else "; their own sampling values take precedence"
    model = "" if found["model"] is None else f" for {found['model']!r}, computed with the job's model"
    ignored = f"; fields without effect: {', '.join(found['ignored'])}" if found["ignored"] else ""
    return f"requests of OpenAI's Batch API: {kind_of_requests}{model}{own}{ignored}"


def _own_sampling(found: dict[str, dict[str, Any]], sampling: SamplingSection) -> list[tuple[str, str]]:
    """Return a line about the model's own sampling values, if any of them matter."""
    wants = sampling.generation_config == "model"
    left = {k: v for k, v in found["not_taken"].items() if v != getattr(sampling, k)}
    if not wants and not left:
        return []
    shown_parts = (
        [f"used from the model's generation_config.json: {shown_values(found['taken']) or 'nothing'}"] if wants else []
    )
    if left:
        advice = "the job sets its own" if wants else "use them with sampling.generation_config: model"
        shown_parts.append(f"not used from the model's generation_config.json: {shown_values(left)} ({advice})")
    return [("", "; ".join(shown_parts))]


def _shown_prompt(first: dict[str, Any] | None, found: ValidationResult) -> list[str]:
    if first is None:
        return ["  No rows: the output will be one empty part."]
    origin = f"{first['source_file']} row {first['source_row']}"
    if first["text"] is None and first["error"] is None:
        return [printable(f"  The first row, {origin}, does not meet input.when and is not computed.")]
    if first["text"] is None:
        reason = f"{first['error']}: {first['error_message']}"
        return [printable(f"  The first row, {origin}, becomes an error row: {reason}")]
    shown = first["text"].split("\n")
    size = f"{first['bytes']:,} bytes" + ("" if first["tokens"] is None else f", {counted(first['tokens'], 'token')}")
    lines = [f"  First prompt ({printable(origin)}, {size})"]
    lines += [f"    | {printable(line)}" for line in shown[:_MAX_LINES_SHOWN]]
    if len(shown) > _MAX_LINES_SHOWN or len(first["text"]) == MAX_PROMPT_CHARS:
        lines.append("    | ...")
    if first["texts"] is not None:
        key = {"choice": "task.labels", "score": "task.completion"}[found.facts["task"]["type"]]
        lines += ["", f"  Its {key}:", *(f"    | {printable(line)}" for line in first["texts"].split("\n"))]
    if first["tokens"] is None:
        by_server = found.resolution.knows("model") and found.resolution.model is None
        reason = "The server tokenizes" if by_server else "The tokenizer is not on this machine yet"
        lines += ["", f"  {reason}: tokens are not counted, and chats are shown unrendered."]
    return lines


def _shown_lengths(tokens: dict[str, Any] | None) -> list[str]:
    """Return a histogram with one bar and its row count per line."""
    if not tokens or not tokens["histogram"]:
        return []
    rows, max_count = tokens["rows"], max(count for _, count in tokens["histogram"])
    lines = [
        "",
        f"  Prompt tokens of {counted(rows, 'sampled row')}: median {tokens['median']:,}, 90% up to {tokens['p90']:,}, "
        f"longest {tokens['longest']:,}; about {tokens['estimated_total']:,} in total",
    ]
    for longest, count in tokens["histogram"]:
        bar = "#" * max(count > 0, round(count / max_count * _BAR_WIDTH))
        lines.append(f"    up to {longest:>9,} {bar:<{_BAR_WIDTH}} {count:,}")
    if tokens["too_long"]:
        room = f"{tokens['max_model_len']:,} tokens (engine.max_model_len, or the model's own)"
        lines.append(f"  Too long for {room}: {counted(tokens['too_long'], 'row')} of the sample (prompt_too_long)")
    if tokens["errors"]:
        errors = ", ".join(f"{code} {count:,}" for code, count in tokens["errors"].items())
        lines.append(f"  Error rows in the sample: {errors}")
    if tokens["dropped"]:
        lines.append(f"  Not computed in the sample (input.when): {counted(tokens['dropped'], 'row')}")
    return lines


def _option(value: object) -> str:
    if isinstance(value, FromColumn):
        return f"from column {value.column}"
    if isinstance(value, StructuredOutputs):
        shown_text = value.text if len(value.text) <= _MAX_GRAMMAR_SHOWN else f"{value.text[:_MAX_GRAMMAR_SHOWN]}..."
        return f"{value.kind} {shown_text}".rstrip()
    if isinstance(value, ReasoningMarkers):
        return f"between {value.start!r} and {value.end!r}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    if isinstance(value, RepetitionSection):
        return ", ".join(f"{key} {number}" for key, number in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
