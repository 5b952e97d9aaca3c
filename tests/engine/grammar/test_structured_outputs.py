"""What may be asked for, in which form, and what is refused by name."""

import llguidance
import pytest

from pipeline.engine.grammar import compiler as compiler_module
from pipeline.engine.grammar.compiler import GrammarCompiler, check_grammar
from pipeline.engine.grammar.structured_outputs import StructuredOutputs, of_response_format
from pipeline.engine.params import SamplingParams
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
        ({"json": {}, "whitespace_pattern": " *"}, "no bound"),
        ({"json": {}, "whitespace_pattern": "[ ]{0,}"}, "bound"),
        ({"regex": "a" * (1 << 21)}, "more than"),
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
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_with_its_name(given: dict, named: str) -> None:
    wanted = StructuredOutputs.of(given)
    for check in (check_grammar, GrammarCompiler(small_tokenizer(), VOCAB).check):
        with pytest.raises(ConfigError, match=named) as caught:
            check(wanted)
        assert str(caught.value).startswith("sampling.structured_outputs.")
        assert "\n" not in str(caught.value)


def test_a_text_and_a_mapping_are_one_specification_and_come_back() -> None:
    text, mapping = ({"json": schema} for schema in ('{"b": 1, "a": "é"}', {"b": 1, "a": "é"}))
    assert StructuredOutputs.of(text) == StructuredOutputs.of(mapping) != StructuredOutputs.of({"json": {"a": "é"}})
    for given in (
        mapping, {"choice": ["b", "a"]}, {"regex": "a"}, {"grammar": "start: /a/"}, {"json_object": True},
        {"json": {}, "whitespace_pattern": "[ ]?"},
    ):  # fmt: skip
        assert StructuredOutputs.of(given).to_dict() == given
        assert StructuredOutputs.of(StructuredOutputs.of(given).to_dict()) == StructuredOutputs.of(given)


def test_openais_response_format_is_the_same_by_other_names() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert of_response_format(given) == {"json": schema}
    assert of_response_format({"type": "json_object"}) == {"json_object": True}
    assert of_response_format({"type": "text"}) is None
    for wrong in ("json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(ConfigError, match=r"sampling\.response_format"):
            of_response_format(wrong)


def test_min_tokens_does_not_go_with_a_grammar() -> None:
    with pytest.raises(ConfigError, match="min_tokens"):
        SamplingParams(min_tokens=1, structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_grammar_is_compiled_once_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = llguidance.LLMatcher

    def counted(vocabulary, source, **options):
        made.append(source)
        return real(vocabulary, source, **options)

    for name in ("grammar_from_regex", "grammar_from_json_schema", "grammar_from_lark"):
        setattr(counted, name, getattr(real, name))
    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 2)
    compiler = GrammarCompiler(small_tokenizer(), VOCAB)
    one, two, three = (StructuredOutputs.of({"regex": letter}) for letter in "abc")
    for wanted in (one, one, two, one, three, one, two):  # two was used before one, and is gone
        compiler.matcher(wanted)
    assert len(made) == 4


def test_rows_of_one_grammar_go_their_own_ways() -> None:
    compiler, tokenizer = GrammarCompiler(small_tokenizer(), VOCAB), small_tokenizer()
    wanted = StructuredOutputs.of({"regex": "a|bc"})
    first, second = compiler.matcher(wanted), compiler.matcher(wanted)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    assert not second.take(b)
    assert first.take(a)
    assert second.take(c)
    assert compiler.matcher(wanted).take(a)
