"""How often the host launches for a layer and for a step on a GPU, by kernel: the table of
benchmarks/gpu-audit.md. A launch more in a layer is some microseconds of each layer of each step that is not
replayed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.sampling.on_device import sample_on_device
from pipeline.engine.schedule.step_plan import StepInput
from tests.engine.launches.noted import (
    CONTEXT,
    DECODING,
    MIXED,
    ROWS,
    STEPS,
    Counting,
    Counts,
    an_h100,
    runner_of,
    write_models,
)
from tests.kernels.triton.problems import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="what is noted is not run, and the CPU has no graphs")

PAGE = Path(__file__).parents[3] / "benchmarks/gpu-audit.md"
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("bfloat16", "bfloat16", {}),
    ("bfloat16, fp8 cache", "bfloat16", {"kv_cache_dtype": "fp8"}),
    ("AWQ", "AWQ", {}),
    ("AWQ, fp8 activations", "AWQ", {"activation_dtype": "fp8"}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("launches"))


@pytest.mark.parametrize(("name", "weights", "options"), MODELS)
def test_launches_are_those_of_the_table(
    name: str, weights: str, options: dict[str, Any], folders: dict[str, Path]
) -> None:
    with an_h100(), Counting().watched() as counting:
        runner = runner_of(folders[weights], **options)

        def counted(step: StepInput, future: FutureTokens | None = None) -> Counts:
            return counting.count(lambda: sample_on_device(runner, runner.execute(step, future), None))

        rows = [counted(step).row(name, told) for told, step in STEPS.items()]
        counting.count(
            lambda: runner.capture_steps(
                counting.capture,
                **{
                    "max_num_seqs": ROWS + 1,
                    "max_queries": 1,
                    "most_tokens": ROWS,
                    "most_mixed_tokens": ROWS + CONTEXT,
                },
                say=lambda done, total: None,
            )
        )
        future = FutureTokens(np.arange(ROWS), np.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64))
        rows.append(counted(STEPS[DECODING], future).row(name, "decoding one step ahead, replayed"))
        rows += [counted(STEPS[told]).row(name, f"{told}, replayed") for told in (DECODING, MIXED)]
    page = PAGE.read_text().splitlines()
    stale = [row for row in rows if row not in page]
    assert not stale, "\n".join(["not in benchmarks/gpu-audit.md:", *stale])
