"""Conditions over columns, written as in SQL: `lang = 'de' and (score > 0.5 or reviewed)`.

A condition is parsed once into a tree; no Python is evaluated. As in SQL, a comparison with null is neither true nor
false but null, `and`, `or` and `not` follow three-valued logic, and a condition that is null is not met.

    condition  = all {"or" all}
    all        = test {"and" test}
    test       = "not" test | "(" condition ")" | value [comparison]
    comparison = ("=" | "!=" | "<>" | "<" | "<=" | ">" | ">=") value
               | "is" ["not"] "null" | ["not"] "in" "(" literal {"," literal} ")"
    value      = literal | name {"." name}
    literal    = number | 'text' | "true" | "false"
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.columns import did_you_mean, plain_type
from pipeline.errors import ConfigError

MAX_CHARS = 10_000
MAX_NESTING = 50  # of parentheses and `not`; parsing and evaluation are recursive
_MAX_SHOWN = 60  # characters of a condition in a message
_MAX_DIGITS = 100  # Python refuses to parse integers of thousands of digits
_WORDS = ("and", "or", "not", "is", "null", "in", "true", "false")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")+")
    |(?P<name>[^\W\d]\w*)
    |(?P<symbol><>|!=|<=|>=|==|&&|\|\||[=<>(),.])
    |(?P<end>\Z)
    )""",
    re.VERBOSE,
)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_INSTEAD = {"==": "=", "&&": "and", "||": "or"}
_AFTER_TEST = ("and", "or", ")", "end")
_QUOTED = "; write names with other characters in double quotes"

Kind = Literal["number", "text", "boolean", "null", "other"]
Values = Callable[["_Name"], Any]  # returns a row's value of a name
_SHOWN_KINDS = {"number": "a number", "text": "a text", "boolean": "true or false"}


@dataclass(frozen=True, slots=True)
class _Literal:
    at: int
    value: Any

    def kind(self, schema: pa.Schema) -> Kind:
        return "boolean" if isinstance(self.value, bool) else "text" if isinstance(self.value, str) else "number"

    def show(self, schema: pa.Schema) -> str:
        return f"{_shown(self.value)} is {_SHOWN_KINDS[self.kind(schema)]}"

    def get(self, values: Values) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class _Name:
    """Column, or a field in a column of structs. path: the column's name, then those of fields."""

    at: int
    path: tuple[str, ...]
    is_quoted: bool

    def __str__(self) -> str:
        return ".".join(self.path)

    def type_in(self, schema: pa.Schema) -> pa.DataType:
        """Return the plain type of the values. Raises _Mistake if the schema lacks the name."""
        column, *fields = self.path
        if schema.names.count(column) != 1:
            hint = did_you_mean(column, schema.names)
            if str(self) in schema.names:
                hint = f'; write "{self}" in double quotes for the column of this name'
            elif self.is_quoted:
                hint = f"; a text is written in single quotes{hint}"
            raise _Mistake(self.at, f"no column {column!r}{hint}")
        found = plain_type(schema.field(column).type)
        for i, name in enumerate(fields, 1):
            before = ".".join(self.path[:i])
            if not pa.types.is_struct(found):
                raise _Mistake(self.at, f"`{self}`: {before!r} is {found}, which has no fields; expected a struct")
            names = [field.name for field in found.fields]
            if names.count(name) != 1:
                raise _Mistake(self.at, f"`{self}`: no field {name!r} in {before!r}{did_you_mean(name, names)}")
            found = found.field(name).type
        return found

    def kind(self, schema: pa.Schema) -> Kind:
        return _kind_of(self.type_in(schema))

    def show(self, schema: pa.Schema) -> str:
        found, kind = self.type_in(schema), self.kind(schema)
        return f"`{self}` is {_SHOWN_KINDS[kind]} ({found})" if kind in _SHOWN_KINDS else f"`{self}` is {found}"

    def get(self, values: Values) -> Any:
        return values(self)


_Value = _Literal | _Name


@dataclass(frozen=True, slots=True)
class _IsTrue:
    """Value that is a condition of its own."""

    value: _Value

    def check(self, schema: pa.Schema) -> None:
        if self.value.kind(schema) not in ("boolean", "null"):
            raise _Mistake(self.value.at, f"{self.value.show(schema)}, expected a comparison, or true or false")

    def holds(self, values: Values) -> bool | None:
        return self.value.get(values)


@dataclass(frozen=True, slots=True)
class _Compare:
    at: int
    sign: str
    left: _Value
    right: _Value

    def check(self, schema: pa.Schema) -> None:
        kinds = [_comparable_kind(self.at, value, schema) for value in (self.left, self.right)]
        if "null" not in kinds and kinds[0] != kinds[1]:
            raise _Mistake(self.at, f"{self.left.show(schema)}, but {self.right.show(schema)}; expected the same kind")
        if "boolean" in kinds and self.sign not in ("=", "!=", "<>"):
            raise _Mistake(self.at, "true and false have no order; expected = or !=")

    def holds(self, values: Values) -> bool | None:
        return _compared(self.sign, self.left.get(values), self.right.get(values))


@dataclass(frozen=True, slots=True)
class _IsNull:
    value: _Value

    def check(self, schema: pa.Schema) -> None:
        self.value.kind(schema)

    def holds(self, values: Values) -> bool:
        return self.value.get(values) is None


@dataclass(frozen=True, slots=True)
class _In:
    value: _Value
    choices: tuple[_Literal, ...]

    def check(self, schema: pa.Schema) -> None:
        for choice in self.choices:
            _Compare(choice.at, "=", self.value, choice).check(schema)

    def holds(self, values: Values) -> bool | None:
        value = self.value.get(values)
        found = [_compared("=", value, choice.value) for choice in self.choices]
        return None if None in found else True in found


@dataclass(frozen=True, slots=True)
class _Not:
    inner: "_Test"

    def check(self, schema: pa.Schema) -> None:
        self.inner.check(schema)

    def holds(self, values: Values) -> bool | None:
        found = self.inner.holds(values)
        return None if found is None else not found


@dataclass(frozen=True, slots=True)
class _Chain:
    """Tests between `and`s or `or`s. decisive: the result of one test that decides the whole chain."""

    tests: tuple["_Test", ...]
    decisive: bool

    def check(self, schema: pa.Schema) -> None:
        for test in self.tests:
            test.check(schema)

    def holds(self, values: Values) -> bool | None:
        is_unknown = False
        for test in self.tests:
            found = test.holds(values)
            if found is self.decisive:
                return found
            is_unknown = is_unknown or found is None
        return None if is_unknown else not self.decisive


_Test = _IsTrue | _Compare | _IsNull | _In | _Not | _Chain


@dataclass(frozen=True)
class Condition:
    """Parsed condition. key: the job file's key that holds it, the beginning of messages."""

    text: str
    key: str
    _test: _Test
    _names: tuple[_Name, ...]

    @classmethod
    def parse(cls, text: str, key: str) -> "Condition":
        """Parse a condition. Raises ConfigError with the place of the first mistake."""
        if len(text) > MAX_CHARS:
            raise ConfigError(f"{key}: {len(text):,} characters; expected at most {MAX_CHARS:,}")
        try:
            text.encode()
            parser = _Parser(text)
            test = parser.parse()
        except UnicodeEncodeError as error:  # a lone surrogate
            raise ConfigError(f"{key}: {error}") from error
        except _Mistake as mistake:
            raise ConfigError(f"{key}: {mistake.shown_in(text)}") from None
        return cls(text, key, test, tuple(parser.names))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the condition reads, each once, in its order."""
        return tuple(dict.fromkeys(name.path[0] for name in self._names))

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if the schema lacks a name, or if values of different kinds are compared."""
        try:
            self._test.check(schema)
        except _Mistake as mistake:
            raise ConfigError(f"{self.key}: {mistake.shown_in(self.text)}") from None

    def met(self, table: pa.Table) -> list[bool]:
        """Return whether each row of a table meets the condition, which was checked with its schema."""
        columns = {name.path: _column_values(table, name) for name in self._names}
        return [self._test.holds(lambda name, i=i: columns[name.path][i]) is True for i in range(table.num_rows)]


class _Mistake(Exception):
    """Mistake at a position of a condition's text."""

    def __init__(self, at: int, problem: str) -> None:
        super().__init__(problem)
        self.at = at

    def shown_in(self, text: str) -> str:
        """Return the problem, then the line of the text with a caret under the position."""
        start = text.rfind("\n", 0, self.at) + 1
        line, column = text[start:].partition("\n")[0].replace("\t", " "), self.at - start
        first = max(0, column - _MAX_SHOWN // 2)
        last = first + _MAX_SHOWN
        before, after = "..." if first else "", "..." if last < len(line) else ""
        caret = " " * (len(before) + column - first) + "^"
        return f"character {self.at + 1}: {self}\n    {before}{line[first:last]}{after}\n    {caret}"


class _Parser:
    """Recursive descent over the grammar of this module. names: those found so far."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._depth = 0
        self.names: list[_Name] = []
        self._next()

    def parse(self) -> _Test:
        if self._kind == "end":
            raise _Mistake(0, "the condition is empty")
        test = self._condition()
        self._expect("end", "and, or, or the end")
        if not self.names:
            raise _Mistake(0, "names no column, so it would be the same for every row")
        return test

    def _next(self) -> None:
        self._at, self._kind, self._token = next(self._tokens)

    def _has(self, kind: str) -> bool:
        """Consume the token if it is of this kind."""
        found = self._kind == kind
        if found and kind != "end":
            self._next()
        return found

    def _expect(self, kind: str, expected: str) -> None:
        if not self._has(kind):
            raise self._unexpected(expected)

    def _unexpected(self, expected: str) -> _Mistake:
        instead = _INSTEAD.get(self._token)
        if instead is not None:
            return _Mistake(self._at, f"{self._token} is not an operator here; write {instead}")
        found = f"`{self._token:.40}`" if self._kind != "end" else "the end"
        return _Mistake(self._at, f"found {found}, expected {expected}")

    def _condition(self) -> _Test:
        tests = [self._all()]
        while self._has("or"):
            tests.append(self._all())
        return tests[0] if len(tests) == 1 else _Chain(tuple(tests), decisive=True)

    def _all(self) -> _Test:
        tests = [self._one()]
        while self._has("and"):
            tests.append(self._one())
        return tests[0] if len(tests) == 1 else _Chain(tuple(tests), decisive=False)

    def _one(self) -> _Test:
        at, kind = self._at, self._kind
        if kind not in ("not", "("):
            return self._comparison()
        self._next()
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _Mistake(at, f"more than {MAX_NESTING} levels of parentheses and `not`")
        inner = _Not(self._one()) if kind == "not" else self._condition()
        self._depth -= 1
        if kind == "(":
            self._expect(")", "and, or, or )")
        return inner

    def _comparison(self) -> _Test:
        value = self._value("a column, a number, a text in single quotes, true, false, not or (")
        at, sign = self._at, self._kind
        if sign in _COMPARE:
            self._next()
            return _Compare(at, sign, value, self._value("a column, a number, a text in single quotes, true or false"))
        if self._has("is"):
            is_negated = self._has("not")
            self._expect("null", "null" if is_negated else "null or not null")
            return _Not(_IsNull(value)) if is_negated else _IsNull(value)
        is_negated = self._has("not")
        if self._has("in"):
            found = _In(value, self._choices())
            return _Not(found) if is_negated else found
        if is_negated:
            raise self._unexpected("in")
        is_number_or_text = isinstance(value, _Literal) and not isinstance(value.value, bool)
        if is_number_or_text or self._kind not in _AFTER_TEST:
            raise self._unexpected("a comparison: =, !=, <, <=, >, >=, is, in or not in")
        return _IsTrue(value)

    def _choices(self) -> tuple[_Literal, ...]:
        self._expect("(", "a list in parentheses")
        choices = []
        while not choices or self._has(","):
            value = self._value("a number, or a text in single quotes")
            if not isinstance(value, _Literal):
                raise _Mistake(value.at, f"found the column `{value}`, expected a number, or a text in single quotes")
            choices.append(value)
        self._expect(")", ", or )")
        return tuple(choices)

    def _value(self, expected: str) -> _Value:
        at, kind, token = self._at, self._kind, self._token
        if kind == "null":
            raise _Mistake(at, "nothing equals null; test it with `is null` or `is not null`")
        if kind in ("true", "false"):
            self._next()
            return _Literal(at, kind == "true")
        if kind == "number":
            self._next()
            return _Literal(at, _number(at, token))
        if kind == "text":
            self._next()
            return _Literal(at, token[1:-1].replace("''", "'"))
        if kind not in ("name", "quoted"):
            raise self._unexpected(expected)
        path = [self._part()]
        while self._has("."):
            if self._kind not in ("name", "quoted"):
                raise self._unexpected("the name of a field")
            path.append(self._part())
        name = _Name(at, tuple(path), kind == "quoted")
        self.names.append(name)
        return name

    def _part(self) -> str:
        token, kind = self._token, self._kind
        self._next()
        return token[1:-1].replace('""', '"') if kind == "quoted" else token


def _tokens(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield position, kind and text of each token; a word of the language and a symbol are their own kind."""
    at = 0
    while True:
        found = _TOKEN.match(text, at)
        if found is None:
            raise _unreadable(text, at)
        kind, token = found.lastgroup or "", found[found.lastgroup or 0]
        if kind == "name" and token.lower() in _WORDS:
            kind = token.lower()
        yield found.start(found.lastgroup or 0), token if kind == "symbol" else kind, token
        at = found.end()


def _unreadable(text: str, at: int) -> _Mistake:
    rest = text[at:].lstrip()
    at = len(text) - len(rest)
    if rest[0] == "'":
        return _Mistake(at, "this text has no end; expected ' (write '' for a quote in a text)")
    if rest[0] == '"':
        return _Mistake(at, 'this name has no end, or is empty; expected "name"')
    if rest[0].isdigit() or rest[0] == "-":
        return _Mistake(at, f"`{rest.split()[0]:.40}` is not a number{_QUOTED}")
    hint = "; write text in straight single quotes" if rest[0] in "‘’“”`" else ""
    return _Mistake(at, f"`{rest[0]}` has no meaning here{hint or _QUOTED}")


def _number(at: int, token: str) -> int | float:
    if len(token) > _MAX_DIGITS:
        raise _Mistake(at, f"a number of {len(token):,} characters; expected at most {_MAX_DIGITS}")
    number = float(token) if any(c in token for c in ".eE") else int(token)
    if math.isinf(number):
        raise _Mistake(at, f"{token} is too large")
    return number


def _kind_of(t: pa.DataType) -> Kind:
    if pa.types.is_null(t):
        return "null"
    if pa.types.is_string(t):
        return "text"
    if pa.types.is_boolean(t):
        return "boolean"
    return "number" if pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t) else "other"


def _comparable_kind(at: int, value: _Value, schema: pa.Schema) -> Kind:
    kind = value.kind(schema)
    if kind == "other":
        expected = "expected a number, a text, or true or false; other values can only be tested with `is null`"
        raise _Mistake(at, f"{value.show(schema)}, {expected}")
    return kind


def _compared(sign: str, left: Any, right: Any) -> bool | None:
    if left is None or right is None:
        return None
    if isinstance(left, Decimal) != isinstance(right, Decimal) and float in (type(left), type(right)):
        left, right = float(left), float(right)  # else no decimal would equal 0.7
    return _COMPARE[sign](left, right)


def _column_values(table: pa.Table, name: _Name) -> list[Any]:
    """Return the values of a name as Python objects; of types that cannot be compared only True or None."""
    column = table.column(name.path[0])
    for field in name.path[1:]:
        column = pc.call_function("struct_field", [column], pc.StructFieldOptions([field]))
    if _kind_of(plain_type(column.type)) == "other":
        return [valid or None for valid in column.is_valid().to_pylist()]
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:  # a file may hold strings that are not UTF-8
        values = column.cast(pa.binary()).to_pylist()
        return [None if value is None else value.decode(errors="replace") for value in values]
    # a NaN is unknown, like a null
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'" + value[:40].replace("'", "''") + "'" if isinstance(value, str) else str(value)
