"""Units: rows that are generated, retried and committed together, stored as one Arrow table.

`window_units` and `make_units` turn a window into units: render, read per-row sampling values, order, cut. A window
whose values or prompts exceed `UnitSpec.max_bytes` is processed in stretches of rows.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.bucket import cut_units, estimate_tokens
from pipeline.data.conditions import Condition
from pipeline.data.prompts import PromptSpec, Rendered, render
from pipeline.data.row_adapters import RowAdapters
from pipeline.data.row_checksum import row_mixes, rows_checksum, sum_of
from pipeline.data.row_texts import RowTexts
from pipeline.data.source import (
    DAMAGED_KEY,
    GROUPS_KEY,
    WINDOW_KEY,
    DamagedGroup,
    InputWindow,
    KnownDamage,
    Source,
    read_stretches,
)
from pipeline.errors import RowError

_IMAGE = pa.struct([("content", pa.binary()), ("name", pa.string())])  # one of them, the other null; name: path or url
# These follow the kept columns and are accessed by position, so input columns may have the same names.
OWN_FIELDS = (
    pa.field("source_file", pa.string()),
    pa.field("source_row", pa.int64()),
    pa.field("_prompt", pa.string()),  # rendered text, or messages as JSON; null for an error row
    pa.field("_error", pa.string()),  # a RowError code, or null
    pa.field("_error_message", pa.string()),
    pa.field("_params", pa.string()),  # per-row sampling values as a JSON object, or null
    pa.field("_expected", pa.string()),  # expected answer, or null
    pa.field("_texts", pa.string()),  # from `RowTexts`, or null
    pa.field("_adapter", pa.string()),  # from `RowAdapters`, or null
    pa.field("_dropped", pa.bool_()),  # `UnitSpec.when` does not hold: the row is not computed
    pa.field("_images", pa.list_(_IMAGE)),  # images to which the parts of messages refer, in their order, or null
    pa.field("_inputs", pa.null()),  # with steps a struct of the input columns that they read
)
_OWN_NAMES = [f.name for f in OWN_FIELDS]
CUT_VERSION = 1  # raise it when a change of the code cuts the same input into other units
UNIT_TOKENS = 100_000  # approximate max tokens of a unit: a minute of work
MAX_STRETCH_BYTES = 1 << 30  # an Arrow string column holds at most 2 GiB
# Approximate tokens of an image of a megapixel, for the size of a unit: a model's own number would cut the units of
# machines with and without its files differently. A unit has at most some megabytes of images.
IMAGE_TOKENS = 1500
IMAGE_BYTES_PER_TOKEN = 64
_DROPPED = "dropped"  # replaces the error of a row that is not computed
MAX_BUDGET = 1 << 20  # limit of a row's max_tokens when estimating the size of a unit


@dataclass(frozen=True)
class UnitSpec:
    """Settings that turn windows into units. Picklable."""

    prompt: PromptSpec
    kept: tuple[str, ...] = ()
    sampling_columns: Mapping[str, str] = field(default_factory=dict)  # sampling parameter -> column
    default_max_tokens: int = 16
    unit_tokens: int = UNIT_TOKENS
    unit_rows: int = 512
    expected: str | None = None  # column of expected answers
    default_n: int = 1  # samples per row
    texts: RowTexts | None = None  # texts of rows besides their prompts
    adapters: RowAdapters | None = None
    when: Condition | None = None  # of the rows to compute
    max_bytes: int = MAX_STRETCH_BYTES  # limit of a stretch's values, and of its prompts
    step_columns: tuple[str, ...] = ()  # input columns that later steps read
    step_tokens: int = 0  # max new tokens of a row's later steps
    max_pixels: int = 1 << 20  # of an image

    @property
    def image_tokens(self) -> int:
        """Approximate tokens of the largest image."""
        return max(1, IMAGE_TOKENS * self.max_pixels >> 20)

    def of_input(self, columns: Iterable[str]) -> "UnitSpec":
        """Return a copy for an input with these columns."""
        texts = self.texts and self.texts.of_input(columns)
        return replace(self, prompt=self.prompt.of_input(columns), texts=texts)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to read from the source, each once."""
        expected = [] if self.expected is None else [self.expected]
        texts = () if self.texts is None else self.texts.columns
        adapter = [] if self.adapters is None or self.adapters.column is None else [self.adapters.column]
        sampling, when = self.sampling_columns.values(), () if self.when is None else self.when.columns
        read = [*self.prompt.columns, *sampling, *expected, *texts, *adapter, *when, *self.step_columns]
        return tuple(dict.fromkeys([*self.kept, *read]))


@dataclass(frozen=True)
class Unit:
    """Unit `index` of the `of` units in window `window`."""

    window: int
    index: int
    num_units: int
    table: pa.Table

    @property
    def num_rows(self) -> int:
        return self.table.num_rows

    @property
    def image_bytes(self) -> int:
        """Size of the images of all rows."""
        return self.own("_images").nbytes

    def num_images(self) -> list[int]:
        """Return the number of each row's images."""
        return [count or 0 for count in pc.call_function("list_value_length", [self.own("_images")]).to_pylist()]

    def kept(self) -> pa.Table:
        """Return the kept input columns."""
        return self.table.select(list(range(self.table.num_columns - len(OWN_FIELDS))))

    def row_ids(self) -> list[tuple[str, int]]:
        """Return the `source_file` and `source_row` of each row."""
        return list(zip(self.own("source_file").to_pylist(), self.own("source_row").to_pylist()))

    def rows_checksum(self) -> int:
        """Return the checksum of the unit's rows."""
        return rows_checksum(self.own("source_file"), self.own("source_row"))

    def dropped(self) -> list[int]:
        """Return the indices of the rows that are not computed."""
        return pc.call_function("indices_nonzero", [self.own("_dropped")]).to_pylist()

    def of_rows(self, rows: Sequence[int]) -> "Unit":
        """Return a unit with the same window and index, restricted to these rows."""
        return Unit(self.window, self.index, self.num_units, self.table.take(pa.array(rows, pa.int64())))

    def own(self, name: str) -> pa.ChunkedArray:
        """Return a column of OWN_FIELDS, even if a kept input column has the same name."""
        return self.table.column(self.table.num_columns - len(OWN_FIELDS) + _OWN_NAMES.index(name))

    def with_own(self, name: str, values: Sequence[object]) -> "Unit":
        """Return a copy with other values of a column of OWN_FIELDS."""
        index = _OWN_NAMES.index(name)
        array = pa.array(values, OWN_FIELDS[index].type)
        at = self.table.num_columns - len(OWN_FIELDS) + index
        return replace(self, table=self.table.set_column(at, OWN_FIELDS[index], array))

    def to_bytes(self) -> bytes:
        head = {b"window": str(self.window), b"index": str(self.index), b"of": str(self.num_units)}
        table = self.table.replace_schema_metadata(head)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Unit":
        with pa.ipc.open_stream(data) as reader:
            table = reader.read_all()
        head = table.schema.metadata
        return cls(int(head[b"window"]), int(head[b"index"]), int(head[b"of"]), table.replace_schema_metadata(None))


@dataclass(frozen=True)
class _RenderedStretch:
    """Consecutive rows of a window with their prompts, the row indices of each unit, and the damaged row groups of the
    table from which the rows are."""

    table: pa.Table
    units: list[np.ndarray]
    damaged: tuple[DamagedGroup, ...] = ()

    def row_mixes(self) -> np.ndarray:
        return row_mixes(*(self._own(i) for i in range(2)))

    def num_computed(self) -> list[int]:
        """Return the number of rows of each unit that are not dropped."""
        dropped = self._own(_OWN_NAMES.index("_dropped")).to_numpy()
        return [len(rows) - int(dropped[rows].sum()) for rows in self.units]

    def _own(self, index: int) -> pa.ChunkedArray:
        return self.table.column(self.table.num_columns - len(OWN_FIELDS) + index)


class Units:
    """Units of one window, created on access, so that the window's text is not in memory twice. If the window has
    several stretches, each access reads and renders them again, one at a time.

    damaged: the window's damaged row groups. They are found once, so that each access cuts the same units.
    """

    def __init__(
        self,
        window: int,
        num_rows: int,
        stretches: Callable[[KnownDamage | None], Iterable[_RenderedStretch]],
        known: KnownDamage | None = None,
    ) -> None:
        self._window, self._stretches = window, stretches
        self._rows: list[int] = []  # number of rows, by unit
        self._computed: list[int] = []  # those of them that are not dropped
        self._checksums: list[int] = []
        self._only: _RenderedStretch | None = None
        damaged: dict[tuple[str, int], DamagedGroup] = {}
        for stretch in stretches(known):
            mixes = stretch.row_mixes()
            self._rows += [len(rows) for rows in stretch.units]
            self._computed += stretch.num_computed()
            self._checksums += [sum_of(mixes[rows]) for rows in stretch.units]
            damaged |= {(group.file, group.row_group): group for group in stretch.damaged}
            if stretch.table.num_rows == num_rows:
                self._only = stretch
            del stretch  # frees its memory before the next one is created
        self.damaged = tuple(damaged.values())
        self._known = known or KnownDamage(self.damaged)

    def __len__(self) -> int:
        return len(self._rows)

    def num_rows_of(self, index: int) -> int:
        return self._rows[index]

    def num_computed_of(self, index: int) -> int:
        """Return the number of a unit's rows that are not dropped."""
        return self._computed[index]

    def checksum_of(self, index: int) -> int:
        """Return the checksum of a unit's rows."""
        return self._checksums[index]

    def __iter__(self) -> Iterator[Unit]:
        return self.some(range(len(self)))

    def __getitem__(self, index: int) -> Unit:
        return next(self.some([range(len(self))[index]]))

    def some(self, indices: Iterable[int]) -> Iterator[Unit]:
        """Yield these units in order."""
        wanted, first = set(indices), 0
        for stretch in self._stretches(self._known) if self._only is None else [self._only]:
            for i, rows in enumerate(stretch.units, first):
                if i in wanted:
                    yield Unit(self._window, i, len(self), stretch.table.take(pa.array(rows)))
            first += len(stretch.units)
            if max(wanted, default=-1) < first:
                break
            del stretch  # frees its memory before the next one is created


def window_units(source: Source, window: InputWindow, spec: UnitSpec, known: KnownDamage | None = None) -> Units:
    """Read a window of the input and return its units. known: its damage, if it was cut before. Raises the errors of
    `read_stretches`."""

    def stretches(damage: KnownDamage | None) -> Iterator[_RenderedStretch]:
        for table in read_stretches(source, window, spec.columns, spec.max_bytes, damage):
            yield from _stretches_of(table, spec)

    return Units(window.index, window.num_rows, stretches, known)


def make_units(table: pa.Table, spec: UnitSpec, window: int | None = None) -> Units:
    """Return the units of one window, a table from `read_window`. window: its index; default: from the table's
    metadata.

    Every row of `table`, error rows included, is in exactly one unit. An empty table has no units.
    """
    if window is None:
        window = int((table.schema.metadata or {})[WINDOW_KEY])
    return Units(window, table.num_rows, lambda _: _stretches_of(table, spec))


def one_unit(table: pa.Table, spec: UnitSpec) -> Unit:
    """Return all rows of a table as one unit, in their order. The last two columns are `source_file` and
    `source_row`."""
    rendered = render(table.select(list(range(table.num_columns - 2))), spec.prompt)
    return Unit(0, 0, 1, _make_stretch(table, rendered, spec).table)


def _stretches_of(table: pa.Table, spec: UnitSpec) -> Iterator[_RenderedStretch]:
    """Split a table into stretches whose prompts have at most `spec.max_bytes`, or one row."""
    notes = table.schema.metadata or {}
    damaged = json.loads(notes.get(DAMAGED_KEY, b"[]"))
    groups = tuple(DamagedGroup(**group) for group in json.loads(notes.get(GROUPS_KEY, b"[]")))
    start = 0
    while start < table.num_rows:
        rest = table.slice(start)
        rendered = render(rest.select(list(range(table.num_columns - 2))), spec.prompt, spec.max_bytes)
        count = len(rendered.prompts)
        for first, stop, reason in damaged:
            for i in range(max(first - start, 0), min(stop - start, count)):
                rendered.errors[i], rendered.messages[i] = str(RowError.CORRUPT_INPUT), reason
        yield replace(_make_stretch(rest.slice(0, count), rendered, spec), damaged=groups)
        start += count


def _make_stretch(table: pa.Table, rendered: Rendered, spec: UnitSpec) -> _RenderedStretch:
    # by position: the last two columns are from read_stretches, and input columns may have the same names
    inputs = table.select(list(range(table.num_columns - 2)))
    errors, messages = rendered.errors, rendered.messages
    dropped = _drop(inputs, spec.when, rendered)
    params = _row_params(inputs, spec.sampling_columns, errors, messages)
    texts = [None] * table.num_rows if spec.texts is None else spec.texts.read(inputs, errors, messages)
    adapters = _adapters(inputs, spec.adapters, errors, messages)
    budgets = _budgets(params, errors, spec.default_max_tokens, spec.default_n)
    if spec.step_tokens:
        budgets += np.array([0 if error else spec.step_tokens for error in errors], dtype=np.int64)
    budgets += np.array([estimate_tokens(len(text.encode())) if text else 0 for text in texts], dtype=np.int64)
    of_images = [sum(max(spec.image_tokens, len(image) // IMAGE_BYTES_PER_TOKEN) for image in images)
                 for images in rendered.images]  # fmt: skip
    budgets += np.array(of_images, dtype=np.int64)
    encoded = _encoded(rendered.prompts, errors)
    cut = cut_units([p or b"" for p in encoded], budgets, spec.unit_tokens, spec.unit_rows, adapters)
    own = [
        table.column(table.num_columns - 2),
        table.column(table.num_columns - 1),
        pa.array(encoded, pa.string()),
        pa.array([None if error == _DROPPED else error for error in errors], pa.string()),
        pa.array(messages, pa.string()),
        pa.array([json.dumps(p) if p else None for p in params], pa.string()),
        pa.array(_expected(inputs, spec.expected), pa.string()),
        pa.array(texts, pa.string()),
        pa.array(adapters, pa.string()),
        pa.array(dropped, pa.bool_()),
        pa.array([list(map(_image, images)) or None for images in rendered.images], pa.list_(_IMAGE)),
        _inputs(inputs, spec.step_columns),
    ]
    del encoded
    rendered.images.clear()
    kept = inputs.select(list(spec.kept))
    fields = [
        field if field.type == column.type else field.with_type(column.type) for field, column in zip(OWN_FIELDS, own)
    ]
    whole = pa.Table.from_arrays([*kept.columns, *own], schema=pa.schema([*kept.schema, *fields])).combine_chunks()
    return _RenderedStretch(whole, cut)


def _drop(inputs: pa.Table, when: Condition | None, rendered: Rendered) -> list[bool]:
    """Return whether each row does not meet the condition. Such a row has neither a prompt nor an error of its own, but
    counts as failed while its unit is made (changes `rendered` in place). The values of damaged rows are unknown."""
    met = [True] * inputs.num_rows if when is None else when.met(inputs)
    dropped = [not is_met and code != RowError.CORRUPT_INPUT for is_met, code in zip(met, rendered.errors, strict=True)]
    for i in np.flatnonzero(dropped):
        rendered.errors[i], rendered.messages[i], rendered.images[i] = _DROPPED, None, []
    return dropped


def _inputs(inputs: pa.Table, names: tuple[str, ...]) -> pa.Array | pa.ChunkedArray:
    """Return the column `_inputs`."""
    if not names:
        return pa.nulls(inputs.num_rows)
    return pa.chunked_array([batch.to_struct_array() for batch in inputs.select(list(names)).to_batches()])


def _image(image: bytes | str) -> dict[str, bytes | str]:
    return {"name": image} if isinstance(image, str) else {"content": image}


def _encoded(prompts: list[str | None], errors: list[str | None]) -> list[bytes | None]:
    """Encode the prompts of rows without an error as UTF-8. Sets the entries of `prompts` to None, to hold each prompt
    once."""
    out: list[bytes | None] = []
    for i, (prompt, error) in enumerate(zip(prompts, errors, strict=True)):
        out.append(prompt.encode() if prompt is not None and error is None else None)
        prompts[i] = None
    return out


def _row_params(
    inputs: pa.Table, columns: Mapping[str, str], errors: list[str | None], messages: list[str | None]
) -> list[dict[str, object]]:
    """Return each row's own sampling values; null means the job's. A value that JSON cannot represent makes the row an
    error row (changes `errors` and `messages` in place)."""
    out: list[dict[str, object]] = [{} for _ in range(inputs.num_rows)]
    for name, column in columns.items():
        for i, value in enumerate(_values(inputs.column(column))):
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # 64.0: pandas turns integer columns with nulls into float
            if _is_plain(value):
                out[i][name] = value
            elif errors[i] is None:
                errors[i] = str(RowError.INVALID_SAMPLING)
                found = f"column {column!r} does not hold a number, a text or a list of these"
                items = value if isinstance(value, list) else [value]
                if number := next((v for v in items if isinstance(v, float) and not math.isfinite(v)), None):
                    found = f"{number} in column {column!r}, expected a finite number"
                if None in items:
                    found = f"a null among the values of column {column!r}"
                messages[i] = f"sampling.{name}: {found}"
    return out


def _expected(inputs: pa.Table, column: str | None) -> list[str | None]:
    """Return each row's expected answer as text, or None."""
    if column is None:
        return [None] * inputs.num_rows
    values = (value.decode("utf-8", "replace") if isinstance(value, bytes) else value
              for value in _values(inputs.column(column)))  # fmt: skip
    return [None if value is None else str(value) for value in values]


def _adapters(
    inputs: pa.Table, adapters: RowAdapters | None, errors: list[str | None], messages: list[str | None]
) -> list[str | None]:
    """Return each row's adapter, or None. A row with an unknown one becomes an error row, in place."""
    if adapters is None:
        return [None] * inputs.num_rows
    values = () if adapters.column is None else _values(inputs.column(adapters.column))
    return adapters.read(values, errors, messages)


def _values(column: pa.ChunkedArray) -> Iterable[object]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        return (_value(column, i) for i in range(len(column)))


def _value(column: pa.ChunkedArray, i: int) -> object:
    """Return a value; b"" for text that is not UTF-8, and for dates and times that Python cannot represent."""
    try:
        return column[i].as_py()
    except (ValueError, OverflowError):
        return b""


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_plain(v) for v in value)
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and abs(value) < float("inf"))


def _budgets(params: list[dict[str, object]], errors: list[str | None], default: int, default_n: int) -> np.ndarray:
    """Return the max new tokens of each row, over all its samples; 0 for an error row."""
    out = np.zeros(len(params), dtype=np.int64)
    for i, (own, error) in enumerate(zip(params, errors, strict=True)):
        wanted, n = own.get("max_tokens", default), own.get("n", default_n)
        if error is None and isinstance(wanted, int) and isinstance(n, int):
            out[i] = min(max(wanted, 0) * max(n, 1), MAX_BUDGET)
    return out
