"""Arrow types of input columns: one plain type for the many ways to store the same values, the type that a kept
column has in the output, and schemas merged over files.

Plain: dictionaries decoded, large and view variants made ordinary, extension types stored as what they wrap.
So what reads, renders and sends rows meets `string`, `binary`, `list` and `struct` only, and a dataset whose files
differ in encoding is one. Kept columns get their own type back when their part is made.
"""

from collections.abc import Iterable, Sequence

import pyarrow as pa

from pipeline.formatting import nearest


def plain_type(t: pa.DataType) -> pa.DataType:
    """The plain type of `t`; values are unchanged by a cast to it."""
    if isinstance(t, pa.BaseExtensionType):
        return plain_type(t.storage_type)
    if pa.types.is_dictionary(t) or pa.types.is_run_end_encoded(t):
        return plain_type(t.value_type)
    if pa.types.is_large_string(t) or pa.types.is_string_view(t):
        return pa.string()
    if pa.types.is_large_binary(t) or pa.types.is_binary_view(t):
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
    """The type of a kept column of `t` in the output: `t`, as far as a part can hold it.

    A dictionary is each part's own, so it has no order, and room for the rows of many files. Views are plain: Arrow
    cannot sort or take rows of them. Nothing inside is `not null`, as the rows of a damaged row group are null.
    """
    if isinstance(t, pa.BaseExtensionType):
        return t if _can_be_cast(plain_type(t), t) else plain_type(t)
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
    return t if pa.types.is_large_string(t) or pa.types.is_large_binary(t) else plain_type(t)


def _can_be_cast(a: pa.DataType, b: pa.DataType) -> bool:
    try:
        pa.nulls(1, a).cast(b)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Plain types, every field nullable, no metadata (pandas' would not be true of the output)."""
    return pa.schema([pa.field(f.name, plain_type(f.type)) for f in schema])


def kept_schema(schema: pa.Schema) -> pa.Schema:
    """As `plain_schema`, with the types that kept columns have in the output."""
    return pa.schema([pa.field(f.name, kept_type(f.type)) for f in schema])


def merge_types(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without loss, plain where they differ, or None. int32 with int64 is
    int64; int with string is None."""
    if a.equals(b):
        return a
    if pa.types.is_null(a) or pa.types.is_null(b):
        return b if pa.types.is_null(a) else a
    a, b = plain_type(a), plain_type(b)
    if a.equals(b):
        return a
    for kind in (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_string,
        pa.types.is_binary,
    ):
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


def merge_schemas(schemas: list[tuple[str, pa.Schema]]) -> tuple[pa.Schema, dict[str, str], dict[str, str]]:
    """One schema over the kept schemas of named files; columns that some file lacks, with the first such
    file; columns that cannot be one, with the reason."""
    types: dict[str, pa.DataType] = {}
    conflicts: dict[str, str] = {}
    for name, schema in schemas:
        for f in schema:
            if schema.names.count(f.name) > 1:
                conflicts.setdefault(f.name, f"{name} has more than one column of this name")
                continue
            merged = merge_types(types.get(f.name, f.type), f.type)
            if merged is None:
                conflicts.setdefault(f.name, f"{name} has it as {f.type}, files before it as {types[f.name]}")
            else:
                types[f.name] = merged
    missing = {
        column: name
        for column in [*types, *conflicts]
        for name, schema in reversed(schemas)
        if column not in schema.names
    }
    return pa.schema([(n, t) for n, t in types.items() if n not in conflicts]), missing, conflicts


def is_text(t: pa.DataType) -> bool:
    return pa.types.is_string(t) or pa.types.is_binary(t)


def is_list(t: pa.DataType) -> bool:
    return pa.types.is_list(t) or pa.types.is_large_list(t)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'report'?)" or, where nothing is close, the names there are; for the end of a
    message."""
    names: Sequence[str] = list(known)
    if close := nearest(name, names):
        return f" (did you mean {close!r}?)"
    shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    return f" (there are: {shown})" if names else ""
