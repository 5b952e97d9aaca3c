"""Specification of a completion: a JSON Schema, a regular expression, a choice of texts or a Lark grammar.

Owns the names, which are vLLM's (`StructuredOutputsParams`), and the checks that need no grammar compiler.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigError

KINDS = ("json", "json_object", "regex", "choice", "grammar")
MAX_BYTES = 1 << 20  # of one specification
_UNBOUNDED = re.compile(r"(?<!\\)[*+]|\{\d+,\}")


@dataclass(frozen=True)
class StructuredOutputs:
    """One specification in canonical form, so that equal ones are compiled once.

    text: for json the schema as JSON, for choice the texts as a JSON list, for regex and grammar the given text.
    whitespace_pattern: a regular expression of the whitespace that JSON may have between its tokens; None: no
    whitespace.
    """

    kind: str
    text: str
    whitespace_pattern: str | None = None

    @classmethod
    def from_config(cls, given: "Mapping[str, Any] | StructuredOutputs") -> "StructuredOutputs":
        """Build from vLLM's keys. Raises ConfigError, whose message begins with the key."""
        if isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise _refused("", f"{given!r:.60}", f"a mapping with one of {', '.join(KINDS)}")
        unknown = [name for name in given if name not in (*KINDS, "whitespace_pattern")]
        if unknown:
            raise ConfigError(
                f"sampling.structured_outputs.{unknown[0]}: unknown key; expected one of {', '.join(KINDS)}, and "
                "whitespace_pattern"
            )
        kinds = [name for name in KINDS if given.get(name) is not None]
        if len(kinds) != 1:
            raise _refused("", " and ".join(kinds) or "none of them", f"exactly one of {', '.join(KINDS)}")
        (kind,) = kinds
        text = _TEXTS[kind](given[kind])
        if len(text.encode("utf-8", "replace")) > MAX_BYTES:
            raise ConfigError(f"sampling.structured_outputs.{kind}: larger than {MAX_BYTES} bytes")
        return cls(kind, text, _whitespace(kind, given.get("whitespace_pattern")))

    def to_dict(self) -> dict[str, Any]:
        """Return the mapping that `from_config` accepts."""
        value = json.loads(self.text) if self.kind in ("json", "choice") else self.text or True
        blanks = {} if self.whitespace_pattern is None else {"whitespace_pattern": self.whitespace_pattern}
        return {self.kind: value} | blanks


def of_response_format(given: object) -> dict[str, Any] | None:
    """Return OpenAI's `response_format` as vLLM's keys; None for plain text. Raises ConfigError.

    `name`, `description` and `strict` have no effect here: a schema is always enforced.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    inner = given.get("json_schema") if isinstance(given, Mapping) and kind == "json_schema" else None
    if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        return {"json": inner["schema"]}
    raise ConfigError(
        f"sampling.response_format = {given!r:.60}: expected {{type: json_schema, json_schema: {{name, schema}}}}, "
        "{type: json_object} or {type: text}"
    )


def _refused(kind: str, got: str, expected: str) -> ConfigError:
    key = f"sampling.structured_outputs.{kind}".rstrip(".")
    return ConfigError(f"{key}: expected {expected}; got {got}")


def _schema(given: object) -> str:
    """Return the JSON of a schema that is an object or, as in vLLM, its text."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"sampling.structured_outputs.json: not JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise _refused("json", f"{given!r:.60}", "a JSON Schema that is an object")
    try:
        # Properties are generated in the order of the schema, so keys are not sorted.
        return json.dumps(given, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"sampling.structured_outputs.json: not JSON: {error}") from None


def _choices(given: object) -> str:
    texts = list(given) if isinstance(given, list | tuple) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _refused("choice", f"{given!r:.60}", "a list of texts that are not empty (quote numbers)")
    return json.dumps(texts, ensure_ascii=False)


def _text(kind: str, expected: str) -> Any:
    def checked(given: object) -> str:
        if not isinstance(given, str) or not given:
            raise _refused(kind, f"{given!r:.60}", expected)
        return given

    return checked


def _any_object(given: object) -> str:
    if given is not True:
        raise _refused("json_object", f"{given!r:.60}", "true")
    return ""


_TEXTS = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _text("regex", "a regular expression"),
    "choice": _choices,
    "grammar": _text("grammar", "a Lark grammar with a rule named start"),
}


def _whitespace(kind: str, pattern: object) -> str | None:
    """Check the pattern. Unbounded whitespace is rejected, because models have been seen to write it until max_tokens
    (vLLM issues 38696, 40080)."""
    if pattern is None:
        return None
    if kind not in ("json", "json_object"):
        raise ConfigError(f"sampling.structured_outputs.whitespace_pattern: only with json and json_object, not {kind}")
    if not isinstance(pattern, str) or not pattern:
        raise _refused("whitespace_pattern", f"{pattern!r:.60}", "a regular expression")
    if _UNBOUNDED.search(pattern):
        raise ConfigError(
            f"sampling.structured_outputs.whitespace_pattern = {pattern!r}: is unbounded, so a model may write "
            "whitespace until max_tokens; expected a bounded one such as '[ \\n]{0,2}'"
        )
    return pattern
