"""Measure the number of tokens up to which int4 linears are faster than dequantized bfloat16 ones on this CPU.

    python -m benchmarks.cpu_crossover

The result is `CROSSOVER` in `pipeline/kernels/cpu/linear/selection.py`.
"""

import time
from collections.abc import Callable

import torch

from pipeline.kernels.cpu.linear.selection import Int4Linear
from pipeline.weights.packed import GroupIntWeight

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHAPES = ((1024, 256), (512, 1024), (4096, 1024), (4096, 4096))  # outputs, inputs
WEIGHTS = 8  # number of weights per shape, used in turn, so that large ones are read from memory
ROUNDS = 15


def main() -> None:
    for threads in (1, torch.get_num_threads()):
        torch.set_num_threads(threads)
        for shape in SHAPES:
            linears = [Int4Linear(_weight(*shape)) for _ in range(WEIGHTS)]
            ratios = {}
            for num_tokens in TOKENS:
                x_TK = torch.randn(num_tokens, shape[1], dtype=torch.bfloat16)
                int4_s, dense_s = _best_s([[one.int4 for one in linears], [one.dense for one in linears]], x_TK)
                ratios[num_tokens] = int4_s / dense_s
            faster = [num_tokens for num_tokens, ratio in ratios.items() if ratio < 1]
            shown = ", ".join(f"{num_tokens}: {ratio:.2f}" for num_tokens, ratio in ratios.items())
            print(f"{shape[0]} x {shape[1]}, {threads} threads: up to {max(faster, default=0)} tokens ({shown})")


def _weight(outputs: int, inputs: int) -> GroupIntWeight:
    q_NK = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    groups = outputs, inputs // 128
    return GroupIntWeight(q_NK, torch.rand(groups) / 100, torch.randint(0, 16, groups).float(), group_size=128)


def _best_s(forms: list[list[Callable[[torch.Tensor], torch.Tensor]]], x_TK: torch.Tensor) -> list[float]:
    """Return the shortest time of a pass over all weights in each form, with forms in turn."""
    best = [float("inf")] * len(forms)
    for _ in range(ROUNDS):
        for form, linears in enumerate(forms):
            begun = time.perf_counter()
            for linear in linears:
                linear(x_TK)
            best[form] = min(best[form], time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    main()
