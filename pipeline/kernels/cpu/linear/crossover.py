"""Up to how many tokens one of two forms of a linear is the faster one, measured once for each shape."""

import time
from collections.abc import Callable, Hashable

import torch

TOKENS = (1, 2, 4, 8, 16, 32)

_measured: dict[Hashable, int] = {}

_Multiply = Callable[[torch.Tensor], torch.Tensor]


def crossover(key: Hashable, few: _Multiply, many: _Multiply, in_features: int, dtype: torch.dtype) -> int:
    """The largest of TOKENS up to which `few` is the faster way, by the best of a few short runs; 0 where it never is.

    Linears of one `key` on as many threads share one measurement.
    """
    key = key, dtype, torch.get_num_threads()
    if key not in _measured:
        _measured[key] = _measure(few, many, in_features, dtype)
    return _measured[key]


def _measure(few: _Multiply, many: _Multiply, in_features: int, dtype: torch.dtype) -> int:
    found = 0
    for num_tokens in TOKENS:
        x_TK = torch.randn(num_tokens, in_features, dtype=dtype)
        if _best_time_s(few, x_TK) > _best_time_s(many, x_TK):
            break
        found = num_tokens
    return found


def _best_time_s(function: _Multiply, x_TK: torch.Tensor, repeats: int = 4) -> float:
    function(x_TK)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function(x_TK)
        best = min(best, time.perf_counter() - start)
    return best
