"""Dataset card of a published output: README.md with the figures of its report, its columns and its settings."""

import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from pipeline.checkpoints.locate import model_kind
from pipeline.data.output.result_columns import result_names
from pipeline.formatting import duration, money
from pipeline.job.publish.finished import FinishedOutput
from pipeline.report.render import in_markdown
from pipeline.stores.redaction import secrets_of, shown_url

DATA = "data"  # folder of the parts in the dataset
BEGIN = "<!-- Written by `pipeline publish`, which replaces the text from here to the end mark. -->"
END = "<!-- End of the text by `pipeline publish`. -->"
_HIDDEN = ("files", "cut")  # of a job's identity: names of input files, constants of the version

_MEANINGS = {
    "generated_text": "the completion; null in error rows",
    "finish_reason": "why the completion ended: stop, length, length_loop (it repeated itself) or error",
    "error": "code of the row's error; null in completed rows",
    "error_message": "the error in a sentence; null in completed rows",
    "num_input_tokens": "tokens of the prompt",
    "num_cached_tokens": "tokens of the prompt that came from the prefix cache",
    "num_generated_tokens": "tokens of the completion",
    "source_file": "the row's file in the input",
    "source_row": "the row's number in that file, from 0",
    "sample_index": "number of the completion among those of its prompt, from 0",
    "logprobs": "log-probabilities of the completion's tokens, and of the likeliest ones",
    "prompt_logprobs": "log-probabilities of the prompt's tokens",
    "reasoning": "the text before the answer",
    "num_reasoning_tokens": "tokens of the reasoning",
    "tool_calls": "calls of tools, as JSON",
    "dropped_by": "condition that the row does not meet: input.when (it was not computed) or output.accept",
    "label": "the likeliest label",
    "label_probability": "probability of that label",
    "label_probabilities": "all labels with their probabilities",
    "label_logit": "logit of that label",
    "label_logits": "all labels with their logits",
    "logprob": "log-probability of the scored text",
    "num_scored_tokens": "number of scored tokens",
    "perplexity": "exp(-logprob / num_scored_tokens)",
    "token_logprobs": "log-probabilities of the scored tokens",
    "embedding": "the vector",
    "score": "the classification head's only value",
}


def dataset_card(output: FinishedOutput, current: str | None = None) -> str:
    """Return the text of README.md. current: the text that the dataset has. Its header, and what was written around
    the text of an earlier publication, stay; a card without that text stays as it is."""
    body = f"{BEGIN}\n\n{_body(output)}\n{END}"
    if current is None:
        return f"---\n{yaml.safe_dump(_header(output), sort_keys=False)}---\n\n{body}\n"
    before, begin, rest = current.partition(BEGIN)
    _, end, after = rest.rpartition(END)
    return f"{before}{body}{after}" if begin and end else current


def model_name(job: Mapping[str, Any]) -> str:
    """Return the name of a job's model, without the folders of a local path or the bucket of a url."""
    served, model = (job["identity"]["server"] or {}).get("model"), job["free"]["model"]
    if served:
        return str(served)
    path, revision = shown_url(model["path"]), model["revision"]
    name = path if model_kind(path) in ("id", "embedded", "none") else posixpath.basename(path.rstrip("/"))
    return f"{name} at {revision}" if revision else name


def _header(output: FinishedOutput) -> dict[str, Any]:
    made = ["synthetic"] if output.job["identity"]["task"]["type"] == "generate" else []
    return {
        "configs": [{"config_name": "default", "data_files": f"{DATA}/*.parquet"}],
        "tags": [*made, "parquet-batch-inference"],
    }


def _body(output: FinishedOutput) -> str:
    settings = yaml.safe_dump(_settings(output.job), sort_keys=False, allow_unicode=True, width=110)
    fence = "```"
    while fence in settings:
        fence += "`"
    return "\n".join(
        [
            f"# {in_markdown(output.report.job)}",
            "",
            f"Output of a batch inference job with the model {in_markdown(model_name(output.job))}: every row of the "
            "input once, as a result or as an error row.",
            "",
            *_table(("", ""), _figures(output)),
            "",
            "## Columns",
            "",
            *_table(("column", "type", "contents"), _columns(output)),
            "",
            "## Settings of the job",
            "",
            f"{fence}yaml\n{settings}{fence}",
            "",
        ]
    )


def _figures(output: FinishedOutput) -> Iterator[tuple[str, str]]:
    report = output.report
    rows, tokens = report.rows, report.tokens
    codes = ", ".join(f"{code} {number:,}" for code, number in rows.errors_by_code.items())
    yield "Rows", f"{output.num_rows:,}"
    if rows.extra_samples:
        yield "Input rows", f"{rows.written:,}, each with its samples as rows"
    yield "Error rows", f"{rows.errors:,}" + (f" ({codes})" if codes else "")
    if rows.dropped:
        yield "Dropped rows", ", ".join(f"{key} {number:,}" for key, number in rows.dropped.items())
    yield "Model", model_name(output.job)
    yield "Prompt tokens", f"{tokens.input:,}, of which {tokens.cached:,} came from the prefix cache"
    yield "Generated tokens", f"{tokens.generated:,}"
    yield "Cost", money(report.cost.total_usd)
    yield "Time", f"{duration(report.wall_us / 1e6)}, {duration(report.machine_us / 1e6)} of machine time"
    yield "Version", f"parquet-batch-inference {output.job['versions']['pipeline']}"
    yield "Fingerprint of the job", output.fingerprint


def _columns(output: FinishedOutput) -> Iterator[tuple[str, str, str]]:
    originals = {name: original for original, name in result_names(output.schema).items()}
    for field in output.schema:
        other = "results of the step of this name" if field.name in originals else "kept from the input"
        yield field.name, str(field.type), _MEANINGS.get(originals.get(field.name, ""), other)


def _settings(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that determine the output, without empty ones and without secrets."""
    identity = {name: value for name, value in job["identity"].items() if name not in _HIDDEN}
    text = json.dumps(_filled({**identity, "numerics": job["numerics"]}))
    for secret in secrets_of((identity["server"] or {}).get("extra_body", {})):
        text = text.replace(json.dumps(secret)[1:-1], "***")
    return json.loads(text)


def _filled(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {name: _filled(inner) for name, inner in value.items()}
    return {name: inner for name, inner in kept.items() if inner not in (None, "", [], {})}


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *(map(in_markdown, row) for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]
