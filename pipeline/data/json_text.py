"""Parsing of JSON in the input: as Python's json module, but a number beyond the range of floats is refused, which json
reads as infinity. The words NaN and Infinity are accepted, since Python and pandas write them."""

import json
import math
from typing import Any


def parse_json(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError or RecursionError."""
    return _DECODER.decode(text)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits:.40} is out of range: expected at most 1.8e308; write it as text")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite)
