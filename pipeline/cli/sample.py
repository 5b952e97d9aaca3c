"""Output of `pipeline run --sample N`: rows with their prompts and completions."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from pipeline.cli.console import print_json, print_result
from pipeline.formatting import counted, printable
from pipeline.stores.filesystem import storage_for

if TYPE_CHECKING:
    from pipeline.config import JobConfig
    from pipeline.job.running.sample import SampleRow
    from pipeline.report.run_report import RunReport

MAX_SHOWN = 8
MAX_VALUES = 8  # of a list
_MAX_CHARS = 700  # of a prompt or a completion: its beginning and its end


def print_sample(config: "JobConfig", report: "RunReport", output: str, as_json: bool) -> None:
    """Print the rows of the last run, which computed a sample."""
    from pipeline.data.output.parts import PartStore
    from pipeline.job.actor.write import SAMPLES
    from pipeline.job.dataflow.reading import evenly
    from pipeline.job.running.sample import read_sample

    run_id = report.runs[-1].run_id
    rows = list(
        read_sample(PartStore(config.output.path, storage_for(config.output.path, config.storage_options)), run_id)
    )
    if as_json:
        return print_json({**report.to_json(), "sample": [asdict(row) for row in rows]})
    shown = evenly(rows, MAX_SHOWN)
    for row in shown:
        print_result(_shown(row))
    errors = counted(sum(row.error is not None for row in rows), "error row")
    generated = sum(row.num_generated_tokens for row in rows)
    prompts = sum(row.sample_index == 0 for row in rows)
    samples = "" if prompts == len(rows) else f" as {len(rows):,} samples"
    print_result(
        f"{prompts} rows{samples} of {report.rows.input:,}, {errors}, {generated:,} tokens out; {len(shown)} shown"
    )
    print_result(f"  All rows     {output}/{SAMPLES}/{run_id}")
    print_result("  The same command without --sample computes the rest and reuses these.")


def _shown(row: "SampleRow") -> str:
    texts = row.text if isinstance(row.text, list) else [row.text or ""]
    reasons = row.finish_reason if isinstance(row.finish_reason, list) else [row.finish_reason]
    ended = (
        ", ".join(reason for reason in reasons if reason) if row.error is None else f"{row.error}: {row.error_message}"
    )
    sample = f", sample {row.sample_index}" if row.sample_index else ""
    position = f"{row.source_file}, row {row.source_row}{sample}"
    lines = [f"{position}: {row.num_input_tokens} tokens in, {row.num_generated_tokens} out"]
    lines += [f"  | {line}" for line in _shortened(row.prompt or "").splitlines()]
    lines += [f"  > {line}" for text in texts for line in _shortened(text).splitlines()]
    if row.error is None:
        values = [f"{name}: {_value(value)}" for name, value in row.results.items()]
        lines += [f"  > {line}" for value in values for line in value.splitlines()]
    lines += [f"  ({ended})"] if ended else []
    return "\n".join(map(printable, lines)) + "\n"


def _value(value: object) -> str:
    """Format the value of a task's column or of reasoning: text, a number, the first two fields of each struct, the
    first numbers of a vector."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return _shortened(value)
    if not isinstance(value, list):
        return str(value)
    shown = ", ".join(
        " ".join(_value(part) for part in list(each.values())[:2]) if isinstance(each, dict) else _value(each)
        for each in value[:MAX_VALUES]
    )
    return shown if len(value) <= MAX_VALUES else f"{shown}, ... ({len(value):,} in all)"


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"
