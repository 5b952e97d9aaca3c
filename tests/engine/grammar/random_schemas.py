"""Random JSON Schemas, and random texts that the masks of a schema allow: a model with random tokens."""

import json
import random
from typing import Any

import jsonschema

from pipeline.engine.grammar.compiler import GrammarCompiler
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.tokenization.tokenizer import Tokenizer

NAMES = ("a", "b", "ab", "x1", "y")
# For printable ASCII, Python's character classes (used by jsonschema) and those of the masks agree here.
PATTERNS = ("^[ab]+$", "^[A-C]{2}-\\d{1,3}$", "z", "^(yes|no)$", "^\\w{1,4}$", "[0-9]$", "^a.b")
BOUNDS = (-7, 0, 1, 3.5, 100, 2**53, 2**53 + 1, -(2**53) - 3, 0.125)
CONSTANTS: tuple[Any, ...] = ('a"b', 7, -0.5, None, True, [], {"x": [1, None]}, "", 2**53, 1.0)


class RandomSchemas:
    """Random schemas of a seed. Some cannot be compiled, some have no value, some require more than masks ensure."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """Return a whole schema, with definitions that may refer to each other and to the whole."""
        made = self._object() if self._chance(0.6) else self._any(0)
        if isinstance(made, bool):
            made = {}
        return made | {"$defs": {name: self._any(2) for name in ("p", "q")}}

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _any(self, depth: int) -> Any:
        rng = self._rng
        simple = [self._number, self._string, self._constants, lambda: {"type": rng.choice(("boolean", "null"))}]
        nested = [lambda: self._object(depth + 1), lambda: self._array(depth + 1), lambda: self._combined(depth + 1),
                  lambda: {"$ref": rng.choice(("#/$defs/p", "#/$defs/q", "#"))}]  # fmt: skip
        if self._chance(0.03):
            return rng.choice((True, False, {}))
        return rng.choice(simple if depth > 3 or self._chance(0.5) else nested)()

    def _bounds(self, low: str, high: str, values: tuple[Any, ...], share: float = 0.5) -> dict[str, Any]:
        chosen = sorted(self._rng.choice(values) for _ in range(2))
        return {name: value for name, value in zip((low, high), chosen) if self._chance(share)}

    def _number(self) -> dict[str, Any]:
        names = self._rng.choice((("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")))
        made = {"type": self._rng.choice(("integer", "number"))} | self._bounds(*names, BOUNDS)
        return made | ({"multipleOf": self._rng.choice((1, 3, 0.5, 0.25))} if self._chance(0.2) else {})

    def _string(self) -> dict[str, Any]:
        if self._chance(0.5):
            return {"type": "string"} | self._bounds("minLength", "maxLength", (0, 1, 2, 5))
        if self._chance(0.5):
            made = {"type": "string", "pattern": self._rng.choice(PATTERNS)}
            return made | ({"maxLength": 9} if self._chance(0.2) else {})
        return {"type": "string", "format": self._rng.choice(("date", "uuid", "ipv4", "time"))}

    def _constants(self) -> dict[str, Any]:
        if self._chance(0.3):
            return {"const": 2**53 + 1 if self._chance(0.05) else self._rng.choice(CONSTANTS)}
        return {"enum": self._rng.choices(CONSTANTS, k=self._rng.randint(1, 4))}

    def _array(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "array", "items": self._any(depth)} | self._bounds(
            "minItems", "maxItems", (0, 1, 2, 3)
        )
        if self._chance(0.3):
            made["prefixItems"] = [self._any(depth) for _ in range(self._rng.randint(1, 2))]
        return made

    def _object(self, depth: int = 0) -> dict[str, Any]:
        rng = self._rng
        made: dict[str, Any] = {"type": "object"}
        names = rng.sample(NAMES, rng.randint(0, 3))
        if names:
            made["properties"] = {name: self._any(depth) for name in names}
        required = [name for name in names if self._chance(0.7)]
        made["required"] = [*required, *(["z"] if self._chance(0.05) else [])]
        if self._chance(0.8):
            made["additionalProperties"] = False if self._chance(0.6) else self._any(depth)
        if self._chance(0.25):
            made["patternProperties"] = {"^[cd]$": self._any(depth)} | ({"^e": True} if self._chance(0.3) else {})
        if self._chance(0.3):
            made |= self._bounds("minProperties", "maxProperties", (0, 1, 2, 3), 0.7)
        return made

    def _combined(self, depth: int) -> dict[str, Any]:
        keyword = self._rng.choice(("anyOf", "oneOf", "allOf"))
        return {keyword: [self._any(depth) for _ in range(self._rng.randint(1, 3))]}


def random_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, wanted: StructuredOutputs, rng: random.Random
) -> str | None:
    """Return a text that the masks of `wanted` allow, token by token, and as complete; None if it becomes too long."""
    matcher, tokens = compiler.matcher(wanted), []
    closing, ends = tokenizer.encode('"}],'), tokenizer.eos_token_ids
    for number in range(250):
        allowed = [token for token, bias in enumerate(matcher.parser.compute_logit_bias()) if bias]
        if matcher.error or not allowed:
            return None
        if ends.intersection(allowed) and (rng.random() < 0.5 or ends.issuperset(allowed)):
            return tokenizer.decode(tokens)
        allowed = [token for token in allowed if token not in ends]
        near = [token for token in allowed if token in closing] if rng.random() < 0.3 + number / 200 else []
        tokens.append(rng.choice(near or allowed))
        if matcher.advance(tokens[-1]):
            return tokenizer.decode(tokens)
    return None


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Return whether unmodified jsonschema accepts the text and no object repeats a name."""
    doubled: list[bool] = []

    def plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        doubled.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text, object_pairs_hook=plain)) and not any(
            doubled
        )
    except ValueError:
        return False
