"""JSON Schema keyword by keyword: a text that is valid and one that is not, or the name by which it is refused; and the
page that documents it."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pipeline.engine.grammar.validity import invalid_reason
from pipeline.errors import ConfigError
from tools.schema_coverage import GrammarChecker, measure

S, I = {"type": "string"}, {"type": "integer"}  # noqa: E741
# A schema, a valid instance, one that is not.
KEPT: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "$anchor": ({"$ref": "#it", "$defs": {"a": {"$anchor": "it", **I}}}, 1, "1"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": I}}, 1, "1"),
    "$id": ({"$id": "http://a/b", "$ref": "#/$defs/a", "$defs": {"a": I}}, 1, "1"),
    "$ref": ({"type": "array", "items": {"$ref": "#"}}, [[], [[]]], [1]),
    "additionalProperties": ({"type": "object", "properties": {"a": I}, "additionalProperties": S},
                             {"a": 1, "b": "x"}, {"a": 1, "b": 2}),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, 4, 6),
    "anyOf": ({"anyOf": [I, {"type": "null"}]}, None, "x"),
    "const": ({"const": {"a": [1, None]}}, {"a": [1, None]}, {"a": [1, 2]}),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": I}}, 1, "1"),
    "enum": ({"enum": ["x", 7, None]}, 7, 8),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, 4, 5),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 5}, 5.5, 5),
    "items": ({"type": "array", "items": I}, [1, 2], [1, "x"]),
    "maxItems": ({"type": "array", "items": I, "maxItems": 2}, [1, 2], [1, 2, 3]),
    "maxLength": ({"type": "string", "maxLength": 2}, "äö", "abc"),
    "maximum": ({"type": "number", "maximum": 2.5}, 2.5, 2.6),
    "minItems": ({"type": "array", "items": I, "minItems": 2}, [1, 2], [1]),
    "minLength": ({"type": "string", "minLength": 2}, "ab", "a"),
    "minimum": ({"type": "integer", "minimum": -2}, -2, -3),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, 9, 10),
    "pattern": ({"type": "string", "pattern": "^[A-C]{2}$"}, "AB", "AD"),
    "prefixItems": ({"type": "array", "prefixItems": [I, S], "items": False}, [1, "x"], ["x", 1]),
    "properties": ({"type": "object", "properties": {"a": I}}, {"a": 1}, {"a": "x"}),
    "required": ({"type": "object", "properties": {"a": I}, "required": ["a"]}, {"a": 1}, {}),
    "type": ({"type": ["boolean", "null"]}, True, "true"),
}  # fmt: skip
# The same, with a schema that is refused and the words of its message.
IN_PART: dict[str, tuple[dict[str, Any], Any, Any, dict[str, Any], str]] = {
    "format": ({"type": "string", "format": "date"}, "2026-11-25", "25.11.2026",
               {"type": "string", "format": "regex"}, "Unknown format: regex"),
    "maxProperties": ({"type": "object", "additionalProperties": I, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2},
                      {"type": "object", "properties": {"a": I, "b": I}, "maxProperties": 1}, "min/maxProperties only"),
    "minProperties": ({"type": "object", "additionalProperties": I, "minProperties": 1}, {"x": 1}, {},
                      {"type": "object", "properties": {"a": I, "b": I}, "minProperties": 1}, "min/maxProperties only"),
    "oneOf": ({"oneOf": [I, {"type": "null"}]}, None, "x", {"oneOf": [I, {"type": "number"}]}, "oneOf constraints"),
    "patternProperties": ({"type": "object", "patternProperties": {"^n": I, "^s": S}, "additionalProperties": False},
                          {"n1": 1, "s": "x"}, {"n1": "x"},
                          {"type": "object", "patternProperties": {"a": I, "b": S}}, "patternProperty regexes"),
}  # fmt: skip
# Schemas that masks allow and the check of finished rows enforces: a schema, a valid text, one that is not.
CHECKED: dict[str, tuple[dict[str, Any], str, str]] = {
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 0.3}, "0.2", "0.29999999999999999999"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 2**53 + 1}, "9007199254740994", "9007199254740993"),
    "maxProperties": ({"type": "object", "additionalProperties": I, "maxProperties": 2},
                      '{"a":1,"b":1}', '{"a":1,"a":1}'),
    "maximum": ({"type": "integer", "maximum": 2**53 + 3}, "9007199254740995", "9007199254740996"),
    "minProperties": ({"type": "object", "patternProperties": {"^[ab]$": I}, "additionalProperties": False,
                       "minProperties": 2}, '{"a":1,"b":1}', '{"b":1,"b":1}'),
    "minimum": ({"type": "integer", "minimum": 2**53 + 1}, "9007199254740993", "9007199254740992"),
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "$dynamicRef": {"$dynamicRef": "#it", "$defs": {"a": I}},
    "contains": {"type": "array", "contains": I},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"minProperties": 2}}},
    "else": {"if": I, "else": {"minimum": 1}},
    "if": {"if": I, "then": {"minimum": 1}},
    "maxContains": {"type": "array", "contains": I, "maxContains": 2},
    "minContains": {"type": "array", "contains": I, "minContains": 2},
    "not": {"not": I},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "then": {"if": I, "then": {"minimum": 1}},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
}
ANNOTATIONS = {"$comment": "x", "$schema": "https://json-schema.org/draft/2020-12/schema", "contentEncoding": "base64",
               "contentMediaType": "text/plain", "default": 7, "deprecated": True, "description": "x", "examples": [1],
               "readOnly": True, "title": "x", "writeOnly": True}  # fmt: skip
PAGE = Path(__file__).parents[3] / "docs" / "json-schema.md"


@pytest.fixture(scope="module")
def checker() -> GrammarChecker:
    return GrammarChecker()


def check(checker: GrammarChecker, schema: dict[str, Any], valid: Any, invalid: Any) -> None:
    wanted = checker.compile(schema)
    for instance, is_valid in ((valid, True), (invalid, False)):
        oracle = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        assert oracle.is_valid(instance) == is_valid
        text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
        assert checker.allows(wanted, text) == is_valid, text
        assert not checker.allows(wanted, text[:-1] or " "), "cut short"


@pytest.mark.parametrize("keyword", [*KEPT, *IN_PART])
def test_a_keyword_that_is_kept_to(keyword: str, checker: GrammarChecker) -> None:
    if keyword in KEPT:
        check(checker, *KEPT[keyword])
        return
    schema, valid, invalid, other, words = IN_PART[keyword]
    check(checker, schema, valid, invalid)
    with pytest.raises(ConfigError, match=words):
        checker.compile(other)


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_refused_by_its_name(keyword: str, checker: GrammarChecker) -> None:
    with pytest.raises(ConfigError, match=re.escape(f'"{keyword}"')):
        checker.compile(REFUSED[keyword])


@pytest.mark.parametrize("keyword", CHECKED)
def test_a_keyword_that_is_checked_once_a_row_has_finished(keyword: str, checker: GrammarChecker) -> None:
    schema, valid, invalid = CHECKED[keyword]
    wanted = checker.compile(schema)
    for text in (valid, invalid):
        assert checker.allows(wanted, text), text
    assert invalid_reason(wanted, valid) is None
    assert invalid_reason(wanted, invalid) is not None


def test_annotations_do_not_change_the_text(checker: GrammarChecker) -> None:
    check(checker, {**I, **ANNOTATIONS}, 5, "5")


def test_the_page_names_these_keywords() -> None:
    kinds = "enforced|enforced in part|also checked at the end|refused by name|accepted, no effect"
    rows = dict(re.findall(rf"^\| ({kinds}) \| (.*?) \|", PAGE.read_text(), re.M))
    documented = {name: re.findall(r"`([^`]+)`", keywords) for name, keywords in rows.items()}
    assert documented == {"enforced": sorted(KEPT), "enforced in part": sorted(IN_PART),
                          "also checked at the end": sorted(CHECKED), "refused by name": sorted(REFUSED),
                          "accepted, no effect": sorted(ANNOTATIONS)}  # fmt: skip


def test_what_is_counted(tmp_path: Path, checker: GrammarChecker) -> None:
    """Files have the layouts of the JSON Schema Test Suite, MaskBench and JSONSchemaBench."""
    ordered = {"type": "object", "properties": {"a": I, "b": I}}
    tests = [{"data": {"b": 1, "a": 2}, "valid": True}, {"data": {"a": "x"}, "valid": False}]
    (tmp_path / "bench").mkdir()
    for name, content in {
        "type.json": [{"schema": ordered, "tests": tests}, {"schema": I, "tests": [{"data": 1.0, "valid": True}]}],
        "bench/a.json": {"schema": S, "tests": [{"data": "x", "valid": False}]},
        "bench/b.json": {"not": I},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))
    found, wrong = measure(tmp_path, checker)
    assert vars(found["type"]) == {"schemas": 2, "refused": 0, "invalid_ruled_out": 1, "invalid_let_through": 0,
                                   "valid_allowed": 1, "valid_ruled_out": 1}  # fmt: skip
    assert vars(found["bench"]) == {"schemas": 2, "refused": 1, "invalid_ruled_out": 0, "invalid_let_through": 1,
                                    "valid_allowed": 0, "valid_ruled_out": 0}  # fmt: skip
    assert [line.partition(": ")[2].partition(":")[0] for line in wrong] == ["let through", "refused", "ruled out"]
