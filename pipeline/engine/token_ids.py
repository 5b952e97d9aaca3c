"""Checks of token ids that callers pass."""

from collections.abc import Iterable
from operator import index
from typing import Any

import numpy as np

from pipeline.errors import ConfigError


def given_ids(ids: Iterable[Any]) -> list[int]:
    """Return token ids as plain ints, also from numpy or torch integers. Raises ConfigError."""
    try:
        if isinstance(ids, bytes | bytearray):  # else each byte would be an id
            raise TypeError
        return [index(each) for each in ids]
    except TypeError:
        raise ConfigError(f"expected a string or the ids of its tokens (integers), found {ids!r:.80}") from None


def token_array(ids: Iterable[int]) -> np.ndarray:
    """Return token ids as int32. Ids outside int32 are clamped to values that are invalid in every vocabulary. Raises
    ConfigError for other types."""
    plain = given_ids(ids)
    try:
        return np.array(plain, dtype=np.int32)
    except OverflowError:
        return np.array([min(max(i, -1), np.iinfo(np.int32).max) for i in plain], dtype=np.int32)
