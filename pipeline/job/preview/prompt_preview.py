"""Preview of the model's input: the first row's prompt, and the token lengths of a sample of prompts.

Rows are rendered, tokenized and rejected as in a job. The model itself is not loaded.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from pipeline.config import JobConfig
from pipeline.data.source import InputWindow, Source
from pipeline.data.units import UnitSpec, window_units
from pipeline.job.actor.tokenize import Tokenize
from pipeline.report.record.data_warnings import ControlTokenRows

MAX_PROMPT_CHARS = 1500
_STRETCHES, _STRETCH_ROWS = 4, 64  # evenly spread stretches; few, since each costs a row group
_NUM_BARS = 8


def first_prompt(spec: UnitSpec, source: Source, tokenize: Tokenize | None) -> dict[str, Any] | None:
    """Return the first row's prompt, or why it has none; None without rows. A row that does not meet input.when has no
    error either. With `tokenize` the prompt is rendered through the chat template and counted, as for the model."""
    if source.num_rows == 0:
        return None
    ((unit,),) = [list(window_units(source, InputWindow(0, 0, 1), replace(spec, kept=())))]
    names = ("_prompt", "_error", "_error_message", "source_file", "source_row", "_texts")
    prompt, error, message, file, row, texts = (unit.own(name)[0].as_py() for name in names)
    tokens = None
    if prompt is not None and tokenize is not None:
        requests, failed = tokenize(unit)
        if failed:
            prompt, error, message = None, failed[0].error, failed[0].error_message
        else:
            prompt, tokens = tokenize.shown(prompt), len(requests[0].prompt_token_ids)
    elif prompt is not None:
        prompt = spec.prompt.text_of(prompt)
    return {
        "source_file": file,
        "source_row": row,
        "bytes": len(prompt.encode()) if prompt is not None else 0,
        "tokens": tokens,
        "texts": texts and texts[:MAX_PROMPT_CHARS],
        "text": prompt if prompt is None else prompt[:MAX_PROMPT_CHARS],
        "error": error,
        "error_message": message,
    }


def prompt_tokens(
    config: JobConfig, spec: UnitSpec, source: Source, tokenize: Tokenize, context: int | None
) -> tuple[dict[str, Any], ControlTokenRows]:
    """Return token lengths of a sample of prompts with the projected total, and the rows with texts of control tokens.
    context: the model's, if known."""
    total = source.num_rows if config.input.limit is None else min(config.input.limit, source.num_rows)
    lengths: list[int] = []
    errors: Counter[str] = Counter()
    dropped = 0
    control_tokens = ControlTokenRows()
    for window in sampled(total):
        for unit in window_units(source, window, replace(spec, kept=())):
            requests, failed = tokenize(unit)
            lengths += [len(request.prompt_token_ids) for request in requests]
            errors.update(str(completion.error) for completion in failed)
            dropped += len(unit.dropped())
            control_tokens += tokenize.control_tokens(unit)
    lengths.sort()
    rows, max_length = len(lengths) + sum(errors.values()) + dropped, config.engine.max_model_len or context
    room = max_length and max_length - (config.task.type == "generate")  # at least one generated token
    found = {
        "rows": rows,
        "errors": dict(sorted(errors.items())),
        "dropped": dropped,
        "max_model_len": max_length,
        "too_long": 0 if room is None else sum(length > room for length in lengths),
        **({name: _quantile(lengths, q) for name, q in (("median", 0.5), ("p90", 0.9), ("longest", 1))}),
        "histogram": _histogram(lengths),
        "estimated_total": round(sum(lengths) / rows * total) if rows else 0,
    }
    return found, control_tokens


def sampled(total: int, rows: int = _STRETCHES * _STRETCH_ROWS) -> list[InputWindow]:
    """Return evenly spread stretches of the input with about `rows` rows in total; everything if there are no more."""
    starts = range(0, total, _STRETCH_ROWS)
    if total > rows:
        count = -(-rows // _STRETCH_ROWS)
        starts = [i * total // count for i in range(count)]
    return [InputWindow(i, start, min(start + _STRETCH_ROWS, total)) for i, start in enumerate(starts)]


def _quantile(lengths: list[int], q: float) -> int | None:
    return lengths[min(len(lengths) - 1, int(q * len(lengths)))] if lengths else None


def _histogram(lengths: list[int]) -> list[tuple[int, int]]:
    """Return (longest length of a bar, rows in it). Lengths start at 1; bars have one round width and include empty
    ones."""
    if not lengths:
        return []
    width = 1
    while width * _NUM_BARS < lengths[-1]:
        width = next(step * 10**power for power in range(12) for step in (1, 2, 5) if step * 10**power > width)
    bars = Counter(max(0, length - 1) // width for length in lengths)
    return [((i + 1) * width, bars[i]) for i in range(max(bars) + 1)]
