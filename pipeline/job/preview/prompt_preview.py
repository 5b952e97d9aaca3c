"""What a model would be sent: the first row's prompt as it gets it, and how long a sample's prompts are in tokens.

Rows are rendered, tokenized and refused as a job's are. The model itself is not loaded.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from pipeline.config import JobConfig
from pipeline.data.source import Source, Window
from pipeline.data.units import UnitSpec, window_units
from pipeline.job.actor.tokenize import Tokenize
from pipeline.report.record.data_warnings import ControlTokenRows

MAX_PROMPT_CHARS = 1500
_STRETCHES, _STRETCH_ROWS = 4, 64  # sampled, evenly spread: few, as each costs a row group
_NUM_BARS = 8


def first_prompt(spec: UnitSpec, source: Source, tokenize: Tokenize | None) -> dict[str, Any] | None:
    """The first row's prompt, or why it has none; None where there are no rows. With `tokenize` as the model gets it:
    through the chat template, and counted."""
    if source.num_rows == 0:
        return None
    ((unit,),) = [list(window_units(source, Window(0, 0, 1), replace(spec, kept=())))]
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
    """How long the prompts of a sample are, in tokens, and what they come to in all if the other rows are like them;
    and which of them hold texts of control tokens. context: of the model, as far as that is known."""
    total = source.num_rows if config.input.limit is None else min(config.input.limit, source.num_rows)
    lengths: list[int] = []
    errors: Counter[str] = Counter()
    control_tokens = ControlTokenRows()
    for window in sampled(total):
        for unit in window_units(source, window, replace(spec, kept=())):
            requests, failed = tokenize(unit)
            lengths += [len(request.prompt_token_ids) for request in requests]
            errors.update(str(completion.error) for completion in failed)
            control_tokens += tokenize.control_tokens(unit)
    lengths.sort()
    rows, most = len(lengths) + sum(errors.values()), config.engine.max_model_len or context
    room = most and most - (config.task.type == "generate")  # one generated token at least
    found = {
        "rows": rows,
        "errors": dict(sorted(errors.items())),
        "max_model_len": most,
        "too_long": 0 if room is None else sum(length > room for length in lengths),
        **({name: _quantile(lengths, q) for name, q in (("median", 0.5), ("p90", 0.9), ("longest", 1))}),
        "histogram": _histogram(lengths),
        "estimated_total": round(sum(lengths) / rows * total) if rows else 0,
    }
    return found, control_tokens


def sampled(total: int, rows: int = _STRETCHES * _STRETCH_ROWS) -> list[Window]:
    """Stretches of the input, evenly spread, with about so many rows in all; everything where there are no more."""
    if total <= rows:
        return [Window(i, start, min(start + _STRETCH_ROWS, total)) for i, start in _stretches(total, total)]
    return [Window(i, start, start + _STRETCH_ROWS) for i, start in _stretches(total, rows)]


def _stretches(total: int, rows: int) -> list[tuple[int, int]]:
    if rows >= total:
        return list(enumerate(range(0, total, _STRETCH_ROWS)))
    count = -(-rows // _STRETCH_ROWS)
    return [(i, i * total // count) for i in range(count)]


def _quantile(lengths: list[int], q: float) -> int | None:
    return lengths[min(len(lengths) - 1, int(q * len(lengths)))] if lengths else None


def _histogram(lengths: list[int]) -> list[tuple[int, int]]:
    """(longest length of a bar, rows in it), lengths from 1 on; bars of one round width, empty ones too."""
    if not lengths:
        return []
    width = 1
    while width * _NUM_BARS < lengths[-1]:
        width = next(step * 10**power for power in range(12) for step in (1, 2, 5) if step * 10**power > width)
    bars = Counter(max(0, length - 1) // width for length in lengths)
    return [((i + 1) * width, bars[i]) for i in range(max(bars) + 1)]
