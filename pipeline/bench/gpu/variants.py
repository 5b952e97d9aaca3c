"""Choices of the engine that a session compares on the same work: a line each, and a process each.

What a variant changes is an option of `EngineConfig`, or a part of the engine that is put in the place of its own
before anything runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner

AS_SERVED = "as served"


@dataclass(frozen=True)
class Variant:
    """options: of `EngineConfig`. prepare: changes an engine that has run nothing."""

    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Engine], None] = lambda engine: None


def admit_at_once(engine: Engine) -> None:
    """Whoever fits: free slots are not gathered (`engine/schedule/pacing.py`)."""
    engine.scheduler.pacing = None


def launch_prompts_by_kernel(engine: Engine) -> None:
    """Though steps with few prompt tokens are captured (`engine/startup/mixed_tokens.py`)."""
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.replays_mixed = False


FEW_ROWS = {"max_num_seqs": 64}  # of which a small model's steps take the card less than the host

VARIANTS = {
    AS_SERVED: Variant(),
    "admitted at once": Variant(prepare=admit_at_once),
    "512 rows, 8,192 tokens": Variant({"max_num_seqs": 512, "max_num_batched_tokens": 8192}),
    "fp8 cache": Variant({"kv_cache_dtype": "fp8"}),
    "fp8 activations": Variant({"activation_dtype": "fp8"}),
    "64 rows": Variant(FEW_ROWS),
    "64 rows, prompts by kernel": Variant(FEW_ROWS, launch_prompts_by_kernel),
}
