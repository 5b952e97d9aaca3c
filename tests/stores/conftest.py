"""Fixtures of the tests of data: these write inputs too, and leave no failpoint behind."""

from tests.data.conftest import _no_failpoints, write

__all__ = ["_no_failpoints", "write"]
