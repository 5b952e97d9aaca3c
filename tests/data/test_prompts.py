"""Rendering: values are never templates, and every bad row has its own error."""

import datetime
import json
import re
import tracemalloc
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.prompt_template import in_template
from pipeline.data.prompts import PromptSpec, render, template_columns
from pipeline.errors import ConfigError


def bad_string(*values: bytes) -> pa.Array:
    """Return a string column with bytes that Arrow did not check."""
    _, offsets, data = pa.array(values, pa.binary()).buffers()
    return pa.StringArray.from_buffers(len(values), offsets, data)


def prompts(columns: dict, **spec) -> list[str | None]:
    """Return the prompt of each row, or its error code."""
    out = render(pa.table(columns), PromptSpec(**spec))
    for prompt, error, message in zip(out.prompts, out.errors, out.messages, strict=True):
        assert (prompt is None) == (error is not None) == bool(message)
    return [p if e is None else e for p, e in zip(out.prompts, out.errors, strict=True)]


def test_column_and_template():
    columns = {"report": ["a", "b"], "n": [1, 2]}
    assert prompts(columns, column="report") == ["a", "b"]
    assert prompts(columns, template="{n}: {report}{report} {{n}}") == ["1: aa {n}", "2: bb {n}"]
    assert template_columns("{n}: {report}{report} {{n}}") == ("n", "report")
    assert PromptSpec(template="{n}{report}").columns == ("n", "report")
    assert PromptSpec(column="report").columns == PromptSpec(messages="report").columns == ("report",)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1), st.text(alphabet="{}report.__class__[0]!r:>5", min_size=1))
def test_values_are_never_rendered_again(text, hostile):
    columns = {"report": [text, hostile], "other": ["{report}", "{{report}}"]}
    rendered = render(pa.table(columns), PromptSpec(template="{{{other}}} <{report}>")).prompts
    assert rendered == ["{{report}} <" + text + ">", "{{{report}}} <" + hostile + ">"]


@pytest.mark.parametrize("template", [
    *("{report.}", "{.report}", "{report[0]}", "{report!r}", "{report:>99999}", "{report:{n}}", "{}", "{0}"),
    *("{`report}", "{`re`port`}", "{report.`x}", "{`a`!r}", "{`a`:{b}}", "{`a`b}", "{`a`.}"),
    *("{report", "}", "no column", "", '{"a": 1} {report}', "\ud800{report}"),
])  # fmt: skip
def test_templates_are_refused(template):
    with pytest.raises(ConfigError, match=r"prompt\.template"):
        PromptSpec(template=template)


ODD_NAMES = [
    *("w:th", "x!y", "l[0]", "b{r}", "0", "two words", "a.b", "a..b", ".", "", "it's", 'q"q', "größe 数", "t`k", "`q`"),
    *("``", "line\nend", "{", "}", "]", "a]:b", "a!r", "{a}", "{{a}}", "x:>5", " ", "`", "__class__"),
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_column_can_be_in_a_template(name):
    table = pa.table({name: ["v`{x}`"], "plain": ["p"], "s": [{name: "in"}]})
    for written in {in_template(name), "`" + name.replace("`", "``") + "`"}:
        template = f"{{{{{{{written}}}}}}}|{{plain}}|{{{written}:>8}}|{{s.`{name.replace('`', '``')}`}}"
        spec = PromptSpec(template=template, defaults={name: ""}).of_input(table.schema.names)
        spec.check(table.schema)
        assert spec.columns == (name, "plain", "s")
        assert render(table, spec).prompts == ["{v`{x}`}|p|  v`{x}`|in"]


@pytest.mark.parametrize("name", ["w:th", "x!y", "l[0]", "b{r}", "0", "a!r", "x:>5"])
def test_errors_show_columns_that_need_backticks(name):
    """The error is raised when the template is parsed or, if the name is a valid form, when the columns are known."""
    with pytest.raises(ConfigError, match=r"prompt\.template: ") as refused:
        PromptSpec(template=f"Rate: {{{name}}}").of_input(["plain", name])
    assert f"{{`{name}`}}" in str(refused.value)


def test_a_name_in_backticks_is_one_column_with_any_dots():
    columns = {"a.b": ["dotted"], "a": [{"b": "field", "b.c": "deep"}], "a.b.c": ["whole"]}
    template = "{a.b} {`a.b`} {`a`.b} {a.`b.c`} {`a.b.c`} {a.b.c}"
    assert render(pa.table(columns), PromptSpec(template=template).of_input(columns)).prompts == [
        "dotted dotted field deep whole whole"
    ]


@pytest.mark.parametrize("spec", [{}, {"column": "a", "template": "{a}"}, {"column": "a", "messages": "a"}])
def test_exactly_one_kind_of_prompt(spec):
    with pytest.raises(ConfigError, match="exactly one"):
        PromptSpec(**spec)


def test_columns_that_cannot_be_prompts():
    chat = pa.list_(pa.struct([("role", pa.string()), ("text", pa.string())]))
    span = pa.month_day_nano_interval()
    schema = pa.schema([("text", pa.string()), ("n", pa.int64()), ("span", span), ("chat", chat)])
    for spec in ({"column": "text"}, {"messages": "text"}, {"template": "{text}{n}{chat}"}):
        PromptSpec(**spec).check(schema)
    for spec in ({"column": "n"}, {"column": "chat"}, {"messages": "chat"}, {"messages": "n"}, {"template": "{span}"}):
        with pytest.raises(ConfigError, match="prompt"):
            PromptSpec(**spec).check(schema)
    for one, other, written in (("caf\xe9", "cafe\u0301", r"cafe\\u0301"), ("cafe\u0301", "caf\xe9", r"caf\\xe9")):
        with pytest.raises(
            ConfigError, match=f'differs only in its Unicode form; write it in double quotes as "{written}"'
        ):
            PromptSpec(column=one).check(pa.schema([("a", pa.string()), (other, pa.string())]))
    with pytest.raises(ConfigError, match="did you mean 'text'"):
        PromptSpec(template="{txt}").check(schema)


def test_rows_without_a_prompt():
    values = [None, "", " \n\t\u2003", "x" * 21, "é" * 10, "fine"]
    expected = ["null_prompt", "empty_prompt", "empty_prompt", "prompt_too_large", "é" * 10, "fine"]
    assert prompts({"text": values}, column="text", max_bytes=20) == expected
    # an empty value makes an empty prompt, whatever text surrounds it
    templated = [e if "_" in e else f"Say: {e}" for e in expected]
    assert prompts({"text": values}, template="Say: {text}", max_bytes=25) == templated
    two = {"a": ["", "", None], "b": ["", "x", "x"]}
    assert prompts(two, template="{a}-{b}") == ["empty_prompt", "-x", "null_prompt"]


def test_bytes_that_are_not_utf8():
    good = "grün".encode()
    for column in (bad_string(b"\xff\xfe", good, b"\xed\xa0\x80"), pa.array([b"\xff\xfe", good, b"\xed\xa0\x80"])):
        expected = ["invalid_utf8", "grün", "invalid_utf8"]
        assert prompts({"text": column}, column="text") == expected
        assert prompts({"text": column, "n": [1, 2, 3]}, template="{text}") == expected
    listed = pa.ListArray.from_arrays([0, 1, 2, 3], bad_string(b"\xff\xfe", good, b"ok"))
    assert prompts({"x": listed}, template="{x}") == ["invalid_utf8", '["grün"]', '["ok"]']
    assert prompts({"x": [[good], [b"ok", b"\xff"], None]}, template="{x}") == [
        '["grün"]',
        "invalid_utf8",
        "null_prompt",
    ]
    assert prompts({"x": [b"\xff", b"ok"]}, template="{x:>4}") == ["invalid_utf8", "  ok"]


@pytest.mark.parametrize("kind", ["column", "template", "messages"])
def test_a_prompt_of_100_mb_is_refused_without_a_copy_of_it(kind):
    huge = pa.array(["x" * 100_000_000, '[{"role":"user","content":"y"}]', None])
    table = pa.table({"text": huge, "n": [1, 2, 3]})
    spec = PromptSpec(**{kind: "{n} {text}" if kind == "template" else "text"})
    tracemalloc.start()
    try:
        out = render(table, spec)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert out.errors == ["prompt_too_large", None, "null_prompt"]
    size = 100_000_002 if kind == "template" else 100_000_000
    assert out.messages[0] == f"{size} bytes, expected at most 8388608"
    assert peak < 1_000_000


def test_large_prompts_and_nul_bytes_pass_through():
    values = ["a\0b", "\0", "y" * 1_000_000, "é" * 500_000]
    assert prompts({"text": values}, column="text") == values
    assert prompts({"text": values}, template="<{text}>") == [f"<{v}>" for v in values]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé {{x}}"}]


def test_messages_are_the_same_from_structs_and_json():
    canonical = json.dumps(MESSAGES, ensure_ascii=False, separators=(",", ":"))
    spaced = json.dumps([dict(reversed(m.items())) for m in MESSAGES], indent=2)
    with_more = [{**MESSAGES[0], "name": None}, {**MESSAGES[1], "name": "Jo"}]
    assert prompts({"chat": [MESSAGES]}, messages="chat") == [canonical]
    assert prompts({"chat": [spaced]}, messages="chat") == [canonical]
    assert prompts({"chat": [canonical.encode()]}, messages="chat") == [canonical]
    assert prompts({"chat": [with_more]}, messages="chat") == [canonical.replace('{{x}}"', '{{x}}","name":"Jo"')]


@pytest.mark.parametrize(("value", "code"), [
    (None, "null_prompt"),
    ("null", "null_prompt"),
    ("  ", "empty_prompt"),
    ("[]", "empty_prompt"),
    ('[{"role": "user", "content": " "}]', "empty_prompt"),
    ("hello", "invalid_messages"),
    ("{}", "invalid_messages"),
    ('["hello"]', "invalid_messages"),
    ('[{"role": "user"}]', "invalid_messages"),
    ('[{"content": "x"}]', "invalid_messages"),
    ('[{"role": "user", "content": 1}]', "invalid_messages"),
    ('[{"role": "user", "content": []}]', "invalid_messages"),
    ('[{"role": "user", "content": ["x"]}]', "invalid_messages"),
    ('[{"role": "user", "content": [{"type": "text"}]}]', "invalid_messages"),
    ('[{"role": "user", "content": [{"type": "text", "text": 1}]}]', "invalid_messages"),
    ('[{"role": "assistant", "tool_calls": []}]', "invalid_messages"),
    ('[{"role": "user", "content": NaN}]', "invalid_messages"),
    ('[{"role": "user", "content": "x", "n": 1e999}]', "invalid_messages"),
    ('[{"role": "user", "content": "x", "n": NaN}]', "invalid_messages"),
    ('[{"role": "user", "content": "\\ud800"}]', "invalid_messages"),
    ("[" * 200_000, "invalid_messages"),
    ('[{"role": "user", "content": "x", "n": ' + "9" * 5000 + "}]", "invalid_messages"),
    ('[{"role": "user", "content": "' + "x" * 300_000 + '"}]', "prompt_too_large"),
    (b"\xff", "invalid_utf8"),
])  # fmt: skip
def test_malformed_messages(value, code):
    good = json.dumps(MESSAGES)
    column = [value, good if not isinstance(value, bytes) else good.encode()]
    got = prompts({"chat": column}, messages="chat", max_bytes=250_000)
    assert got[0] == code
    assert got[1].startswith('[{"role":"system"')


def test_content_parts_of_text_are_joined_by_lines():
    parts = [{"type": "text", "text": "Hé"}, {"type": "text", "text": "{{x}}", "cache_control": None}]
    expected = '[{"role":"user","content":"Hé\\n{{x}}"}]'
    chat = [{"role": "user", "content": parts}]
    assert prompts({"chat": [chat]}, messages="chat") == [expected]
    assert prompts({"chat": [json.dumps(chat)]}, messages="chat") == [expected]


@pytest.mark.parametrize(("message", "reason"), [
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
     "content[1] is a part of type 'image_url'; only text is supported"),
    ({"role": "user", "content": [{"type": "file", "file": {}}]}, "content[0] is a part of type 'file'"),
    ({"role": "user", "content": "x", "images": ["a.png"]}, "images; only text is supported"),
    ({"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "x"}},
     "function_call.arguments: expected a JSON object"),
])  # fmt: skip
def test_content_other_than_text_is_refused_by_name(message, reason):
    table = pa.table({"chat": [json.dumps([*MESSAGES, message])]})
    (refused,) = render(table, PromptSpec(messages="chat")).messages
    assert (refused or "").startswith(f"column 'chat', message {len(MESSAGES)}: {reason}")


def test_tool_calls_reach_the_template_with_their_arguments_as_an_object():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "7"}]
    (text,) = prompts({"chat": [json.dumps(chat)]}, messages="chat")
    expected = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert json.loads(text)[0] == {"role": "assistant", "content": None, "tool_calls": [expected]}


def test_a_type_that_can_hold_no_text_is_refused_when_a_job_is_planned():
    def check(content):
        t = pa.list_(pa.struct([("role", pa.string()), ("content", content)]))
        PromptSpec(messages="chat").check(pa.schema([("chat", t)]))

    part = [("type", pa.string()), ("image_url", pa.string())]
    check(pa.list_(pa.struct([*part, ("text", pa.string())])))
    check(pa.large_string())
    for content, reason in (
        (pa.list_(pa.struct(part)), "parts of image_url, type; only text is supported"),
        (pa.int64(), "its content is int64; only text"),
        (pa.binary(), "its content is binary; only text"),
        (pa.list_(pa.string()), "its content is list"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check(content)


def test_malformed_messages_in_structs():
    t = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    column = pa.array([None, [], [None], [{"role": None, "content": "x"}], [{"role": "user", "content": None}]], t)
    expected = ["null_prompt", "empty_prompt", *["invalid_messages"] * 3]
    assert prompts({"chat": column}, messages="chat") == expected
    struct = pa.StructArray.from_arrays([pa.array(["user"] * 2), bad_string(b"\xff", b"x")], ["role", "content"])
    got = prompts({"chat": pa.ListArray.from_arrays([0, 1, 2], struct)}, messages="chat")
    assert got == ["invalid_utf8", '[{"role":"user","content":"x"}]']


DAY = datetime.datetime(2026, 1, 31, 14, 5)
FORMED = {
    "n": pa.array([7, None, -1], pa.int32()),
    "score": [0.125, 2.0, None],
    "price": pa.array([Decimal("1.50"), Decimal("2.00"), None], pa.decimal128(9, 2)),
    "day": pa.array([DAY, None, DAY], pa.timestamp("ns")),
    "time": pa.array([DAY.time(), None, DAY.time()], pa.time64("us")),
    "clock": pa.array([DAY.time(), DAY.time(), None], pa.time32("s")),
    "text": ["a", "b{n}", "c"],
    "doc": [{"title": "T", "by": {"name": "N", "ids": [1, 2]}}, {"title": None, "by": None}, None],
    "json": ['{"a": {"b": 1.0}, "c": "x"}', '{"a": [1]}', "{}"],
}


@pytest.mark.parametrize(("template", "expected"), [
    ("{n:05d}|{score:.2f}", ["00007|0.12", "n", "score"]),
    ("{price:>8}|{text}", ["    1.50|a", "    2.00|b{n}", "price"]),
    ("{text:>3}{text}", ["  aa", "b{n}b{n}", "  cc"]),
    ("{day:%d %B %Y, %H:%M}", ["31 January 2026, 14:05", "day", "31 January 2026, 14:05"]),
    ("{time:%H:%M}", ["14:05", "time", "14:05"]),
    ("{clock:%I %p}", ["02 PM", "02 PM", "clock"]),
    ("{doc.title}: {doc.by.name}", ["T: N", "doc.title", "doc.title"]),
    ("{doc.by} {doc.by.ids}", ['{"name":"N","ids":[1,2]} [1,2]', "doc.by", "doc.by"]),
    ("{json.a} {json.c}", ['{"b":1.0} x', "json.c", "json.a"]),
    ("{json.c} {json.c.d}", ["json.c.d", "json.c", "json.c"]),
    ("{json.a.b}", ["1.0", "json.a.b", "json.a.b"]),
    ("{json.__class__}", ["json.__class__"] * 3),
])  # fmt: skip
def test_values_in_a_form_and_fields_of_fields(template, expected):
    out = render(pa.table(FORMED), PromptSpec(template=template))
    got = [p if p is not None else m.split("'")[1] for p, m in zip(out.prompts, out.messages, strict=True)]
    assert got == expected
    assert set(out.errors) <= {None, "null_prompt", *["invalid_value"] * ("json" in template)}


@pytest.mark.parametrize(("text", "error", "message"), [
    ("no json", "invalid_value", "column 'json.a.b': the text of 'json': not JSON: Expecting value"),
    ('{"a": 1,}', "invalid_value", "column 'json.a.b': the text of 'json': not JSON"),
    ('{"a": {"b": -1e400}}', "invalid_value", ".*: the number -1e400 is out of range"),
    ("[1, 2]", "invalid_value", r"column 'json.a.b': 'json' is \[1, 2\], expected a JSON object"),
    ('{"a": "x"}', "invalid_value", "column 'json.a.b': 'json.a' is \"x\", expected a JSON object"),
    (b'{"a": {"b": "\xff"}}', "invalid_utf8", "column 'json.a.b': byte 13 is not UTF-8"),
    (b'{"a": {"b": "x"}}' + b" " * 2_000, "prompt_too_large", "2017 bytes, expected at most 1000"),
    ('{"a": {"b": null}}', "null_prompt", "column 'json.a.b' is null"),
    ('{"a": null}', "null_prompt", "column 'json.a.b' is null"),
    ("null", "null_prompt", "column 'json.a.b' is null"),
    (" ", "null_prompt", "column 'json.a.b' is null"),
    (None, "null_prompt", "column 'json.a.b' is null"),
])  # fmt: skip
def test_text_without_a_field_has_its_reason_and_only_nulls_are_filled(text, error, message):
    table = pa.table({"json": pa.array([text], pa.binary() if isinstance(text, bytes) else pa.string())})
    out = render(table, PromptSpec(template="{json.a.b}", max_bytes=1000))
    assert out.errors == [error]
    assert re.match(message, out.messages[0] or "")
    filled = render(table, PromptSpec(template="{json.a.b}", max_bytes=1000, defaults={"json.a.b": "-"}))
    assert filled.errors == [None if error == "null_prompt" else error]


def test_a_column_whose_name_has_dots_precedes_a_field():
    columns = {"a.b": ["dotted"], "a": [{"b": {"c": "field"}, "x": "other"}], "a.b.d": [{"e": 1.5}]}
    template = "{a.b} {a.x} {a.b.d.e:.2f} {a.b.d}"
    spec = PromptSpec(template=template, defaults={"a.b": ""}).of_input(columns)
    spec.check(pa.table(columns).schema)
    assert spec.columns == ("a.b", "a", "a.b.d")
    assert render(pa.table(columns), spec).prompts == ['dotted other 1.50 {"e":1.5}']
    with pytest.raises(ConfigError, match="inside JSON text takes no format spec"):
        PromptSpec(template="{a.b.c:.2f}").of_input(columns).check(pa.table(columns).schema)
    assert prompts({"a": columns["a"]}, template="{a.b.c}") == ["field"]


@pytest.mark.parametrize(("template", "reason"), [
    ("{n:.2q}", "int32"),
    ("{text:.2f}", "string"),
    ("{doc:>9}", "takes no format spec"),
    ("{json.a:>9}", "inside JSON text takes no format spec"),
    ("{doc.tilte}", "did you mean 'title'"),
    ("{n.x}", "'n' is int32, which has no fields"),
    ("{doc.title.x}", "'doc.title' is string, which has no fields"),
])  # fmt: skip
def test_fields_and_forms_that_the_columns_do_not_have(template, reason):
    with pytest.raises(ConfigError, match=reason):
        PromptSpec(template=template).check(pa.table(FORMED).schema)


def test_fill_null_replaces_nulls():
    spec = PromptSpec(template="{doc.title}/{n:03d}/{text}", defaults={"doc.title": "(none) {text}", "n": "?"})
    assert render(pa.table(FORMED), spec).prompts == ["T/007/a", "(none) {text}/?/b{n}", "(none) {text}/-01/c"]
    assert render(pa.table({"a": ["x", None]}), PromptSpec(column="a", defaults={"a": "y"})).prompts == ["x", "y"]
    with pytest.raises(ConfigError, match=r"prompt\.fill_null: 'txt' is not in the prompt .did you mean 'text'"):
        PromptSpec(template="{text}", defaults={"txt": ""})
    with pytest.raises(ConfigError, match="not with messages"):
        PromptSpec(messages="m", defaults={"m": ""})


@pytest.mark.parametrize(("template", "defaults", "expected"), [
    # rows: text, null, empty, whitespace
    ("Write a poem. {hint}", {}, ["Write a poem. x", "null_prompt", "empty_prompt", "empty_prompt"]),
    ("Write a poem. {hint}", {"hint": ""},
     ["Write a poem. x", "Write a poem. ", "Write a poem. ", "Write a poem.  \t"]),
    ("Write a poem. {hint}", {"hint": "sea"},
     ["Write a poem. x", "Write a poem. sea", "Write a poem. ", "Write a poem.  \t"]),
    ("{hint}", {"hint": ""}, ["x", "empty_prompt", "empty_prompt", "empty_prompt"]),
    ("\n{hint} ", {"hint": " "}, ["\nx ", "empty_prompt", "empty_prompt", "empty_prompt"]),
    ("{hint}", {"hint": "sea"}, ["x", "sea", "empty_prompt", "empty_prompt"]),
    ("{{{hint}}}", {"hint": ""}, ["{x}", "{}", "{}", "{ \t}"]),
    ("{doc}/{hint}", {"hint": ""}, ["d/x", "d/", "d/", "d/ \t"]),
    ("{blank}/{hint}", {"hint": ""}, ["/x", "empty_prompt", "empty_prompt", "empty_prompt"]),
    ("{blank}/{hint}", {"hint": "", "blank": ""}, ["/x", "/", "/", "/ \t"]),
    ("{s.f}/{hint:>2}", {"hint": "", "s.f": "-"}, ["/ x", "-/", "/  ", "-/ \t"]),
    ("{all_null}!", {"all_null": ""}, ["!"] * 4),
    ("{all_null}!", {}, ["null_prompt"] * 4),
])  # fmt: skip
def test_a_prompt_is_empty_if_no_required_value_has_text(template, defaults, expected):
    columns = {
        "hint": ["x", None, "", " \t"], "doc": ["d"] * 4, "blank": [""] * 4,
        "s": [{"f": ""}, None, {"f": ""}, {"f": None}], "all_null": pa.nulls(4, pa.string()),
    }  # fmt: skip
    assert prompts(columns, template=template, defaults=defaults) == expected
    if template == "{hint}":
        assert prompts(columns, column="hint", defaults=defaults) == expected
        as_code = [None, "null_prompt", "empty_prompt", "empty_prompt"]
        chats = [h if h is None else [{"role": "user", "content": h}] for h in columns["hint"]]
        assert [p if p in as_code else None for p in prompts({"c": chats}, messages="c")] == as_code


def test_values_without_a_text_are_errors_of_their_rows():
    days = pa.array([20_484, 10**8, None, -(10**6)], pa.int32()).cast(pa.date32())  # 2026-01-31, no date, null, BC
    # microseconds of a day in the year 3 million exceed 64 bits, and must not wrap to another day
    seconds = pa.array([0, 10**14, None, 10**15], pa.int64()).cast(pa.timestamp("s"))
    codes = pa.array([65, 2**40, None, 0xD800])
    no = "invalid_value"
    assert prompts({"x": days}, template="{x:%Y}") == ["2026", no, "null_prompt", no]
    assert prompts({"x": days}, template="{x}") == ["2026-01-31", no, "null_prompt", "-0768-02-04"]
    assert prompts({"x": seconds}, template="{x:%Y}") == ["1970", no, "null_prompt", no]
    assert prompts({"x": codes}, template="{x:c}") == ["A", no, "null_prompt", no]
    listed = pa.ListArray.from_arrays([0, 1, 2], days.slice(0, 2))
    assert prompts({"x": listed}, template="{x}") == ['["2026-01-31"]', no]
    turns = pa.StructArray.from_arrays(
        [pa.array(["user"] * 2), pa.array(["hi"] * 2), days.slice(0, 2)], names=["role", "content", "day"]
    )
    chats = pa.ListArray.from_arrays([0, 1, 2], turns)
    shown = '[{"role":"user","content":"hi","day":"2026-01-31"}]'
    assert prompts({"x": chats}, messages="x") == [shown, "invalid_messages"]
