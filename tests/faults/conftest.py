"""Jobs run without Ray here, as in `tests/job`."""

from tests.job.conftest import without_ray  # noqa: F401 - a fixture is used by its name
