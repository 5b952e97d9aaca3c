"""Arrow types of input columns: plain types for processing, types of kept columns in the output, and merged schemas.

A plain type has dictionaries decoded, large, view and fixed-size variants replaced by the ordinary type, and extension
types except UUIDs replaced by their storage. The code that reads and renders rows thus handles only `string`, `binary`,
`list`, `struct` and `map`, and files of one dataset may differ in encoding. Kept columns get their original type back
when their part is written.
"""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.formatting import nearest


def plain_type(t: pa.DataType) -> pa.DataType:
    """Return the plain type of `t`; a cast to it keeps all values. A UUID stays a UUID: its text is not its bytes."""
    if isinstance(t, pa.UuidType):
        return t
    if isinstance(t, pa.Bool8Type):
        return pa.bool_()
    if isinstance(t, pa.BaseExtensionType):
        return plain_type(t.storage_type)
    if pa.types.is_dictionary(t) or pa.types.is_run_end_encoded(t):
        return plain_type(t.value_type)
    if pa.types.is_large_string(t) or pa.types.is_string_view(t):
        return pa.string()
    if pa.types.is_large_binary(t) or pa.types.is_binary_view(t) or pa.types.is_fixed_size_binary(t):
        return pa.binary()
    if pa.types.is_fixed_size_list(t):
        return pa.list_(plain_type(t.value_type), t.list_size)
    if pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_list_view(t) or pa.types.is_large_list_view(t):
        return pa.list_(plain_type(t.value_type))
    if pa.types.is_struct(t):
        return pa.struct([pa.field(f.name, plain_type(f.type)) for f in t.fields])
    if pa.types.is_map(t):
        return pa.map_(plain_type(t.key_type), plain_type(t.item_type))
    return t


def kept_type(t: pa.DataType) -> pa.DataType:
    """Return the output type of a kept column of type `t`: `t` itself if a part can hold it.

    Each part has its own dictionary, so dictionaries are unordered, and their indices are int32 to fit many files.
    Views become plain types, since Arrow cannot sort or take their rows. Nested fields are nullable, since the rows of
    a damaged row group are null.
    """
    if isinstance(t, pa.BaseExtensionType):
        return t if _can_be_cast(plain_type(t), t) else plain_type(t)
    if pa.types.is_nested(t) and _has_nulls_alone(t):  # Arrow cannot cast such lists
        return plain_type(t)
    if pa.types.is_dictionary(t):
        return pa.dictionary(pa.int32(), kept_type(t.value_type))
    if pa.types.is_fixed_size_list(t):
        return pa.list_(kept_type(t.value_type), t.list_size)
    if pa.types.is_list(t):
        return pa.list_(kept_type(t.value_type))
    if pa.types.is_large_list(t):
        return pa.large_list(kept_type(t.value_type))
    if pa.types.is_struct(t):
        return pa.struct([pa.field(f.name, kept_type(f.type)) for f in t.fields])
    if pa.types.is_map(t):
        return pa.map_(kept_type(t.key_type), kept_type(t.item_type))
    is_unchanged = pa.types.is_large_string(t) or pa.types.is_large_binary(t) or pa.types.is_fixed_size_binary(t)
    return t if is_unchanged else plain_type(t)


def _has_nulls_alone(t: pa.DataType) -> bool:
    return pa.types.is_null(t) or any(_has_nulls_alone(t.field(i).type) for i in range(t.num_fields))


def _can_be_cast(a: pa.DataType, b: pa.DataType) -> bool:
    try:
        pa.nulls(1, a).cast(b)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with plain types, every field nullable, without metadata (pandas' would be wrong for the
    output)."""
    return pa.schema([pa.field(f.name, plain_type(f.type)) for f in schema])


def kept_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with the output types of kept columns, every field nullable, without metadata."""
    return pa.schema([pa.field(f.name, kept_type(f.type)) for f in schema])


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows; `pa.Schema.empty_table` fails for lists of UUIDs."""
    return pa.Table.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)


def merge_types(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both without loss, or None; plain if the two differ.

    int32 and int64 give int64; int and string give None. Two units of time give the finer one, which may overflow for
    times of the coarser one (`times_made_finer`).
    """
    if a.equals(b):
        return a
    if pa.types.is_null(a) or pa.types.is_null(b):
        return b if pa.types.is_null(a) else a
    a, b = plain_type(a), plain_type(b)
    if a.equals(b):
        return a
    if pa.types.is_nested(a) or pa.types.is_nested(b):
        return _merge_nested(a, b)
    if all(pa.types.is_binary(t) or isinstance(t, pa.UuidType) for t in (a, b)):
        return pa.binary()
    for kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_string):
        if kind(a) != kind(b):
            return None
    if pa.types.is_uint64(a) != pa.types.is_uint64(b) and not (
        pa.types.is_unsigned_integer(a) and pa.types.is_unsigned_integer(b)
    ):
        return None
    try:
        merged = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return None
    return merged.field("x").type


def _merge_nested(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if pa.types.is_map(a) and pa.types.is_map(b):
        key, item = merge_types(a.key_type, b.key_type), merge_types(a.item_type, b.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        ours, theirs = ({f.name: f.type for f in t.fields} for t in (a, b))
        if len(ours) < a.num_fields or len(theirs) < b.num_fields:  # duplicate field names
            return None
        names, nothing = dict.fromkeys([*ours, *theirs]), pa.null()
        merged = {name: merge_types(ours.get(name, nothing), theirs.get(name, nothing)) for name in names}
        return None if None in merged.values() else pa.struct(list(merged.items()))
    if all(is_list(t) or pa.types.is_fixed_size_list(t) for t in (a, b)):
        value = merge_types(a.value_type, b.value_type)
        sizes = [t.list_size if pa.types.is_fixed_size_list(t) else -1 for t in (a, b)]
        return None if value is None else pa.list_(value, sizes[0] if sizes[0] == sizes[1] else -1)
    return None


@dataclass(frozen=True)
class UnifiedColumn:
    """Column that files store in different plain types. stored: each type as text, with the first file that has it."""

    type: pa.DataType
    stored: Mapping[str, str]

    def to_text(self, name: str) -> str:
        stored = ", ".join(f"{kind} in {file}" for kind, file in self.stored.items())
        return f"{name}: {stored}, read as {self.type}"


@dataclass(frozen=True)
class MergedSchemas:
    """Merged columns of several files. missing: columns that a file lacks, with the first such file. conflicts: columns
    that cannot be merged, with the reason."""

    schema: pa.Schema
    missing: Mapping[str, str] = field(default_factory=dict)
    conflicts: Mapping[str, str] = field(default_factory=dict)
    unified: Mapping[str, UnifiedColumn] = field(default_factory=dict)


def merge_schemas(schemas: list[tuple[str, pa.Schema]]) -> MergedSchemas:
    """Merge the kept schemas of named files."""
    types: dict[str, pa.DataType] = {}
    stored: dict[str, dict[str, str]] = {}
    conflicts: dict[str, str] = {}
    for name, schema in schemas:
        for f in schema:
            if schema.names.count(f.name) > 1:
                conflicts.setdefault(f.name, f"{name} has more than one column of this name")
                continue
            merged, before = merge_types(types.get(f.name, f.type), f.type), stored.setdefault(f.name, {})
            if merged is None:
                first = next(iter(before.values()))
                conflicts.setdefault(
                    f.name, f"it is {f.type} in {name}, but {types[f.name]} in earlier files, the first being {first}"
                )
            else:
                types[f.name] = merged
                if not pa.types.is_null(f.type):
                    before.setdefault(str(plain_type(f.type)), name)
    missing = {
        column: name
        for column in [*types, *conflicts]
        for name, schema in reversed(schemas)
        if column not in schema.names
    }
    schema = pa.schema([(n, t) for n, t in types.items() if n not in conflicts])
    unified = {f.name: UnifiedColumn(f.type, stored[f.name]) for f in schema if len(stored[f.name]) > 1}
    return MergedSchemas(schema, missing, conflicts, unified)


def is_text(t: pa.DataType) -> bool:
    return pa.types.is_string(t) or pa.types.is_binary(t)


def is_list(t: pa.DataType) -> bool:
    return pa.types.is_list(t) or pa.types.is_large_list(t)


_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def leaves(t: pa.DataType, becomes: pa.DataType | None = None) -> list[tuple[pa.DataType, pa.DataType | None]]:
    """Return the leaf types of `t` in the order of Parquet's columns, each with its counterpart in `becomes`, a type of
    the same shape that may have more fields."""
    t = plain_type(t)
    becomes = becomes and plain_type(becomes)
    if pa.types.is_struct(t):
        parts = [(f.type, becomes and becomes.field(f.name).type) for f in t.fields]
    elif pa.types.is_map(t):
        parts = [(t.key_type, becomes and becomes.key_type), (t.item_type, becomes and becomes.item_type)]
    elif is_list(t) or pa.types.is_fixed_size_list(t):
        parts = [(t.value_type, becomes and becomes.value_type)]
    else:
        return [(t, becomes)]
    return [leaf for own, other in parts for leaf in leaves(own, other)]


def times_made_finer(own: pa.DataType, becomes: pa.DataType) -> int | None:
    """Return the factor by which a cast multiplies the numbers of a timestamp or duration; None if it does not, and for
    other types."""
    if not all(pa.types.is_timestamp(t) or pa.types.is_duration(t) for t in (own, becomes)) or own.unit == becomes.unit:
        return None
    return _PER_SECOND[becomes.unit] // _PER_SECOND[own.unit]


def decoded_bytes(array: pa.Array) -> np.ndarray:
    """Return the size in bytes of each row's values, with dictionaries decoded."""
    t = array.type
    if isinstance(array, pa.ExtensionArray):
        return decoded_bytes(array.storage)
    if isinstance(array, pa.DictionaryArray):
        sizes = np.append(decoded_bytes(array.dictionary), 0)
        return sizes[array.indices.fill_null(len(sizes) - 1).to_numpy(zero_copy_only=False)]
    if pa.types.is_struct(t):
        return sum((decoded_bytes(array.field(i)) for i in range(t.num_fields)), np.zeros(len(array), np.int64))
    if pa.types.is_map(t):
        return np.diff(_ends(decoded_bytes(array.keys) + decoded_bytes(array.items))[array.offsets.to_numpy()])
    if pa.types.is_nested(t):
        ends, (starts, lengths) = _ends(decoded_bytes(array.values)), _spans(array)
        return ends[starts + lengths] - ends[starts]
    if is_text(plain_type(t)) and not pa.types.is_fixed_size_binary(t):
        return pc.call_function("binary_length", [array]).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.full(len(array), 0 if pa.types.is_null(t) else max(1, t.bit_width // 8), np.int64)


def plain_array(array: pa.Array, t: pa.DataType) -> pa.Array:
    """Cast the values to the plain type `t`. Raises ArrowInvalid if `t` has a finer unit of time and a value overflows.

    Lists, structs and maps are rebuilt here: Arrow's own casts lose the last offset of list views and produce broken
    lists of nulls.
    """
    if isinstance(array, pa.ExtensionArray) and not isinstance(t, pa.UuidType):
        return plain_array(array.storage, t)
    if isinstance(array, pa.DictionaryArray):
        return plain_array(array.dictionary_decode(), t)
    own = array.type
    if own.equals(t):
        return array
    if pa.types.is_null(own):
        return pa.nulls(len(array), t)
    if not pa.types.is_nested(t):
        return array.cast(t)
    mask = array.is_null()
    if pa.types.is_struct(t):
        found = {f.name: i for i, f in enumerate(own.fields)}
        same = [f.name for f in own.fields] == [f.name for f in t.fields]  # names may repeat
        indices = range(t.num_fields) if same else [found.get(f.name) for f in t.fields]
        fields = [
            pa.nulls(len(array), f.type) if i is None else plain_array(array.field(i), f.type)
            for i, f in zip(indices, t.fields, strict=True)
        ]
        return pa.StructArray.from_arrays(fields, fields=list(t), mask=mask)
    if pa.types.is_map(t):
        array = array.take(pa.array(range(len(array)))) if array.offset else array
        keys, items = plain_array(array.keys, t.key_type), plain_array(array.items, t.item_type)
        return pa.MapArray.from_arrays(array.offsets, keys, items, type=t, mask=mask)
    if pa.types.is_fixed_size_list(t):
        values = array.values.slice(array.offset * t.list_size, len(array) * t.list_size)
        return pa.FixedSizeListArray.from_arrays(plain_array(values, t.value_type), type=t, mask=mask)
    starts, lengths = _spans(array)
    ends, has_any = _ends(lengths), lengths > 0
    first = starts[has_any][:1].sum()
    if np.array_equal(starts[has_any], first + ends[:-1][has_any]):
        values = array.values.slice(first, ends[-1])
    else:
        values = array.values.take(pa.array(np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])))
    return pa.ListArray.from_arrays(
        pa.array(ends, pa.int32()), plain_array(values, t.value_type), type=t, mask=array.is_null()
    )


def _spans(lists: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the offset in `values` and the length of each list of any kind; a null has length 0."""
    t = lists.type
    if pa.types.is_fixed_size_list(t):
        starts = (np.arange(len(lists)) + lists.offset) * t.list_size
        lengths = np.full(len(lists), t.list_size)
    elif pa.types.is_list_view(t) or pa.types.is_large_list_view(t):
        starts, lengths = lists.offsets.to_numpy(), lists.sizes.to_numpy()
    else:
        offsets = lists.offsets.to_numpy()
        starts, lengths = offsets[:-1], np.diff(offsets)
    return starts.astype(np.int64), np.where(lists.is_null().to_numpy(zero_copy_only=False), 0, lengths).astype(
        np.int64
    )


def _ends(sizes: np.ndarray) -> np.ndarray:
    """Return 0 followed by the cumulative sums of the sizes."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def same_characters(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` with the characters of `name` in another Unicode form: precomposed (NFC), as most
    systems write them, or decomposed (NFD), as in file names of macOS."""
    composed = unicodedata.normalize("NFC", name)
    return next((n for n in names if n != name and unicodedata.normalize("NFC", n) == composed), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: " (did you mean 'report'?)" or, if no name is close, the known names. A name that
    looks the same in another Unicode form is shown as the job file can write it."""
    names: Sequence[str] = list(known)
    if same := same_characters(name, names):
        escaped = same.encode("unicode_escape").decode()
        return f' (a column {same!r} differs only in its Unicode form; write it in double quotes as "{escaped}")'
    if close := nearest(name, names):
        return f" (did you mean {close!r}?)"
    shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return f" (known: {shown})" if names else ""
