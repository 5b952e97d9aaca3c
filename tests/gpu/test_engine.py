"""The whole engine on a device: greedy tokens are the reference model's best, and with `deterministic` its rows are the
same alone and together. On a card the benchmark runs too, every section.

Prompts are ragged and steps small, so that chunks, decoding, shared prefixes and captured steps take part.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.bench.gpu.run import SECTIONS, bench_gpu
from pipeline.bench.shapes import bench_model
from pipeline.engine.engine import Engine
from pipeline.engine.forward.runner import ModelRunner
from pipeline.engine.params import Completion, EngineConfig, SamplingParams
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.kernels.activations.rounded_linears import with_rounded_activations
from pipeline.kernels.reference import reference_kernels
from pipeline.model.config import read_config
from pipeline.model.decoder import Decoder
from tests.gpu.places import PLACES, Place

BEHIND = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Deviations of the logits that a chosen token's logit may be below the best. What a wrong step leads to is several."""
BEHIND_FP8 = 1.0
"""With activations in fp8, of 3 bits of fraction: where the last bit of a value decides how it is rounded, it moves by
up to an eighth, in every linear, so two right engines with other orders of sums are apart about as fp8 is from 16 bit.
"""
OUTPUT, LONGEST, BLOCK_SIZE = 4, 320, 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = str(tmp_path_factory.mktemp("shapes"))
    return {name: bench_model(name, made).folder for name in ("tiny", "tiny-awq")}


def engine_of(folder: Path, place: Place, **options: Any) -> Engine:
    settings = {"max_model_len": LONGEST, "max_num_seqs": 16, "max_num_batched_tokens": 128} | options
    return Engine(EngineConfig(str(folder), device=str(place.device), dtype=place.type_name, **settings))


def prompts_of(count: int) -> list[list[int]]:
    """Half of them begin alike, for more than a block."""
    rng = np.random.default_rng(11)
    shared, lengths = rng.integers(16, 2048, 70).tolist(), rng.integers(1, LONGEST - OUTPUT - 70, count)
    return [shared * (n % 2) + rng.integers(16, 2048, length).tolist() for n, length in enumerate(lengths)]


def reference_runner(folder: Path, place: Place, activation_dtype: str) -> ModelRunner:
    kernels, config = reference_kernels(torch.float32, place.device), read_config(folder)
    if activation_dtype != "auto":
        kernels = with_rounded_activations(kernels, activation_dtype, place.device)
    decoder = Decoder(folder, config, kernels, torch.float32, place.device)
    return LoadedModel(config, decoder, kernels, decoder.dtype).runner(-(-LONGEST // BLOCK_SIZE), BLOCK_SIZE, LONGEST)


def most_behind(reference: ModelRunner, prompts: list[list[int]], completions: list[Completion]) -> float:
    """Of all chosen tokens, how far a logit is below the best one, in deviations of the logits."""
    most = 0.0
    for prompt, completion in zip(prompts, completions):
        assert completion.error is None, completion.error_message
        tokens = np.array(prompt + completion.token_ids[:-1], dtype=np.int64)
        place_T = np.arange(len(tokens))
        step = StepInput(
            token_id_T=tokens,
            position_T=place_T,
            slot_mapping_T=place_T,
            query_start_S1=np.array([0, len(tokens)], dtype=np.int32),
            context_len_S=np.array([len(tokens)], dtype=np.int32),
            block_table_SM=np.arange(-(-len(tokens) // BLOCK_SIZE), dtype=np.int32)[None],
            logit_row_R=place_T[len(prompt) - 1 :],
        )
        logits_RV = reference.execute(step)
        chosen_R = torch.tensor(completion.token_ids, device=logits_RV.device)
        behind_R = logits_RV.amax(1) - logits_RV.gather(1, chosen_R.unsqueeze(1)).squeeze(1)
        most = max(most, float((behind_R / logits_RV.std(1)).max()))
    return most


@PLACES
@pytest.mark.parametrize(("name", "activations"), [("tiny", "auto"), ("tiny-awq", "auto"), ("tiny-awq", "fp8")])
def test_greedy_tokens_are_the_references_best(
    folders: dict[str, Path], place: Place, name: str, activations: str
) -> None:
    if activations not in ("auto", *place.kernels().rounded):
        pytest.skip("this card has no products of fp8")
    prompts = prompts_of(24)
    with engine_of(folders[name], place, activation_dtype=activations) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
    runner = reference_runner(folders[name], place, activations)
    assert most_behind(runner, prompts, done) <= (BEHIND_FP8 if activations == "fp8" else BEHIND[place.type_name])
    done[3].token_ids[1] = (done[3].token_ids[1] + 1) % 2048
    assert most_behind(runner, prompts[3:4], done[3:4]) > 0.5, "a wrong token would be found"


@PLACES
def test_deterministic_rows_are_the_same_alone_and_together(folders: dict[str, Path], place: Place) -> None:
    prompts, params = prompts_of(8), SamplingParams(max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    for folder in folders.values():
        with engine_of(folder, place, deterministic=True, max_num_seqs=8, max_num_batched_tokens=96) as engine:
            alone = []
            for prompt in prompts:
                alone += engine.generate([prompt], params)
                engine.pool.forget(range(engine.pool.num_blocks))  # the next one finds nothing to share
            together = engine.generate(prompts, params)
        assert all(one.error is None for one in together)
        assert [(one.token_ids, one.logprobs) for one in alone] == [(one.token_ids, one.logprobs) for one in together]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_benchmark_runs_every_section(tmp_path: Path) -> None:
    found = bench_gpu(("tiny-awq",), quick=True, sections=SECTIONS, folder=str(tmp_path))
    assert found.complete
    assert not found.failed, found.to_text()
    (model,) = found.models
    assert model.linears is not None
    assert {"int4 fused", "cached", "scratch"} <= set(model.linears.paths)
    assert model.jobs is not None
    assert model.jobs.gaps
