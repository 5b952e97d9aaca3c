"""Type of `sampling.reasoning`: auto, or the texts of the markers."""

from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from pipeline.engine.reasoning.markers import ReasoningMarkers
from pipeline.errors import ConfigError


def _reasoning(value: Any) -> Any:
    if value is None or value is False:
        return None
    try:
        return ReasoningMarkers.from_config(value)
    except ConfigError as error:
        raise ValueError(error.problem("sampling.reasoning").lstrip(".")) from None


def _written(value: ReasoningMarkers | str | None) -> Any:
    return {"start": value.start, "end": value.end} if isinstance(value, ReasoningMarkers) else value


_MARKER: dict[str, Any] = {"type": "string", "minLength": 1}
_SCHEMA = {
    "anyOf": [
        {"enum": ["auto", False]},
        {
            "type": "object",
            "properties": {"start": _MARKER, "end": _MARKER},
            "required": ["start", "end"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}

Reasoning = Annotated[
    ReasoningMarkers | Literal["auto"] | None,
    PlainValidator(_reasoning),
    PlainSerializer(_written),
    WithJsonSchema(_SCHEMA),
]
