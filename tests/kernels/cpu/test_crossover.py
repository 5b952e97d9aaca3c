"""Where one of two ways through a linear becomes the faster one."""

import pytest
import torch

from pipeline.kernels.cpu.linear import crossover as crossover_module
from pipeline.kernels.cpu.linear.crossover import crossover


def test_the_crossover_is_where_the_times_cross_and_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(crossover_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(crossover_module, "_measured", {})

    def takes(seconds_of):
        def multiply(x_TK: torch.Tensor) -> torch.Tensor:
            clock[0] += seconds_of(len(x_TK))
            return x_TK

        return multiply

    few, many = takes(lambda tokens: tokens * 1.0), takes(lambda tokens: 10.0)
    assert crossover("a", few, many, 8, torch.float32) == 8
    assert crossover("b", many, few, 8, torch.float32) == 0
    assert crossover("c", takes(lambda tokens: 0.1), few, 8, torch.float32) == crossover_module.TOKENS[-1]
    before = clock[0]
    assert crossover("a", few, many, 8, torch.float32) == 8
    assert clock[0] == before
