"""Rows of a dataset as token ids, rendered and encoded as in a job: the first rows, or a random sample by seed.

Both the evaluation and the calibration of models read their texts here. Rows that would be error rows in a job have no
text; they are counted.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from pipeline.data.source import InputWindow, Source, cut_windows, read_window
from pipeline.data.units import Unit, UnitSpec, make_units
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import InputError, RowError
from pipeline.job.actor.control_tokens import author_texts
from pipeline.job.actor.tokenize import Tokenize, chat_of
from pipeline.job.planning.resolution import Resolution
from pipeline.machine.host import wall_time
from pipeline.tokenization.tokenizer import Tokenizer

# Small, so that a few rows of a large dataset cost a few row groups.
_WINDOW_ROWS = 1024
_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True)
class Samples:
    """Texts of a dataset, in its order. `left_out` counts the other rows that were read, by RowError code."""

    token_ids: list[list[int]]
    expected: list[str | None] = field(default_factory=list)  # text of each row in the requested column
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def read_samples(
    prompts: Resolution,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    expected: str | None = None,
    chosen: tuple[int, int] | None = None,
    cut: bool = False,
) -> Samples:
    """Return the prompts of a job's rows, resolved by `resolve_prompts`, as token ids. Rows of more than `max_tokens`
    tokens are left out, or truncated with `cut`.

    expected: a column whose text is kept. chosen: (number, seed), to sample that many of all rows. Raises InputError if
    no row is left, ConfigError if the prompt does not fit the columns.
    """
    columns, source, spec = () if expected is None else (expected,), prompts.source, prompts.spec
    when = prompts.config.input.condition
    source.check_columns([*columns, *spec.columns, *(() if when is None else when.columns)])
    spec.check(source.schema)
    if when is not None:
        when.check(source.schema)
    chat, author = chat_of(prompts.prompt, prompts.config.task.type, wall_time()), author_texts(spec, prompts.prompt)
    tokenize = Tokenize(tokenizer, SamplingParams(), 0, chat, author=author)
    unit_spec = UnitSpec(spec, columns, when=when)
    found: list[tuple[tuple[int, str, int], list[int], str | None]] = []
    left_out: Counter[str] = Counter()
    for window, rows in _wanted(source, prompts.config.input.limit, chosen):
        table = read_window(source, window, unit_spec.columns)
        # Drop the notes on damaged rows, which count rows that were not selected: their prompts are null.
        table = table.take(rows).replace_schema_metadata(None)
        for unit in make_units(table, unit_spec, window.index):
            requests, failed = tokenize(unit)
            left_out.update(str(completion.error) for completion in failed)
            row_ids, texts = unit.row_ids(), _texts(unit, expected)
            for request in requests:
                token_ids = request.prompt_token_ids[:max_tokens] if cut else request.prompt_token_ids
                if len(token_ids) > max_tokens:
                    left_out[RowError.PROMPT_TOO_LONG] += 1
                elif not token_ids:
                    left_out[RowError.EMPTY_PROMPT] += 1
                else:
                    row: int = request.row_id  # type: ignore[assignment]
                    found.append(((window.index, *row_ids[row]), token_ids, texts[row]))
    if not found:
        reasons = ", ".join(f"{code} {count:,}" for code, count in sorted(left_out.items())) or "there are none"
        raise InputError(f"{source.root}: no row has a text of at most {max_tokens:,} tokens ({reasons})")
    found.sort(key=lambda each: each[0])
    return Samples([ids for _, ids, _ in found], [text for _, _, text in found], dict(sorted(left_out.items())))


def _wanted(
    source: Source, limit: int | None, chosen: tuple[int, int] | None
) -> Iterator[tuple[InputWindow, list[int]]]:
    """Yield each window with wanted rows, and their indices in it."""
    total = source.num_rows if limit is None else min(limit, source.num_rows)
    windows = cut_windows(source, _WINDOW_ROWS, _WINDOW_BYTES, limit)
    if chosen is None or chosen[0] >= total:
        yield from ((window, list(range(window.num_rows))) for window in windows)
        return
    number, seed = chosen
    rows = sorted(Random(seed).sample(range(total), number))
    for window in windows:
        inside = rows[bisect_left(rows, window.start) : bisect_left(rows, window.stop)]
        if inside:
            yield window, [row - window.start for row in inside]


def _texts(unit: Unit, expected: str | None) -> list[str | None]:
    if expected is None:
        return [None] * unit.num_rows
    return [None if value is None else str(value) for value in unit.kept().column(expected).to_pylist()]
