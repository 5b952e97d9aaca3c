"""Conditions over columns: the results of SQL, and mistakes with their place."""

import math
import random
import sqlite3
from decimal import Decimal

import pyarrow as pa
import pytest

from pipeline.data.conditions import MAX_CHARS, MAX_NESTING, Condition
from pipeline.errors import ConfigError

SCHEMA = pa.schema(
    [
        ("lang", pa.dictionary(pa.int8(), pa.large_string())),
        ("score", pa.float32()),
        ("count", pa.int64()),
        ("price", pa.decimal128(5, 2)),
        ("ok", pa.bool_()),
        ("check", pa.struct([("label", pa.string()), ("inner", pa.struct([("p", pa.float64())]))])),
        ("day", pa.timestamp("ns")),
        ("tags", pa.list_(pa.string())),
        ("a.b", pa.int8()),
        ("in", pa.int8()),
        ("nothing", pa.null()),
    ]
)
ROW = {
    "lang": "de",
    "score": 0.5,
    "count": 3,
    "price": Decimal("0.70"),
    "ok": True,
    "check": {"label": " it's", "inner": {"p": None}},
    "day": 1,
    "tags": [],
    "a.b": 7,
    "in": None,
    "nothing": None,
}
TABLE = pa.Table.from_pylist([ROW, ROW], SCHEMA)


def parsed(text: str, schema: pa.Schema = SCHEMA) -> Condition:
    condition = Condition.parse(text, "input.when")
    condition.check(schema)
    return condition


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lang = 'de'", True),
        ("lang = 'x' or lang<>'fr'", True),
        ("lang < 'dea' AND lang >= 'de'", True),
        ("count>=3 and count<4", True),
        ("count = 3.0 and count != -3e0", True),
        ("price = 0.7", True),
        ("price < score", False),
        ("0.4 < score", True),
        ("ok", True),
        ("not ok", False),
        ("ok != false", True),
        ("count = 1 and ok or count = 3", True),  # `and` first
        ("count = 3 or ok and count = 1", True),
        ("(count = 3 or ok) and count = 1", False),
        ("not count = 1 and not (ok and count = 1)", True),
        ("check.label = ' it''s'", True),
        ('"check"."label" is not null', True),
        ("check.inner.p is null", True),
        ("check.inner.p > 0", None),
        ("check.inner.p > 0 or ok", True),
        ("check.inner.p > 0 and not ok", False),
        ("check.inner.p > 0 and ok", None),
        ("lang in ('fr', 'de')", True),
        ("lang not in ('fr','de')", False),
        ("count in (1, 3.0)", True),
        ('"in" in (1)', None),
        ('"a.b" = 7', True),
        ("day is not null and tags is not null", True),
        ("nothing = 'x'", None),
        ("nothing = 1 or nothing is null", True),
        ("\n  count\t= 3\n", True),
    ],
)
def test_results(text: str, expected: bool | None, negated: bool):
    """The negation of null is null, which is not met either."""
    condition = parsed(f"not ({text})" if negated else text)
    met = expected is (not negated)
    assert condition.met(TABLE) == [met, met]
    assert condition.met(TABLE.slice(2)) == []


def test_columns():
    assert parsed('ok and (check.inner.p > 1 or "a.b" in (1) or not ok)').columns == ("ok", "check", "a.b")


def test_unknown_values():
    """NaN is unknown like null; a null struct has null fields; strings that are not UTF-8 are compared as read."""
    scores = pa.table({"score": pa.array([math.nan, None, 0.25])})
    condition = parsed("score > 0.5 or not score > 0.5", scores.schema)
    assert condition.met(scores) == [False, False, True]
    structs = pa.Table.from_pylist([{"check": None}, {"check": {"label": "x"}}], pa.schema([SCHEMA.field("check")]))
    condition = parsed("check.label is null", structs.schema)
    assert condition.met(structs) == [True, False]
    texts = pa.table({"text": pa.array([b"\xff", b"b", None]).view(pa.string())})
    assert parsed("text = 'b'", texts.schema).met(texts) == [False, True, False]
    assert parsed("text != 'b'", texts.schema).met(texts) == [True, False, False]


# text, character of the mistake (from 1), part of the message
MISTAKES = [
    ("", 1, "empty"),
    (" \n", 1, "empty"),
    ("1 = 1", 1, "names no column"),
    ("count", 1, "`count` is a number (int64), expected a comparison"),
    ("count >", 8, "found the end, expected a column"),
    ("count >> 1", 8, "found `>`"),
    ("count == 1", 7, "write ="),
    ("ok && ok", 4, "write and"),
    ("ok || ok", 4, "write or"),
    ("count < 2 < 3", 11, "found `<`, expected and, or, or the end"),
    ("count + 1 > 2", 7, "`+` has no meaning here"),
    ("count - 1 > 2", 7, "`-` is not a number"),
    ("count = null", 9, "`is null`"),
    ("lang in ('de', null)", 16, "`is null`"),
    ("lang in ()", 10, "found `)`"),
    ("lang in (lang)", 10, "found the column `lang`"),
    ("lang in 'de'", 9, "expected a list in parentheses"),
    ("lang in (1)", 10, "`lang` is a text"),
    ("lang like 'd%'", 6, "found `like`"),
    ("count between 1 and 2", 7, "found `between`"),
    ("count not 1", 11, "expected in"),
    ("lang is 'de'", 9, "expected null or not null"),
    ("count = 1 is null", 11, "found `is`"),
    ("(count) = 1", 9, "found `=`"),
    ("(ok", 4, "expected and, or, or )"),
    ("ok)", 3, "found `)`"),
    ("ok;drop table x", 3, "`;` has no meaning here"),
    ("lang = 'de", 8, "this text has no end"),
    ('lang = "de"', 8, "no column 'de'; a text is written in single quotes"),
    ("lang = ‘de’", 8, "straight single quotes"),
    ('"" = 1', 1, "this name has no end, or is empty"),
    ("3x = 1", 1, "`3x` is not a number"),
    ("count = 1e999", 9, "too large"),
    ("count = " + "9" * 5000, 9, "5,000 characters"),
    ("lang = 3", 6, "`lang` is a text (string), but 3 is a number"),
    ("'de' = count", 6, "'de' is a text, but `count` is a number (int64)"),
    ("ok < true", 4, "no order"),
    ("day > '2026-01-01'", 5, "`day` is timestamp[ns], expected a number, a text"),
    ("tags = 'x'", 6, "can only be tested with `is null`"),
    ("ok and lagn = 'de'", 8, "no column 'lagn' (did you mean 'lang'?)"),
    ("a.b = 1", 1, 'write "a.b" in double quotes'),
    ("count.x = 1", 1, "'count' is int64, which has no fields"),
    ("check.labels = 'x'", 1, "(did you mean 'label'?)"),
    ("check.", 7, "the name of a field"),
    ("__import__('os').system('x')", 11, "found `(`"),
    ("lang.__class__ = 'x'", 1, "which has no fields"),
    ("(" * 100_000, None, "expected at most 10,000"),
    ("ok or " + "(" * 9_000, 57, "levels of parentheses"),
    ("not " * 2_000 + "ok", 201, "levels of parentheses"),
    ("lang = '\ud800'", None, "surrogates not allowed"),
]


@pytest.mark.parametrize(("text", "character", "problem"), MISTAKES)
def test_mistakes(text: str, character: int | None, problem: str):
    with pytest.raises(ConfigError) as raised:
        parsed(text)
    message, *shown = str(raised.value).split("\n")
    assert message.startswith("input.when: ")
    assert problem in message
    if character is not None:
        assert message.startswith(f"input.when: character {character}: ")
        line, caret = shown
        at = caret.index("^")
        assert line[at : at + 1].strip() == text[character - 1 : character].strip()
        assert len(line) < 100


def test_bounds_are_enough():
    """Conditions at the limits are parsed and evaluated without running out of stack."""
    deep = "(" * MAX_NESTING + "ok" + ")" * MAX_NESTING
    wide = " or ".join(["count = 4"] * (MAX_CHARS // 15)) + " or ok"
    for text in (deep, wide):
        assert parsed(text).met(TABLE) == [True, True]


def _random_condition(rng: random.Random, depth: int) -> str:
    """Return a condition over x, y (numbers), t, u (texts) and b, c (booleans)."""
    if depth and rng.random() < 0.7:
        first, second = (_random_condition(rng, depth - 1) for _ in range(2))
        return rng.choice([f"{first} and {second}", f"{first} or {second}", f"not {first}", f"({first})"])
    names, literals = rng.choice([("xy", ["-1", "0", "1.5", "2"]), ("tu", ["''", "'a'", "'it''s'", "'ä'"])])
    left, right = rng.choice([*names, *literals]), rng.choice([*names, *literals])
    sign = rng.choice(["=", "!=", "<>", "<", "<=", ">", ">="])
    some = ", ".join(rng.choices(literals, k=rng.randint(1, 3)))
    return rng.choice(
        [
            f"{left} {sign} {right}",
            f"{rng.choice('xytubc')} is {rng.choice(['', 'not '])}null",
            f"{left} {rng.choice(['', 'not '])}in ({some})",
            rng.choice(["b", "c", "true", "false"]),
            f"b {rng.choice(['=', '!='])} {rng.choice(['c', 'true', 'false'])}",
        ]
    )


def test_sqlite_agrees():
    """Random conditions over random rows with nulls hold for the same rows as in SQLite."""
    rng = random.Random(67)
    numbers, texts, booleans = [None, -1, 0, 1.5, 2], [None, "", "a", "it's", "ä"], [None, True, False]
    rows = [
        {n: rng.choice(v) for n, v in zip("xytubc", [numbers] * 2 + [texts] * 2 + [booleans] * 2, strict=True)}
        for _ in range(60)
    ]
    types = zip("xytubc", [pa.float64()] * 2 + [pa.string()] * 2 + [pa.bool_()] * 2, strict=True)
    table = pa.Table.from_pylist(rows, pa.schema(list(types)))
    oracle = sqlite3.connect(":memory:")
    oracle.execute("create table rows (x, y, t, u, b, c)")
    oracle.executemany("insert into rows values (?, ?, ?, ?, ?, ?)", [tuple(row.values()) for row in rows])
    seen = set()
    for _ in range(600):
        text = _random_condition(rng, 4) + " and (x is null or x is not null)"  # names a column
        condition = parsed(text, table.schema)
        met = condition.met(table)
        expected = [value == 1 for (value,) in oracle.execute(f"select {text} from rows order by rowid")]
        assert met == expected, text
        seen.add(tuple(met))
    assert len(seen) > 100
