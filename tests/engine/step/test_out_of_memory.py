"""Steps that run out of memory are undone, made smaller and repeated: same tokens, and at most one row fails."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.engine.completion import Completion
from pipeline.engine.engine import Engine
from pipeline.engine.forward.in_flight import FutureTokens
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.scheduler import RECOVERY_STEPS
from pipeline.engine.schedule.step_plan import StepInput
from pipeline.engine.step.out_of_memory import MAX_SUSPECTS
from pipeline.errors import EnvironmentFailed
from pipeline.machine.out_of_memory import is_out_of_memory
from tests.engine.hash_runner import before_each_step, check_tokens, expected_tokens, hash_engine, tight_engine
from tests.engine.schedule.test_scheduler import random_requests, run
from tests.model_folders import Family, make_family
from tests.parity.harness import float32_engine, greedy

CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    *(RuntimeError(text) for text in (CPU_ALLOCATOR, CUBLAS, "Triton Error [CUDA]: out of memory")),
)


def fail_if(engine: Engine, fails: Callable[[StepInput], bool]) -> list[int]:
    """Make steps that `fails` selects raise after writing keys and values; return a list that receives their sizes."""
    execute, failed = engine.runner.execute, []

    def execute_or_fail(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        logits = execute(step, future)
        if fails(step):
            failed.append(len(step.token_id_T))
            raise ERRORS[len(failed) % len(ERRORS)]
        return logits

    engine.runner.execute = execute_or_fail  # type: ignore[method-assign]
    return failed


def context_of(engine: Engine, step: StepInput, s: int) -> list[int]:
    """Return the known tokens of a step's sequence from the HashRunner's cache."""
    length = int(step.context_len_S[s])
    return engine.runner.cache[step.block_table_SM[s]].reshape(-1)[:length].tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("layers", ["alike", "states"])
@pytest.mark.parametrize("seed", range(8))
def test_04_tokens_survive_steps_that_run_out_of_memory(seed: int, layers: str, is_asynchronous: bool) -> None:
    rng = np.random.default_rng(seed)
    engine = tight_engine(rng, layers=layers, is_asynchronous=is_asynchronous)
    max_tokens = int(rng.integers(1, 12))
    failed = fail_if(engine, lambda step: len(step.token_id_T) > (1 if rng.random() < 0.1 else max_tokens))
    requests = random_requests(rng, 30, 64)
    done = run(engine, requests, arrivals=rng)
    check_tokens(done, requests)
    assert len(failed) > 3
    assert engine.stats.num_out_of_memory == len(failed)
    assert engine.stats.generated_tokens == sum(len(c.token_ids) for c in done.values())


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("layers", ["alike", "states"])
@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_step_leaves_the_rows_as_they_were(seed: int, layers: str, is_asynchronous: bool) -> None:
    """It is interrupted after it was computed, in the model or while its tokens are awaited."""
    rng = np.random.default_rng(seed)
    engine = tight_engine(rng, layers=layers, is_asynchronous=is_asynchronous)
    execute, sync = engine.runner.execute, engine.loop.sync
    num_interrupted = 0

    def interrupt() -> None:
        nonlocal num_interrupted
        if rng.random() < 0.15:
            num_interrupted += 1
            raise KeyboardInterrupt

    def execute_and_interrupt(step: StepInput, future: FutureTokens | None = None) -> torch.Tensor:
        logits_RV = execute(step, future)
        interrupt()
        return logits_RV

    def interrupt_and_sync() -> None:
        interrupt()
        sync()

    engine.runner.execute = execute_and_interrupt  # type: ignore[method-assign]
    engine.loop.sync = interrupt_and_sync  # type: ignore[method-assign]
    step = engine.step

    def step_again() -> list[Completion]:
        while True:
            with suppress(KeyboardInterrupt):
                return step()

    engine.step = step_again  # type: ignore[method-assign]
    requests = random_requests(rng, 20, 64)
    check_tokens(run(engine, requests, check=False), requests)
    assert num_interrupted > 5


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_04_a_row_that_never_fits_is_an_error_row_and_its_mates_are_complete(phase: str, is_asynchronous: bool) -> None:
    engine = hash_engine(120, 4, max_num_seqs=8, max_num_batched_tokens=64, is_asynchronous=is_asynchronous)
    requests = [Request(row, [row, 5, 6, 7, 8, 9], SamplingParams(max_tokens=30, ignore_eos=True)) for row in range(20)]
    max_fitting = 3 if phase == "prefill" else 11

    def holds_row_7(step: StepInput) -> bool:
        contexts = [context_of(engine, step, s) for s in range(len(step.context_len_S))]
        return any(context[0] == 7 and len(context) > max_fitting for context in contexts)

    failed = fail_if(engine, holds_row_7)
    done = run(engine, requests)
    assert done[7].error == "out_of_memory"
    assert (done[7].token_ids, done[7].text) == ([], "")
    assert (done[7].first_token_us > 0) == (phase == "decode")
    check_tokens(done, [request for request in requests if request.row_id != 7])
    assert len(failed) < 12, "the row is found by halves"
    assert engine.scheduler.step_tokens == 64, "full steps again once it has failed"


def test_04_no_memory_at_all_ends_the_engine_and_blames_no_row() -> None:
    engine = hash_engine(64, 4)
    fail_if(engine, lambda step: True)
    for row in range(10):
        engine.add(Request(row, [row, 5, 6], SamplingParams(max_tokens=3)))
    with pytest.raises(EnvironmentFailed, match=f"{MAX_SUSPECTS} consecutive rows"):
        run(engine, [])
    alone = hash_engine(64, 4)
    fail_if(alone, lambda step: True)
    assert run(alone, [Request(0, [1, 2], SamplingParams())])[0].error == "out_of_memory"


def test_rows_that_pause_lose_no_work_and_the_limit_is_doubled_after_steps_that_fit() -> None:
    engine = hash_engine(120, 4, max_num_seqs=8, max_num_batched_tokens=16)
    short_of_memory = [True]
    fail_if(engine, lambda step: short_of_memory[0] and len(step.token_id_T) > 2)
    for row in range(8):
        engine.add(Request(row, [row], SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(10):
        engine.step()
    assert engine.scheduler.step_tokens == 2
    known = [int(engine.table.num_known[slot]) for slot in engine.scheduler.running]
    assert known == [3] * 8, "they take turns"
    short_of_memory[0] = False
    done = run(engine, [])
    assert engine.scheduler.step_tokens == 16
    assert sum(engine.runner.tokens_per_step[-4 * RECOVERY_STEPS :]) > 8 * RECOVERY_STEPS  # type: ignore[attr-defined]
    assert engine.stats.recomputed_tokens == 0
    assert all(done[row].token_ids == expected_tokens([row], 40, 64, False) for row in range(8))


OTHERS = (
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "shape",
)


def test_other_errors_of_a_step_are_not_treated_as_out_of_memory() -> None:
    for error in (*map(RuntimeError, OTHERS), ValueError("x")):
        assert not is_out_of_memory(error)
        engine = hash_engine(16, 4)
        engine.add(Request(0, [1], SamplingParams()))

        def fail(step: StepInput, future: FutureTokens | None, error: Exception = error) -> None:
            raise error

        before_each_step(engine, fail)
        with pytest.raises(type(error)):
            engine.step()


def test_the_message_of_the_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)


def test_04_the_real_model_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = make_family(tmp_path, Family("qwen3", "qwen3", {"head_dim": 16}), seed=3)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 255, int(rng.integers(1, 90))).tolist() for _ in range(12)]
    with float32_engine(folder) as engine:
        undisturbed = engine.generate(prompts, greedy(20))
        calls = iter(range(1000))
        failed = fail_if(engine, lambda step: next(calls) in (0, 1, 2, 30, 31))
        disturbed = engine.generate(prompts, greedy(20))
        assert len(failed) == 5
        assert [c.token_ids for c in disturbed] == [c.token_ids for c in undisturbed]
        engine.pool.check()
        assert engine.pool.num_held == 0


def test_a_suspect_can_be_aborted() -> None:
    """A sequence that did not fit alone neither waits nor runs until another one was computed."""
    engine = hash_engine(64, 4)
    fail_if(engine, lambda step: any(7 in context_of(engine, step, s) for s in range(len(step.context_len_S))))
    engine.add(Request("suspect", [7], SamplingParams(max_tokens=3)))
    engine.step()
    assert engine.num_unfinished == 1
    assert not len(engine.scheduler.running)
    assert engine.abort("suspect")
    assert not engine.abort("suspect")
    assert not engine.has_unfinished
    assert engine.step() == []
    assert run(engine, [Request("next", [1], SamplingParams(max_tokens=3, ignore_eos=True))])["next"].error is None  # type: ignore[call-overload]
