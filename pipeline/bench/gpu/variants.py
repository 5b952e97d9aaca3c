"""Choices of the engine that a session compares on the same work: a line each, and a process each.

What a variant changes is an option of `EngineConfig`, or a part of the engine that is put in the place of its own
before anything runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.engine.engine import Engine
from pipeline.engine.schedule.admission import Admission

FEWEST_SLOTS = 16
AS_SERVED = "as served"


@dataclass(frozen=True)
class Variant:
    """options: of `EngineConfig`. prepare: changes an engine that has run nothing."""

    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Engine], None] = lambda engine: None


class GatheredAdmission(Admission):
    """Lets waiting rows in when FEWEST_SLOTS slots are free, or enough for all that wait: steps with a prompt in them,
    which are not captured, then come less often."""

    def admit(self, budget: int, running: np.ndarray) -> tuple[list[int], list[int], list[int]]:
        if len(running) and self._table.num_free_slots < min(FEWEST_SLOTS, len(self.waiting)):
            return [], [], []
        return super().admit(budget, running)


def gather(engine: Engine) -> None:
    scheduler = engine.scheduler
    scheduler.admission = GatheredAdmission(
        engine.table, engine.pool, engine.stats, scheduler.admission._enable_prefix_caching
    )


VARIANTS = {
    AS_SERVED: Variant(),
    "rows let in 16 at a time": Variant(prepare=gather),
    "1,024 rows, 16,384 tokens": Variant({"max_num_seqs": 1024, "max_num_batched_tokens": 16384}),
    "fp8 cache": Variant({"kv_cache_dtype": "fp8"}),
    "fp8 activations": Variant({"activation_dtype": "fp8"}),
}
