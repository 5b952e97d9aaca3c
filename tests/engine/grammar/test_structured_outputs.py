"""Forms of structured outputs that are accepted, and those that are refused by name."""

import json
from typing import Any

import llguidance
import pytest

from pipeline.engine.grammar import compiler as compiler_module
from pipeline.engine.grammar.compiler import GrammarCompiler, check_grammar
from pipeline.engine.grammar.structured_outputs import StructuredOutputs, of_response_format
from pipeline.engine.grammar.validity import invalid_reason
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError
from tests.engine.grammar.small_vocabulary import small_tokenizer
from tests.engine.hash_runner import VOCAB


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "exactly one of"), ({"json": {}, "regex": "a"}, "json and regex"), ({"jsn": {}}, "structured_outputs.jsn"),
        ("a", "a mapping"), ({"json": "{"}, "json: not JSON"), ({"json": "[]"}, "JSON Schema that is an object"),
        ({"json": {"const": float("nan")}}, "not JSON"), ({"regex": ""}, "a regular expression"),
        ({"regex": 5}, "a regular expression"), ({"choice": []}, "a list of texts"), ({"choice": ["a", 1]}, "quote"),
        ({"choice": ["a", ""]}, "not empty"), ({"choice": "ab"}, "a list of texts"), ({"json_object": 1}, "true"),
        ({"regex": "a", "whitespace_pattern": " ?"}, "only with json"),
        ({"json": {}, "whitespace_pattern": " *"}, "unbounded"),
        ({"json": {}, "whitespace_pattern": "[ ]{0,}"}, "bound"),
        ({"regex": "a" * (1 << 21)}, "larger than"),
    ],
)  # fmt: skip
def test_what_is_no_specification_is_refused_by_its_key(given: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "object", "properties": {"a": {"not": {}}}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"json": {"format": "colour", "type": "string"}}, "colour"), ({"json": {"$ref": "http://a/b"}}, "http://a/b"),
        ({"json": {"type": "strin"}}, "strin"), ({"regex": "(?=a)b"}, "look-ahead"), ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: word"}, "word"), ({"grammar": "begin: /a/"}, "start"),
        ({"json": {}, "whitespace_pattern": "[ "}, "regex"),
        ({"json": {"enum": ["a", 9007199254740993]}}, r"json: enum\[1\] = 9007199254740993: a number beyond 2\^53"),
        ({"json": {"properties": {"enum": {"const": {"a": [-(2**63)]}}}}}, r"properties\.enum\.const\.a\[0\] = -92233"),
        ({"json": {"const": 1e300}}, r"const = 1e\+300"),
        ({"json": '{"type":"array","items":' * 200 + "{}" + "}" * 200}, "recursion limit"),
        ({"json": {"items": [{}]}}, r"items is a list, as in older drafts; expected prefixItems"),
        ({"json": {"exclusiveMinimum": True, "minimum": 1}}, "exclusiveMinimum is true or false"),
        ({"json": {"$schema": 5}}, r"\$schema = 5: expected a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_its_name(given: dict, named: str) -> None:
    wanted = StructuredOutputs.from_config(given)
    for check in (check_grammar, GrammarCompiler(small_tokenizer(), VOCAB).check):
        with pytest.raises(ConfigError, match=named) as caught:
            check(wanted)
        assert str(caught.value).startswith("sampling.structured_outputs.")
        assert "\n" not in str(caught.value)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
OPTIONAL = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
LIST = {"type": "array", "items": {"$ref": "#/$defs/node"}}


@pytest.mark.parametrize(
    ("root", "node", "expected"),
    [
        ({"$ref": "#"}, {}, "the schema refers to itself"),
        ({"$ref": "#it", "$anchor": "it"}, {}, "the schema refers to itself"),
        ({"$ref": "http://a/b#", "$id": "http://a/b"}, {}, "the schema refers to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/node"}}}, {"allOf": [{"$ref": "#/$defs/node"}]},
         r"\$defs\.node refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, {}, "the schema refers to itself"),
        (NODE, NODE, "the schema requires itself without end"),
        ({"properties": {"a": {"$ref": "#/$defs/node"}}}, NODE, r"properties\.a requires itself without end"),
        (OPTIONAL, OPTIONAL, None), (LIST, LIST, None), (OPTIONAL, {"anyOf": [NODE, {"type": "null"}]}, None),
        (NODE, {**LIST, "minItems": 1}, "without end"),
        (NODE, {"anyOf": [NODE, {**LIST, "minItems": 1}]}, "without end"),
        (NODE, {"oneOf": [NODE, {"type": "null"}]}, None),
        (NODE, {"type": "object", "allOf": [{"required": ["next"]}, OPTIONAL]}, "without end"),
        (NODE, {"allOf": [{"required": ["next"]}, OPTIONAL]}, "without end"), (NODE, {"allOf": [NODE]}, "without end"),
        (NODE, {"properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}, None),  # any text
        ({"$ref": "#/$defs/node"}, {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}, None),
        ({"$ref": "#/$defs/node"}, {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "without end"),
        (NODE, {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "without end"),
        (NODE, {"type": "object", "additionalProperties": {"$ref": "#"}}, None),
        (NODE, {"type": "object", "patternProperties": {"^n": {"$ref": "#"}}, "additionalProperties": False,
                "required": ["next"]}, "without end"),
        (NODE, {"enum": [{"next": 1}]}, None), ({"type": "null"}, NODE, None), (NODE, False, "."),
    ],
)  # fmt: skip
def test_a_schema_whose_values_never_end_is_refused_where_it_begins(
    root: dict, node: Any, expected: str | None
) -> None:
    wanted = StructuredOutputs.from_config({"json": root | {"$defs": {"node": node}}})
    if expected is None:
        return check_grammar(wanted)
    with pytest.raises(ConfigError, match=f"structured_outputs.json: .*{expected}"):
        check_grammar(wanted)


@pytest.mark.parametrize(
    "without_effect",
    [
        {"uniqueItems": False}, {"minItems": 0}, {"minLength": 0}, {"minProperties": 0}, {"required": []},
        {"not": False},
        {"contains": {"type": "null"}, "minContains": 0}, {"minContains": 2}, {"maxContains": 2},
        {"if": {"type": "null"}},
        {"then": False}, {"else": False}, {"if": {}, "then": True, "else": {"title": "x"}}, {"propertyNames": True},
        {"dependentRequired": {"a": []}}, {"dependentSchemas": {"a": {}}}, {"unevaluatedItems": True},
        {"unevaluatedProperties": {}}, {"additionalProperties": True}, {"additionalItems": False}, {"allOf": []},
        {"properties": {}}, {"patternProperties": {}}, {"items": True}, {"minProperties": 1, "required": ["a"]},
        {"maxProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False}, {"oneOf": [{}]},
        {"$comment": "x", "title": "x", "default": 2**60, "examples": [2**60], "description": "x", "deprecated": True,
         "readOnly": True},
    ],
)  # fmt: skip
def test_a_keyword_without_an_effect_is_accepted(without_effect: dict) -> None:
    """It is ignored at the root and in nested schemas; data and property names are unchanged."""
    compiler, tokenizer = GrammarCompiler(small_tokenizer(), VOCAB), small_tokenizer()
    data = {"const": {"uniqueItems": False, "not": False}}
    for schema, text in (
        (without_effect, '{"a":1}'),
        ({"type": "array", "items": without_effect}, '[[],"",{"a":1}]'),
        ({"properties": {"uniqueItems": without_effect}}, '{"uniqueItems":[2,2]}'),
        (data, json.dumps(data["const"], separators=(",", ":"))),
    ):
        wanted = StructuredOutputs.from_config({"json": schema})
        check_grammar(wanted)
        matcher = compiler.matcher(wanted)
        for token in tokenizer.encode(text):
            assert matcher.accepts(token), text
            matcher.advance(token)
        assert invalid_reason(wanted, text) is None


@pytest.mark.parametrize(
    ("regex", "matches", "others"),
    [
        (r"\d", "07", "٣५ax"), (r"[\d.]", "7.", "٣x"), (r"\w", "aZ_9", "é٣-"), (r"[\w-]", "a-", "é "),
        (r"\D", "a٣é", "5"),
        (r"[^\d]", "a٣", "5"), (r"\W", "-é٣", "a_5"), (r"\s", " \u00a0\u3000", "a"), (r"\S", "aé", " \u00a0"),
        (r"\\d", (r"\d",), "5"), (r"\p{Nd}", "5٣", "a"), (r"(?i)[a-c]", "bB", "d"), (r"a/\d", ("a/5",), ("a/٣",)),
    ],
)  # fmt: skip
def test_classes_of_regular_expressions_are_those_of_ecmascript_everywhere(regex: str, matches, others) -> None:
    lark = regex.replace("/", "\\/")
    forms: dict[str, dict[str, Any]] = {
        "regex": {"regex": regex},
        "pattern": {"json": {"type": "string", "pattern": f"^(?:{regex})$"}},
        "name": {"json": {"patternProperties": {f"^(?:{regex})$": {"type": "null"}}, "additionalProperties": False,
                          "type": "object", "minProperties": 1}},
        "grammar": {"grammar": f'start: "a/b\\"" x | y // /\\d/\nx: /{lark}/\ny: "/" /{lark}/ "/"'},
    }  # fmt: skip
    for name, given in forms.items():
        check_grammar(wanted := StructuredOutputs.from_config(given))
        for text, is_right in [(text, True) for text in matches] + [(text, False) for text in others]:
            quoted = json.dumps(text, ensure_ascii=False)
            wraps = {"pattern": quoted, "name": f"{{{quoted}:null}}", "grammar": f'a/b"{text}'}
            assert allows(wanted, wraps.get(name, text)) == is_right, (name, text)
            assert name != "grammar" or allows(wanted, f"/{text}/") == is_right
            if name == "name":
                assert (invalid_reason(wanted, wraps[name]) is None) == is_right


def test_blanks_of_a_whitespace_pattern_are_those_of_json() -> None:
    wanted = StructuredOutputs.from_config({"json": {"const": [1]}, "whitespace_pattern": r"\s{0,2}"})
    assert [blank for blank in " \t\n\r\f\v\u00a0" if allows(wanted, f"[{blank}1]")] == [" ", "\t", "\n", "\r"]


def allows(wanted: StructuredOutputs, text: str) -> bool:
    """Return whether the masks allow this text, byte by byte, and its end."""
    source, limits = compiler_module._source(wanted), llguidance.LLParserLimits(verbose_errors=False)
    matcher, ids = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, limits=limits), list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_text_and_a_mapping_are_one_specification_and_round_trip() -> None:
    text, mapping = ({"json": schema} for schema in ('{"b": 1, "a": "é"}', {"b": 1, "a": "é"}))
    assert (
        StructuredOutputs.from_config(text)
        == StructuredOutputs.from_config(mapping)
        != StructuredOutputs.from_config({"json": {"a": "é"}})
    )
    for given in (
        mapping, {"choice": ["b", "a"]}, {"regex": "a"}, {"grammar": "start: /a/"}, {"json_object": True},
        {"json": {}, "whitespace_pattern": "[ ]?"},
    ):  # fmt: skip
        assert StructuredOutputs.from_config(given).to_dict() == given
        assert StructuredOutputs.from_config(
            StructuredOutputs.from_config(given).to_dict()
        ) == StructuredOutputs.from_config(given)


def test_openais_response_format_is_the_same_by_other_names() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert of_response_format(given) == {"json": schema}
    assert of_response_format({"type": "json_object"}) == {"json_object": True}
    assert of_response_format({"type": "text"}) is None
    for wrong in ("json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(ConfigError, match=r"sampling\.response_format"):
            of_response_format(wrong)


def test_min_tokens_is_refused_with_a_grammar() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(min_tokens=1, structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, source = [], compiler_module._source
    monkeypatch.setattr(compiler_module, "_source", lambda wanted: made.append(wanted) or source(wanted))
    compiler = GrammarCompiler(small_tokenizer(), VOCAB)
    for letter in "abaab":
        compiler.matcher(StructuredOutputs.from_config({"regex": letter}))
    assert len(made) == 2
