"""Fixtures of `tests/data`, for this folder too."""

from tests.data.conftest import _no_failpoints, write  # noqa: F401
