"""Finished texts against their schemas: valid texts, reasons of invalid ones, and the cost of a check."""

import json
import random
import re
import time
from typing import Any

import pytest

from pipeline.engine.grammar import validity
from pipeline.engine.grammar.compiler import GrammarCompiler, check_grammar
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.engine.grammar.validity import invalid_reason
from pipeline.errors import ConfigError
from tests.engine.grammar.random_schemas import RandomSchemas, is_valid, random_text
from tests.engine.grammar.small_vocabulary import small_tokenizer
from tests.engine.hash_runner import VOCAB

TWICE = {"type": "object", "patternProperties": {"^[ab]$": {"const": 1}}, "additionalProperties": False,
         "minProperties": 2, "maxProperties": 2}  # fmt: skip
PAIRS = {"patternProperties": {r"^\p{L}$": {"type": "null"}, "^[0-9]": {"minimum": 3}}, "additionalProperties": False}
SLOW = {"patternProperties": {"(a+)+$": {"type": "null"}}, "pattern": "(a+)+$"}
CYCLE = {"type": "array", "items": {"$ref": "#"}}
DRAFT = "http://json-schema.org/draft-{}/schema#"
DOUBLING = {"anyOf": [{**CYCLE, "minItems": 3}, CYCLE]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (TWICE, '{"a":1,"b":1}', None), (TWICE, '{"b":1,"b":1}', "the name 'b' twice"),
        ({}, '[{"b":1,"b":1}]', "twice"),
        ({}, "", "cannot be read as JSON"), ({}, '{"a"', "cannot be read"), ({}, "NaN", "NaN is not a JSON number"),
        ({"type": "object"}, "[]", r"\$: \[\] is not of type"),
        ({"items": {"type": "null"}}, "[null,1]", r"\$\[1\]: 1"),
        # Integers are exact; other numbers are rounded as a parser does.
        ({"minimum": 2**53 + 1}, "9007199254740993", None), ({"minimum": 2**53 + 1}, "9007199254740992", "less than"),
        ({"exclusiveMaximum": 2**63 - 1}, "9223372036854775806", None),
        ({"exclusiveMaximum": 2**63 - 1}, "9223372036854775807", "greater than or equal"),
        ({"exclusiveMinimum": 0.1}, "0.10000000000000000001", "less than or equal"), ({"enum": [1]}, "1.0", None),
        ({"type": "integer"}, "1.0", None), ({"type": "integer"}, "9" * 5000, "4300 digits"),
        ({"enum": [True]}, "1", "1 is"),
        ({"const": 0}, "-0", None), ({"type": "number"}, "1e400", None), ({"multipleOf": 3}, "9007199254740993", None),
        ({"multipleOf": 3}, "9007199254740992", "not a multiple"), ({"multipleOf": 0.01}, "4.35", None),
        ({"multipleOf": 0.1}, "0.3", None), ({"multipleOf": 0.1}, "0.35", "not a multiple"),
        ({"multipleOf": 0.1}, "5", None),
        ({"multipleOf": 1e-7}, "0.0000003", None), ({"multipleOf": 0.01}, "1e300", None),
        ({"multipleOf": 0.1}, "1e400", "not a multiple"), ({"multipleOf": 2}, "true", None),
        ({"multipleOf": 2}, '"a"', None),
        # Names match as in the masks. Only the masks check formats.
        (PAIRS, '{"é":null,"5":3}', None), (PAIRS, '{"5":2}', r"\$.*2 is less"), (PAIRS, '{"-":1}', "does not allow"),
        ({"format": "date"}, '"2021-02-29"', None),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, '{"a":1,"b":1}', r"\$\.b: 1 is not"),
        # Other drafts, by their name.
        ({"$schema": DRAFT.format("07"), "items": [{"type": "null"}]}, "[1]", "is not of type"),
        ({"$schema": DRAFT.format("04"), "minimum": 1, "exclusiveMinimum": True}, "1", "less than or"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "x", "items": {"$ref": "#x"}, "type": "array"}}}, "[[1]]",
         "1 is"),
        # Bounded, whatever the schema and the text are.
        (SLOW, json.dumps({"a" * 40 + "!": 1}), None), (SLOW, json.dumps("a" * 40 + "!"), None),
        (CYCLE, "[" * 90 + "]" * 90, None), (CYCLE, "[" * 700 + "]" * 700, "cannot be checked"),
        (CYCLE, "[" * 90_000 + "]" * 90_000, "cannot be read"), (DOUBLING, "[[[]]]", None),
        (DOUBLING, "[" * 60 + "]" * 60, "more than 20,000 references"),
        ({"$ref": "http://127.0.0.1:9/a"}, "1", "127.0.0.1"),
    ],
)  # fmt: skip
def test_a_text_is_valid_by_its_schema_or_the_reason_is_named(schema: dict, text: str, expected: str | None) -> None:
    began, found = time.monotonic(), invalid_reason(StructuredOutputs.from_config({"json": schema}), text)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert len(found) <= 300
        assert re.search(expected, found), found
    assert time.monotonic() - began < 30


def test_any_object_is_one_object() -> None:
    wanted = StructuredOutputs.from_config({"json_object": True})
    texts = ('{"a":[1]}', "[]", '{"a":1,"a":1}', '{"a":1')
    assert [invalid_reason(wanted, text) is None for text in texts] == [True, False, False, False]


def test_a_schema_is_prepared_once_for_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made, prepared = [], validity.prepared
    monkeypatch.setattr(validity, "prepared", lambda text: made.append(text) or prepared(text))
    for value in range(3):
        assert (
            invalid_reason(StructuredOutputs.from_config({"json": {"type": "integer", "title": "once"}}), str(value))
            is None
        )
    assert len(made) == 1


def test_random_texts_that_masks_allow_are_valid_or_reported() -> None:
    """Unmodified jsonschema accepts all texts that the check passes, and none that it refuses."""
    schemas, rng = RandomSchemas(46), random.Random(46)
    tokenizer = small_tokenizer()
    compiler = GrammarCompiler(tokenizer, VOCAB)
    counts = {"stop": 0, "grammar_error": 0, "refused": 0, "longer": 0}
    while counts["stop"] < 1000:
        schema: dict[str, Any] = schemas.schema()
        wanted = StructuredOutputs.from_config({"json": schema})
        try:
            check_grammar(wanted)
        except ConfigError:
            counts["refused"] += 1
            continue
        for _ in range(4):
            text = random_text(compiler, tokenizer, wanted, rng)
            reason = None if text is None else invalid_reason(wanted, text)
            counts["longer" if text is None else "stop" if reason is None else "grammar_error"] += 1
            assert text is None or is_valid(text, schema) == (reason is None), (reason, text, schema)
    assert min(counts.values()) > 5, counts
