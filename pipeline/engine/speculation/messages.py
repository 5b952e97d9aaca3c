"""What the engine and the controller of speculative decoding tell each other about a step. No torch.

S: sequences that decode.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Batch:
    """What a step computes before drafts. `kv_tokens`: tokens that the decoding sequences have in the KV cache, in all.

    num_prefill: prompt tokens in this step. num_queued: prompt tokens that wait for room in a step (not for a slot or
    for blocks: what cannot be computed now is not in the way). room: tokens that the step can take besides.
    num_waiting: sequences that come when others have ended. slot_S: a number that each sequence keeps, as long as it is
    there; None where they are not told apart.
    """

    num_sequences: int
    kv_tokens: int
    room: int
    num_prefill: int = 0
    num_queued: int = 0
    num_waiting: int = 0
    slot_S: np.ndarray | None = None


@dataclass(frozen=True)
class Candidates:
    """Of one proposer: draft tokens that it has (or could draft) for each sequence, at most what the sequence may still
    generate after its next token, and the length of the match behind them (0 where it knows none)."""

    available_S: np.ndarray
    match_length_S: np.ndarray


@dataclass(frozen=True)
class Choice:
    """Sequence s drafts length_S[s] tokens of the proposer that was asked; aligned with the candidates."""

    length_S: np.ndarray
    class_S: np.ndarray
    proposer: int
    is_probe: bool


@dataclass(frozen=True)
class Outcome:
    """What became of a step. `num_generated`: tokens appended to decoding sequences (accepted ones behind a stop are
    not). propose_s: seconds that the proposer took, 0 when none was asked, lookup_s those of them before anything was
    chosen. drafted_S may be less than was chosen. host_s: seconds that the controller and shadows took since the last
    outcome. unseen_s: of a plain step, what each of those took that passed before it, where that is known."""

    step_s: float
    num_generated: int
    drafted_S: np.ndarray | None = None
    accepted_S: np.ndarray | None = None
    propose_s: float = 0.0
    lookup_s: float = 0.0
    host_s: float = 0.0
    unseen_s: float | None = None


@dataclass(frozen=True)
class Decided:
    """What was decided for a step, to be kept where another is decided on before it is done. worth_s: of a token."""

    choice: Choice | None = None
    worth_s: float = 0.0
    is_probe: bool = False
