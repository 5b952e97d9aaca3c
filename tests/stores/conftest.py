"""The fixtures of `tests/data` serve here too."""

from tests.data.conftest import _no_failpoints, write  # noqa: F401
