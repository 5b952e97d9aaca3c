"""The whole engine on a device: greedy tokens are the reference model's best, and with `deterministic` its rows are the
same alone and together; tokens are sampled, penalised and drafted as asked (`tests.gpu.engine_cases`).

Prompts are ragged and steps small, so that chunks, decoding, shared prefixes and captured steps take part.
"""

from pathlib import Path
from typing import Any

import pytest

from pipeline.bench.shapes import bench_model
from pipeline.engine.engine import Engine
from pipeline.engine.params import SamplingParams
from tests.gpu.engine_cases import (
    BEHIND,
    BEHIND_FP8,
    OUTPUT,
    EngineCase,
    behind_of,
    engine_cases,
    engine_of,
    max_behind,
    prompts_of,
    reference_runner,
)
from tests.gpu.places import PLACES, Place

VOCAB = 2048  # of the tiny shapes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = str(tmp_path_factory.mktemp("shapes"))
    return {name: bench_model(name, made).folder for name in ("tiny", "tiny-awq")}


def engine_at(folder: Path, place: Place, **options: Any) -> Engine:
    return engine_of(folder, place.device, place.type_name, **options)


@PLACES
@pytest.mark.parametrize(("name", "activations"), [("tiny", "auto"), ("tiny-awq", "auto"), ("tiny-awq", "fp8")])
def test_greedy_tokens_are_the_references_best(
    folders: dict[str, Path], place: Place, name: str, activations: str
) -> None:
    if activations not in ("auto", *place.kernels().rounded):
        pytest.skip("this card has no products of fp8")
    prompts, params = prompts_of(24, VOCAB), SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    with engine_at(folders[name], place, activation_dtype=activations) as engine:
        done = engine.generate(prompts, params)
    runner = reference_runner(folders[name], place.device, activations)
    assert max_behind(runner, prompts, done, params) <= (
        BEHIND_FP8 if activations == "fp8" else BEHIND[place.type_name]
    )
    done[3].token_ids[1] = (done[3].token_ids[1] + 1) % 2048
    assert max_behind(runner, prompts[3:4], done[3:4], params) > 0.5, "a wrong token would be found"


@PLACES
def test_deterministic_rows_are_the_same_alone_and_together(folders: dict[str, Path], place: Place) -> None:
    prompts, params = prompts_of(8, VOCAB), SamplingParams(max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    for folder in folders.values():
        with engine_at(folder, place, deterministic=True, max_num_seqs=8, max_num_batched_tokens=96) as engine:
            alone = []
            for prompt in prompts:
                alone += engine.generate([prompt], params)
                engine.pool.forget(range(engine.pool.num_blocks))  # the next one finds nothing to share
            together = engine.generate(prompts, params)
        assert all(one.error is None for one in together)
        assert [(one.token_ids, one.logprobs) for one in alone] == [(one.token_ids, one.logprobs) for one in together]


@PLACES
@pytest.mark.parametrize("case", engine_cases(), ids=[case.name for case in engine_cases()])
def test_tokens_are_chosen_as_asked(place: Place, case: EngineCase) -> None:
    tolerance = BEHIND_FP8 if case.is_fp8 else BEHIND[place.type_name]
    assert behind_of(case, place.device, place.type_name) <= tolerance
