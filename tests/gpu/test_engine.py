"""The whole engine on a device: greedy tokens are the reference model's best, and with `deterministic` its rows are the
same alone and together; tokens are sampled, penalised and drafted as their parameters say, with a cache in fp8, with
600 rows, and in steps that do not fit the memory.

Prompts are ragged and half of them begin alike, and steps are small, so that chunks, decoding, shared prefixes and
captured steps take part. The reference computes the logits of every generated token in float32. A chosen token's logit
may be below the lowest allowed one (the best, or the k-th best of a row sampled with top_k) by a fraction of the
logits' deviation. A wrong step leads to several deviations.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import bench_model
from pipeline.demo import demo_model
from pipeline.engine.completion import Completion
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.engine.forward.graphs import CudaCapture
from pipeline.engine.forward.runner import DeviceContext, ModelRunner
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.step_plan import StepInput, dummy_step
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.engine.startup.loaded import LoadedModel
from pipeline.engine.startup.resolve import resolve
from pipeline.kernels.activations.act_quant import Activations, with_act_quant
from pipeline.kernels.reference import reference_kernels
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.decoder import Decoder
from pipeline.model.kv_cache import single_kv_pages
from tests.gpu.targets import TARGETS, Target

VOCAB = 2048  # of the tiny shapes
BEHIND = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
BEHIND_FP8 = 1.0
"""With activations or a cache in fp8, of 3 bits of fraction: where the last bit of a value decides how it is rounded,
it moves by up to an eighth, so two correct engines with other orders of sums differ about as much as fp8 and 16 bit."""
OUTPUT, LONGEST, BLOCK_SIZE, SHARED = 6, 320, 64, 70
FIRST_TOKEN = 16
COMPARED = 24  # rows of a case that are compared with the reference
TOO_LARGE = 1 << 55  # bytes that no memory has
OFFLOADED_GB = {"target": 0.003, "target-awq": 0.0008}
FITS = 40  # tokens of a step that fits, in the case that runs out of memory


@dataclass(frozen=True)
class EngineCase:
    """prompts: their number; longest: maximal tokens after a shared beginning. is_fp8: whether values round to fp8.
    prepare: changes the engine before it runs; after: must be true of it afterwards."""

    name: str
    params: SamplingParams
    prompts: int = COMPARED
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int = LONGEST - OUTPUT - SHARED
    is_fp8: bool = False
    prepare: Callable[[Engine], None] = lambda engine: None
    after: Callable[[Engine], bool] = lambda engine: True


def runs_out_of_memory(engine: Engine) -> None:
    """Steps of more than FITS tokens request more than the allocator has."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    execute, device = runner.execute, runner.decoder.device

    def execute_if_it_fits(step: StepInput, *others: Any) -> torch.Tensor:
        if len(step.token_id_T) > FITS:
            torch.empty(TOO_LARGE, dtype=torch.int8, device=device)
        return execute(step, *others)

    runner.execute = execute_if_it_fits  # type: ignore[method-assign]


def _greedy(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **options)


def engine_cases() -> list[EngineCase]:
    drafts = SpeculationConfig("draft_model", str(demo_model("draft")), 4, forced=True)
    return [
        EngineCase("greedy", _greedy()),
        EngineCase("sampled", _greedy(temperature=0.9, top_k=20, top_p=0.95, seed=5)),
        EngineCase("penalised", _greedy(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)),
        EngineCase("log-probabilities", _greedy(logprobs=2)),
        EngineCase(
            "drafted", _greedy(), options={"speculation": drafts},
            after=lambda engine: engine.stats.num_draft_steps > 0,
        ),
        EngineCase("fp8 cache", _greedy(), options={"kv_cache_dtype": "fp8"}, is_fp8=True),
        EngineCase("600 rows", _greedy(), 600, {"max_num_seqs": 608, "max_num_batched_tokens": 1024}, 32),
        EngineCase(
            "steps that do not fit the memory", _greedy(), prepare=runs_out_of_memory,
            after=lambda engine: engine.stats.num_out_of_memory > 0,
        ),
    ]  # fmt: skip


def behind_of(case: EngineCase, target: Target) -> float:
    """Run a case on the demonstration model and return `max_behind` of some of its rows. Raises AssertionError if the
    engine did not do what the case is for."""
    folder = Path(demo_model("target"))
    prompts = prompts_of(case.prompts, read_config(folder).vocab_size, case.longest)
    with engine_of(folder, target, **case.options) as engine:
        case.prepare(engine)
        done = engine.generate(prompts, case.params)
        assert case.after(engine), "the engine did not do what this case is for"
    some = [*range(COMPARED // 2), *range(len(prompts) - COMPARED // 2, len(prompts))]
    reference = reference_runner(folder, target.device)
    return max_behind(reference, [prompts[n] for n in some], [done[n] for n in some], case.params)


def engine_of(folder: Path, target: Target, **options: Any) -> Engine:
    settings: dict[str, Any] = {"max_model_len": LONGEST, "max_num_seqs": 16, "max_num_batched_tokens": 128} | options
    return Engine(EngineConfig(str(folder), device=str(target.device), dtype=target.type_name, **settings))


def prompts_of(count: int, vocab_size: int, longest: int = LONGEST - OUTPUT - SHARED) -> list[list[int]]:
    """Draw prompts of up to `longest` tokens; half of them begin with the same SHARED tokens, more than a block."""
    rng = np.random.default_rng(11)
    shared = rng.integers(FIRST_TOKEN, vocab_size, SHARED).tolist()
    lengths = rng.integers(1, longest, count)
    own = [rng.integers(FIRST_TOKEN, vocab_size, length).tolist() for length in lengths]
    return [shared * (n % 2) + tokens for n, tokens in enumerate(own)]


def reference_runner(folder: Path, device: torch.device, activation_dtype: str = "auto") -> ModelRunner:
    kernels, config = reference_kernels(torch.float32, device), read_config(folder)
    if activation_dtype != "auto":
        kernels = with_act_quant(kernels, Activations.for_all_weights(activation_dtype), device)
    decoder = Decoder(folder, config, kernels, torch.float32, device)
    loaded = LoadedModel(config, decoder, kernels, decoder.dtype)
    return loaded.runner(-(-LONGEST // BLOCK_SIZE), single_kv_pages(config, BLOCK_SIZE, decoder.dtype), LONGEST)


def max_behind(
    reference: ModelRunner, prompts: Sequence[list[int]], completions: Sequence[Completion], params: SamplingParams
) -> float:
    """Return the largest error in deviations of the logits: how far a generated token's logit is below the lowest
    allowed one, or a reported log-probability is off. Raises AssertionError if a row failed."""
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.error is None, completion.error_message
        logits_RV = _logits(reference, prompt, completion.token_ids)
        chosen_R = torch.tensor(completion.token_ids, device=logits_RV.device).unsqueeze(1)
        deviation_R = logits_RV.std(1)
        allowed_RV = _penalised(logits_RV, prompt, completion.token_ids, params)
        num_allowed = max(params.top_k, 1) if params.temperature > 0 else 1
        lowest_R = allowed_RV.topk(num_allowed, dim=1).values[:, -1]
        behind_R = (lowest_R - allowed_RV.gather(1, chosen_R).squeeze(1)) / deviation_R
        worst = max(worst, float(behind_R.max()))
        if completion.logprobs is not None:
            exact_R = logits_RV.log_softmax(1).gather(1, chosen_R).squeeze(1)
            reported_R = torch.tensor([each.logprob for each in completion.logprobs], device=exact_R.device)
            worst = max(worst, float(((exact_R - reported_R).abs() / deviation_R).max()))
    return worst


def _logits(reference: ModelRunner, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """Return logits (generated, vocabulary) before each generated token."""
    tokens = np.array(prompt + generated[:-1], dtype=np.int64)
    length_S = np.array([len(tokens)])
    step = dummy_step(
        count_S=length_S,
        context_len_S=length_S,
        block_table_SM=np.arange(-(-len(tokens) // BLOCK_SIZE), dtype=np.int32)[None],
        block_size=BLOCK_SIZE,
        row_R=np.arange(len(prompt) - 1, len(tokens)),
    )
    return reference.execute(replace(step, token_id_T=tokens))


def _penalised(
    logits_RV: torch.Tensor, prompt: list[int], generated: list[int], params: SamplingParams
) -> torch.Tensor:
    """Apply penalties as vLLM defines them: repetition in prompt and output, the others in the output only."""
    found_RV = logits_RV.clone()
    for row in range(len(generated)):
        seen = torch.tensor(sorted({*prompt, *generated[:row]}), device=found_RV.device)
        of_seen = found_RV[row, seen]
        found_RV[row, seen] = torch.where(
            of_seen < 0, of_seen * params.repetition_penalty, of_seen / params.repetition_penalty
        )
        for token in set(generated[:row]):
            count = generated[:row].count(token)
            found_RV[row, token] -= params.presence_penalty + params.frequency_penalty * count
    return found_RV


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = str(tmp_path_factory.mktemp("shapes"))
    return {name: bench_model(name, made).folder for name in ("tiny", "tiny-awq")}


@TARGETS
@pytest.mark.parametrize(("name", "activations"), [("tiny", "auto"), ("tiny-awq", "auto"), ("tiny-awq", "fp8")])
def test_greedy_tokens_are_the_references_best(
    folders: dict[str, Path], target: Target, name: str, activations: str
) -> None:
    if activations not in ("auto", *target.kernels().rounded):
        pytest.skip("this card has no products of fp8")
    prompts, params = prompts_of(24, VOCAB), SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    with engine_of(folders[name], target, activation_dtype=activations) as engine:
        done = engine.generate(prompts, params)
    runner = reference_runner(folders[name], target.device, activations)
    assert max_behind(runner, prompts, done, params) <= (
        BEHIND_FP8 if activations == "fp8" else BEHIND[target.type_name]
    )
    done[3].token_ids[1] = (done[3].token_ids[1] + 1) % 2048
    assert max_behind(runner, prompts[3:4], done[3:4], params) > 0.5, "a wrong token would be found"


def offloading(name: str, target: Target) -> tuple[EngineConfig, ModelConfig]:
    """Return a configuration with three of a demonstration model's four layers in host memory."""
    if target.device.type == "cpu":
        pytest.skip("engine.cpu_offload_gb needs a GPU")
    folder = demo_model(name)
    return EngineConfig(
        str(folder),
        device=str(target.device),
        dtype=target.type_name,
        max_model_len=LONGEST,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        cpu_offload_gb=OFFLOADED_GB[name],
    ), read_config(folder)


def steps_of(vocab_size: int, num_seqs: int = 4, prompt: int = 30) -> list[StepInput]:
    """Return steps that compute prompts, and then decode."""
    rng, table_SM = np.random.default_rng(4), np.arange(num_seqs, dtype=np.int32)[:, None]
    found = []
    for count, context in ((prompt, prompt), *((1, prompt + n) for n in range(1, 5))):
        step = dummy_step(
            count_S=np.full(num_seqs, count),
            context_len_S=np.full(num_seqs, context),
            block_table_SM=table_SM,
            block_size=BLOCK_SIZE,
            row_R=np.arange(num_seqs) * count + count - 1,
        )
        found.append(replace(step, token_id_T=rng.integers(FIRST_TOKEN, vocab_size, len(step.token_id_T))))
    return found


@TARGETS
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("name", OFFLOADED_GB)
def test_offloaded_layers_compute_the_same_bits(target: Target, name: str, captured: bool) -> None:
    config, model = offloading(name, target)
    with DeviceContext(None, target.device):
        offloaded = LoadedModel.load(demo_model(name), model, resolve(config, model))
        resident = replace(
            offloaded,
            decoder=Decoder(demo_model(name), offloaded.config, offloaded.kernels, target.dtype, target.device),
        )
        logits: list[list[torch.Tensor]] = []
        for each in (resident, offloaded):
            runner = each.runner(8, single_kv_pages(each.config, BLOCK_SIZE, each.kv_dtype), LONGEST)
            if captured:
                sizes = {"max_num_seqs": 4, "max_queries": 1, "max_tokens": 4, "max_mixed_tokens": 128}
                runner.capture_steps(CudaCapture(), log=lambda done, total: None, **sizes)
            logits.append([runner.execute(step).clone() for step in steps_of(model.vocab_size)])
        assert all(map(torch.equal, *logits))


@TARGETS
def test_offloaded_layers_free_memory(target: Target) -> None:
    config, model = offloading("target", target)
    resolved = resolve(config, model)
    assert resolved.offload is not None
    used = []
    with DeviceContext(None, target.device):
        for each in (replace(resolved, offload=None), resolved):
            gc.collect()
            before = torch.cuda.memory_allocated(target.device)
            loaded = LoadedModel.load(demo_model("target"), model, each)
            used.append(torch.cuda.memory_allocated(target.device) - before)
            del loaded
    assert used[0] - used[1] == pytest.approx(resolved.offload.freed_bytes, rel=0.05)


@TARGETS
@pytest.mark.parametrize("name", OFFLOADED_GB)
def test_offloaded_layers_in_an_engine(target: Target, name: str) -> None:
    config, model = offloading(name, target)
    folder, params = demo_model(name), SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    prompts, options = prompts_of(24, model.vocab_size), {"cpu_offload_gb": config.cpu_offload_gb}
    with engine_of(folder, target, **options) as engine:
        done = engine.generate(prompts, params)
    assert max_behind(reference_runner(folder, target.device), prompts, done, params) <= BEHIND[target.type_name]
    tokens = []
    for each in ({}, options):
        with engine_of(folder, target, deterministic=True, **each) as engine:
            tokens.append([one.token_ids for one in engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]


@TARGETS
def test_deterministic_rows_are_the_same_alone_and_together(folders: dict[str, Path], target: Target) -> None:
    prompts, params = prompts_of(8, VOCAB), SamplingParams(max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    for folder in folders.values():
        with engine_of(folder, target, deterministic=True, max_num_seqs=8, max_num_batched_tokens=96) as engine:
            alone = []
            for prompt in prompts:
                alone += engine.generate([prompt], params)
                engine.pool.forget(range(engine.pool.num_blocks))  # the next one finds nothing to share
            together = engine.generate(prompts, params)
        assert all(one.error is None for one in together)
        assert [(one.token_ids, one.logprobs) for one in alone] == [(one.token_ids, one.logprobs) for one in together]


@TARGETS
@pytest.mark.parametrize("case", engine_cases(), ids=lambda case: case.name)
def test_tokens_are_chosen_as_parameters_say(target: Target, case: EngineCase) -> None:
    tolerance = BEHIND_FP8 if case.is_fp8 else BEHIND[target.type_name]
    assert behind_of(case, target) <= tolerance
