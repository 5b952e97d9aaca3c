"""Validation of finished texts against their JSON Schema, with the package jsonschema.

The masks enforce most of a schema; this finds violations of the rest: numbers beyond float64, duplicate names in an
object, a text cut by a stop string. Only the masks check patterns and formats: jsonschema uses Python's regular
expressions, whose classes differ and whose time is unbounded.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipeline.engine.grammar.compiler import ANY_OBJECT, MAX_COMPILED, name_matcher
from pipeline.engine.grammar.json_schema import prepared
from pipeline.engine.grammar.structured_outputs import StructuredOutputs
from pipeline.errors import ConfigError, EnvironmentFailed

MAX_REFERENCES = 20_000  # followed in one check: branches that refer to each other double the work at each level
_MAX_MESSAGE = 300
_num_references: ContextVar[int] = ContextVar("_num_references", default=0)


class _TooManyReferences(Exception):
    pass


def invalid_reason(wanted: StructuredOutputs, text: str) -> str | None:
    """Return why a text does not satisfy `json` or `json_object`; None if it does."""
    import_jsonschema()
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"cannot be read as JSON: {error}"[:_MAX_MESSAGE]
    _num_references.set(0)
    try:
        error = next(_validator(wanted.text or ANY_OBJECT).iter_errors(value), None)
    except (RecursionError, Unresolvable, ConfigError, _TooManyReferences) as problem:
        return f"cannot be checked by its schema: {problem}"[:_MAX_MESSAGE]
    return None if error is None else f"is not valid by its schema: {error.json_path}: {error.message}"[:_MAX_MESSAGE]


def import_jsonschema() -> Any:
    """Return the module. Only JSON of structured outputs needs it, so an engine starts without it.

    Raises EnvironmentFailed if it is not installed.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise EnvironmentFailed(
            f"sampling.structured_outputs: needs the package jsonschema, which cannot be imported ({error}); "
            "pip install jsonschema"
        ) from None
    return jsonschema


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the name {name!r:.60} twice")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


@lru_cache(maxsize=MAX_COMPILED)
def _validator(text: str) -> Any:
    """Return the validator of a schema, by the draft that its `$schema` names. It fetches nothing."""
    from referencing import Registry

    schema = prepared(text)
    kind = import_jsonschema().validators.validator_for(schema, default=import_jsonschema().Draft202012Validator)
    return _class(kind)(schema, registry=Registry())


@lru_cache
def _class(kind: Any) -> Any:
    own = {
        "pattern": lambda validator, pattern, instance, schema: (),
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
        "$ref": _counted(kind.VALIDATORS["$ref"]),
    }
    return import_jsonschema().validators.extend(kind, own)


def _counted(follow: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def counted(*given: Any) -> Iterator[Any]:
        _num_references.set(_num_references.get() + 1)
        if _num_references.get() > MAX_REFERENCES:
            raise _TooManyReferences(f"it needs more than {MAX_REFERENCES:,} references")
        yield from follow(*given) or ()

    return counted


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        for pattern, subschema in patterns.items():
            for name, value in instance.items():
                if name_matcher(pattern)(name):
                    yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, subschema: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, dict):
        patterns, own = schema.get("patternProperties", ()), schema.get("properties", ())
        for name, value in instance.items():
            if name not in own and not any(name_matcher(pattern)(name) for pattern in patterns):
                yield from validator.descend(value, subschema, path=name)


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Check the decimal notation of the numbers: 4.35 is a multiple of 0.01."""
    if validator.is_type(instance, "number"):
        numbers = [Fraction(n if isinstance(n, int) else str(n)) for n in (instance, divisor) if abs(n) < float("inf")]
        if len(numbers) < 2 or numbers[0] % numbers[1]:
            yield import_jsonschema().ValidationError(f"{instance!r} is not a multiple of {divisor!r}")
