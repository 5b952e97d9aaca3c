"""Checks of the values of options."""

import math
from collections.abc import Iterable
from numbers import Real

from pipeline.errors import ConfigError


def check_options(section: str, options: object, checks: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first failed check. checks: name of a field of `options`, whether its value is valid,
    and what was expected."""
    for name, ok, expected in checks:
        if not ok:
            raise ConfigError(f"{section}.{name} = {getattr(options, name)!r:.80}: expected {expected}")


def is_int(value: object) -> bool:
    """Return whether `value` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Return whether `value` is a number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
