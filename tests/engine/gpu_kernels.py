"""Run in a process of its own with TRITON_INTERPRET=1: the whole engine on the GPU's kernels, with captured steps, on a
processor. See test_gpu_kernels.py."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig, SamplingParams

CAPTURED = {"max_num_seqs": 3, "most_tokens": 9}


def replayed(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """What a CUDA graph does: the same work on the same tensors, whatever the arguments of the step were."""
    output = function()

    def replay() -> None:
        output.copy_(function())

    return replay, output


def engine_of(folder: str, kernels: str, **options: object) -> Engine:
    settings = {"max_model_len": 48, "max_num_seqs": 3, "max_num_batched_tokens": 24, "block_size": 16} | options
    return Engine(EngineConfig(model=folder, device="cpu", dtype="float32", kernels=kernels, **settings))  # type: ignore[arg-type]


def tokens_of(engine: Engine) -> tuple[list[list[int]], int]:
    """Completions of prompts that share beginnings, and how many steps they took."""
    rng = np.random.default_rng(3)
    stem = rng.integers(0, 255, 16).tolist()
    prompts = [
        (stem if n < 2 else []) + rng.integers(0, 255, length).tolist() for n, length in enumerate((2, 1, 5, 19))
    ]
    params = [SamplingParams(max_tokens=3 + n % 3, ignore_eos=True) for n in range(len(prompts))]
    with engine:
        done = engine.generate(prompts, params)
        return [completion.token_ids for completion in done], engine.stats.num_steps


def captured(folder: str, is_asynchronous: bool, speculation: object) -> list[list[int]]:
    engine = engine_of(folder, "triton", speculation=speculation)
    runner = engine.runner
    runner.capture_steps(replayed, max_queries=3, say=lambda done, total: None, **CAPTURED)  # type: ignore[attr-defined]
    assert runner.captured_tokens == [1, 2, 4, 8, 9]
    runner.is_asynchronous = is_asynchronous
    graphs, ran = runner._graphs, []  # type: ignore[attr-defined]
    run = graphs.run

    def run_and_count(*arguments: object) -> torch.Tensor:
        ran.append(arguments)
        return run(*arguments)

    graphs.run = run_and_count
    tokens, num_steps = tokens_of(engine)
    assert len(ran) > num_steps / 2, "most steps are replayed"
    return tokens


def main(folder: Path) -> None:
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        expected, _ = tokens_of(engine_of(str(model), "reference"))
        assert tokens_of(engine_of(str(model), "triton"))[0] == expected, f"{model.name}: step by step"
        assert captured(str(model), True, "off") == expected, f"{model.name}: captured, one step ahead"
        drafts = {"proposer": "ngram", "max_draft_tokens": 2, "forced": True}
        assert captured(str(model), False, drafts) == expected, f"{model.name}: captured, with drafts"
        print(f"{model.name}: {sum(map(len, expected))} tokens equal three times")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
