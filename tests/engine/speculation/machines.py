"""Machines and texts that exist only as formulas, to simulate the controller on.

S: sequences of a step, K: draft positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Milliseconds of all linears of one layer by tokens, measured on one H200 (Llama-8B's four linears): int4 kernel, then
# 16-bit ones from where they are faster. 32 layers.
_INT4_TOKENS = [1, 16, 64, 75, 128, 256, 512, 1024, 4096]
_INT4_MS = [0.092, 0.095, 0.143, 0.158, 0.161, 0.206, 0.327, 0.627, 2.601]
# All linears of a 0.6B model on two CPU cores, packed bf16.
_CPU_TOKENS = [1, 4, 8, 16, 32, 48, 128, 512, 4096]
_CPU_MS = [24, 24, 31, 43, 75, 106, 260, 1040, 8320]
_GRAPHS = [1, 2, 4, *range(8, 257, 8)]


@dataclass(frozen=True)
class Machine:
    """`step_s(tokens, sequences, kv_tokens, drafted)`, what a prompt token takes beside it (0: no prompts), and
    what proposing takes. proposers: None for lookup, or what a draft model's pass over so many sequences takes.
    draft_share: of the target's time for a prompt token, what a draft model takes."""

    name: str
    step_s: Callable[[int, int, int, bool], float]
    prefill_s: float = 0.0
    proposers: tuple[Callable[[int], float] | None, ...] = (None,)
    lookup_s: Callable[[int], float] = lambda num: 20e-6 + 1e-6 * num
    draft_share: float = 0.2


def _graphs(tokens: int, sequences: int, kv: int, drafted: bool) -> float:
    padded = next((size for size in _GRAPHS if size >= tokens), tokens)
    return max(6e-3, 50e-6 * padded) + 20e-9 * kv


def _ungraphed(tokens: int, sequences: int, kv: int, drafted: bool) -> float:
    """Plain steps run as graphs, drafted ones do not: the first draft costs a lot, the next ones nothing."""
    return max(6e-3 + 4e-3 * drafted, 20e-6 * tokens) + 20e-9 * kv


def _kinked(tokens: int, sequences: int, kv: int, drafted: bool) -> float:
    return 0.032 * float(np.interp(tokens, _INT4_TOKENS, _INT4_MS)) + 1e-3 + 30e-9 * kv


def _cpu(tokens: int, sequences: int, kv: int, drafted: bool) -> float:
    return 1e-3 * float(np.interp(tokens, _CPU_TOKENS, _CPU_MS)) + 4e-6 * kv / 100


def _memory(tokens: int, sequences: int, kv: int, drafted: bool) -> float:
    return max(8e-3, 35e-6 * tokens) + 30e-9 * kv


def _dispatch(tokens: int, sequences: int, kv: int, drafted: bool) -> float:
    return 4e-3 + 2e-6 * tokens


DISPATCH = Machine("dispatch", _dispatch)
MEMORY = Machine("memory", _memory, prefill_s=35e-6)
COMPUTE = Machine("compute", lambda tokens, sequences, kv, drafted: 0.5e-3 + 1e-3 * tokens)
KINKED = Machine("kinked", _kinked, prefill_s=20e-6)
GRAPHS = Machine("graphs", _graphs)
UNGRAPHED = Machine("only plain steps are graphs", _ungraphed)
CPU = Machine("cpu", _cpu, prefill_s=2e-3)
TINY = Machine("tiny on a cpu", lambda tokens, sequences, kv, drafted: 230e-6 + 22e-6 * tokens, prefill_s=12e-6)


# Fitted to figures of 2026-11-23: forced lookup is 3.1, 2.1, 1.8, 1.5 and 1.3 times plain steps at 1, 8, 32, 64
# and 128 sequences, of which each gets some 5.5 tokens in a step. A plain step of one takes 0.24 ms.
# first_s: what the first draft adds to a step; token_s: what each token does.
def _demo(first_s: float, token_s: float) -> Machine:
    return Machine(
        f"demonstration model, {1e6 * first_s:.0f} + {1e6 * token_s:.1f} us",
        lambda tokens, sequences, kv, drafted: 230e-6 + first_s * drafted + 2.1e-6 * sequences + token_s * tokens,
        prefill_s=4e-6,
    )


DEMO, *OTHER_DEMOS = _demo(150e-6, 3.9e-6), _demo(100e-6, 3.0e-6), _demo(200e-6, 5.5e-6)
DRAFT_MODEL = Machine("draft model", _memory, 35e-6, (lambda num: 0.9e-3 + 3e-6 * num,))
BOTH = Machine("lookup and a slow draft model", _dispatch, 2e-6, (None, lambda num: 3e-3 + 2e-6 * num))


@dataclass(frozen=True)
class Situation:
    """Of each running sequence: which it is, and its generated tokens; and whether the step before drafted."""

    row_S: np.ndarray
    progress_S: np.ndarray
    drafted_before: bool


@dataclass(frozen=True)
class Text:
    """`accepts` (S, K): probability that a draft is accepted given those before it. `available`: share of the time in
    which a sequence has candidates; their match length is long where acceptance is above one half."""

    name: str
    accepts: Callable[[Situation, int], np.ndarray]
    available: float = 1.0


def _constant(probability: float) -> Callable[[Situation, int], np.ndarray]:
    return lambda now, k: np.full((len(now.row_S), k), probability)


def _drifting(now: Situation, k: int) -> np.ndarray:
    return np.repeat(0.5 + 0.45 * np.cos(now.progress_S[:, None] / 150.0), k, axis=1)


def _bursty(now: Situation, k: int) -> np.ndarray:
    """Each sequence alternates between parts of 80 tokens that repeat something and parts that do not."""
    repeats_S = ((now.progress_S + 37 * now.row_S) // 80) % 2 == 0
    return np.repeat(np.where(repeats_S, 0.92, 0.08)[:, None], k, axis=1)


def _decaying(now: Situation, k: int) -> np.ndarray:
    return np.broadcast_to(0.85 * 0.7 ** np.arange(k), (len(now.row_S), k))


def _mixture(now: Situation, k: int) -> np.ndarray:
    return np.repeat(np.where(now.row_S % 2 == 0, 0.9, 0.15)[:, None], k, axis=1)


def _adversary(now: Situation, k: int) -> np.ndarray:
    """Accepts everything in a single drafted step, and nothing when drafting goes on."""
    return np.full((len(now.row_S), k), 0.0 if now.drafted_before else 1.0)


HIGH = Text("high", _constant(0.85))
MIDDLE = Text("middle", _constant(0.5))
LOW = Text("low", _constant(0.05))
RARE = Text("rare matches", _constant(0.8), available=0.25)
DRIFTING = Text("drifting", _drifting)
BURSTY = Text("bursty", _bursty)
DECAYING = Text("decaying by position", _decaying)
MIXTURE = Text("mixture of sequences", _mixture)
ADVERSARY = Text("adversary", _adversary)

MACHINES = (DISPATCH, MEMORY, COMPUTE, KINKED, GRAPHS, UNGRAPHED, CPU, TINY, DRAFT_MODEL, BOTH)
TEXTS = (HIGH, MIDDLE, LOW, RARE, DRIFTING, BURSTY, DECAYING, MIXTURE, ADVERSARY)
