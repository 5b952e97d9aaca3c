"""Parsing of JSON in the input: as Python's json module, but a number beyond the range of floats is refused, which json
reads as infinity. The words NaN and Infinity are accepted, since Python and pandas write them."""

import json
import math
from typing import Any


class BadJson(ValueError):
    """The text cannot be read; the message is the reason."""


def parse_json(text: str) -> Any:
    """Return the value of JSON text. Raises BadJson."""
    try:
        return _DECODER.decode(text)
    except BadJson:
        raise
    except (ValueError, RecursionError) as error:
        raise BadJson(f"not JSON: {error}") from None


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise BadJson(f"the number {digits:.40} is out of range: expected at most 1.8e308, or a text")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite)
