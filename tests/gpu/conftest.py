"""Without a card, only `pytest -m gpu` collects these tests: at small sizes on the CPU, to try the tests themselves."""

import pytest
import torch


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if torch.cuda.is_available() or config.option.markexpr == "gpu" else True
