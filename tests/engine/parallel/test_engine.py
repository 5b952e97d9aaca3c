"""Engines of several ranks against one rank, in float32 on a CPU, and what happens when a rank fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.engine.completion import Completion
from pipeline.engine.parallel import group
from pipeline.engine.parallel.runner import ParallelRunner
from pipeline.engine.speculation.config import SpeculationConfig
from pipeline.errors import ConfigError, EnvironmentFailed
from pipeline.model.decoder import DecoderLayer
from tests.engine.ahead import run_ahead
from tests.engine.parallel import failing_rank, failing_start

TIGHT = {  # prompts in chunks, and preemptions
    "max_num_batched_tokens": 48,
    "max_num_seqs": 12,
    "max_model_len": 192,
    "block_size": 8,
    "speculation": SpeculationConfig("lookup", forced=True),
    "kv_cache_memory_bytes": 40 * 8 * 4096,  # 40 blocks of 8 tokens
}
PROMPTS = [f"Summarize the text: {'the cat sat on a mat, ' * (i % 5)}number {i % 3} of {i}" for i in range(18)]
JSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PARAMS = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "sampling": SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, min_p=0.01, seed=3, n=2),
    "penalties": SamplingParams(max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=5),
    "log-probabilities": SamplingParams(max_tokens=8, logprobs=2, prompt_logprobs=1),
    "grammar": SamplingParams(max_tokens=24, structured_outputs={"json": JSON}),
}


def engine(size: int, **options: Any) -> Engine:
    settings: dict[str, Any] = {"model": "demo:target", "device": "cpu", "dtype": "float32", "num_threads": size}
    return Engine(EngineConfig(tensor_parallel_size=size, **(settings | options)))


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with engine(1, **TIGHT) as built:
        yield built


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    """Twice the blocks fit in the same bytes: each rank has one of two KV heads."""
    with engine(2, **TIGHT | {"kv_cache_memory_bytes": TIGHT["kv_cache_memory_bytes"] // 2}) as built:
        yield built


def tokens(completions: list[Completion]) -> list[Any]:
    assert not any(completion.error for completion in completions)
    return [(sample.token_ids, sample.text) for completion in completions for sample in completion.each]


def processes(built: Engine) -> list[int]:
    assert isinstance(built.runner, ParallelRunner)
    return [process.pid for process in built.runner._group._processes]


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_equal_those_of_one_rank(name: str, one: Engine, two: Engine) -> None:
    assert one.pool.num_blocks == two.pool.num_blocks
    ours, expected = (each.generate(PROMPTS, PARAMS[name]) for each in (two, one))
    assert tokens(ours) == tokens(expected)
    for mine, its in zip(ours, expected):
        for found, wanted in ((mine.logprobs, its.logprobs), (mine.prompt_logprobs, its.prompt_logprobs)):
            assert (found is None) == (wanted is None)
            for one_token, its_token in zip(found or [], wanted or []):
                assert one_token.logprob == pytest.approx(its_token.logprob, abs=1e-4)


def test_chunks_preemptions_shared_blocks_and_drafts(one: Engine, two: Engine) -> None:
    """Short outputs make the scheduler expect more of them, so that it admits too many of the long ones."""
    found = []
    for each in (one, two):
        each.forget()
        before = each.counters()
        each.generate(PROMPTS, SamplingParams(max_tokens=2, ignore_eos=True))
        found.append(tokens(each.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))))
        grown = {name: count - before.get(name, 0) for name, count in each.counters().items()}
        for name in ("num_preemptions", "cached_tokens", "num_draft_steps"):
            assert grown[name] > 0, name
    assert found[0] == found[1]


def test_tasks_equal_those_of_one_rank(one: Engine, two: Engine) -> None:
    texts, labels = PROMPTS[:6], ["good", "bad", "a longer label"]
    for mine, its in zip(two.choose(texts, labels), one.choose(texts, labels)):
        assert mine.result.logprobs == pytest.approx(its.result.logprobs, abs=1e-3)
    for mine, its in zip(two.score(texts), one.score(texts)):
        assert mine.result.logprob == pytest.approx(its.result.logprob, abs=1e-3)
    for mine, its in zip(two.embed(texts), one.embed(texts)):
        assert mine.result.values == pytest.approx(its.result.values, abs=1e-4)


@pytest.mark.parametrize("name", ["greedy", "penalties"])
def test_steps_one_ahead_send_the_tokens_in_flight(name: str, one: Engine, two: Engine) -> None:
    """The ranks get tokens that the leader has sampled, but not read, as on a GPU."""
    drafts = two.spec_decoder
    assert isinstance(two.runner, ParallelRunner)
    two.draft_as(None)
    run_ahead(two)
    try:
        assert tokens(two.generate(PROMPTS, PARAMS[name])) == tokens(one.generate(PROMPTS, PARAMS[name]))
    finally:
        run_ahead(two, False)
        two.draft_as(drafts)


def test_a_draft_model_runs_on_the_leader() -> None:
    drafts = SpeculationConfig("draft_model", "demo:draft", 3, forced=True)
    with engine(1, speculation=drafts) as whole, engine(2, speculation=drafts) as shared:
        ours, expected = (each.generate(PROMPTS[:6], PARAMS["greedy"]) for each in (shared, whole))
        assert shared.counters()["num_draft_steps"] > 0
    assert tokens(ours) == tokens(expected)


def test_four_ranks_replicate_kv_heads(one: Engine) -> None:
    with engine(4, **TIGHT) as four:
        assert tokens(four.generate(PROMPTS, PARAMS["greedy"])) == tokens(one.generate(PROMPTS, PARAMS["greedy"]))


def test_ranks_end_with_the_engine() -> None:
    built = engine(2)
    (pid,) = processes(built)
    assert psutil.pid_exists(pid)
    built.close()
    assert not psutil.pid_exists(pid)


def test_ranks_end_with_a_killed_leader(tmp_path: Path) -> None:
    program = (
        "import time; from tests.engine.parallel.test_engine import *\n"
        "built = engine(2); print(processes(built)[0], flush=True); time.sleep(60)"
    )
    command, environment = [sys.executable, "-c", program], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        assert psutil.pid_exists(pid)
        assert list(tmp_path.glob("pipeline-ranks-*"))
        leader.kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid)
    assert not list(tmp_path.glob("pipeline-ranks-*"))


@pytest.mark.parametrize(
    ("sent", "reason"), [(signal.SIGKILL, "ended with signal SIGKILL"), (signal.SIGSTOP, "stopped")]
)
def test_a_lost_rank_ends_the_engine_within_seconds(sent: signal.Signals, reason: str) -> None:
    with engine(2) as built:
        (pid,) = processes(built)
        built.generate(PROMPTS[:2], PARAMS["greedy"])
        os.kill(pid, sent)
        began = time.monotonic()
        with pytest.raises(EnvironmentFailed, match=rf"rank 1 \(process {pid}\) .*{reason}"):
            built.generate(PROMPTS, PARAMS["greedy"])
        assert time.monotonic() - began < 40


@pytest.fixture
def failing(one: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Path]]:
    """Return an engine of two ranks, the second of which fails as the file says."""
    monkeypatch.setattr(group, "RANK_MODULE", failing_rank.__name__)
    monkeypatch.setenv(failing_rank.FILE, str(tmp_path / "failure"))
    with engine(2, **TIGHT) as built:
        yield built, tmp_path / "failure"


def test_a_step_that_runs_out_of_memory_on_one_rank_is_undone(one: Engine, failing: tuple[Engine, Path]) -> None:
    built, file = failing
    file.write_text("memory")
    assert tokens(built.generate(PROMPTS, PARAMS["greedy"])) == tokens(one.generate(PROMPTS, PARAMS["greedy"]))
    assert built.counters()["num_out_of_memory"] == 1
    assert not file.exists()


def test_a_step_that_runs_out_of_memory_on_the_leader_is_undone(
    one: Engine, two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, failed = DecoderLayer.attend, []

    def attend_once(layer: DecoderLayer, *arguments: Any) -> Any:
        if layer.index == 2 and not failed:
            failed.append(layer)
            raise MemoryError
        return attend(layer, *arguments)

    expected = tokens(one.generate(PROMPTS, PARAMS["greedy"]))
    monkeypatch.setattr(DecoderLayer, "attend", attend_once)
    assert tokens(two.generate(PROMPTS, PARAMS["greedy"])) == expected
    assert failed


def test_another_error_of_a_rank_is_reported(failing: tuple[Engine, Path]) -> None:
    built, file = failing
    file.write_text("bug")
    with pytest.raises(EnvironmentFailed, match=r"rank 1 of 2: [\s\S]*ValueError: a bug in a test"):
        built.generate(PROMPTS, PARAMS["greedy"])


def test_an_interrupted_step_leaves_the_ranks_in_step(
    one: Engine, two: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(DecoderLayer, "attend", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            two.generate(PROMPTS, PARAMS["greedy"])
    assert tokens(two.generate(PROMPTS, PARAMS["greedy"])) == tokens(one.generate(PROMPTS, PARAMS["greedy"]))


def test_an_error_while_a_rank_loads_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "RANK_MODULE", "tests.engine.parallel.no_such_module")
    with pytest.raises(EnvironmentFailed, match=r"rank 1 \(process \d+\) ended with exit code 1"):
        engine(2)


def test_options_that_ranks_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel_size = 3: its 4 query heads are not divisible"):
        engine(3)
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel_size = 0: expected an integer of at least 1"):
        engine(0)
    with pytest.raises(ConfigError, match=r"engine.deterministic: cannot be combined with engine.tensor_parallel_size"):
        engine(4, deterministic=True)


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize(
    ("module", "ending", "reason"),
    [
        (group.RANK_MODULE, "os.kill(group._processes[0].pid, signal.SIGKILL)", "ended with signal SIGKILL"),
        (failing_start.__name__, "time.sleep(1.5)", "rank 1 of 2: ValueError: a bug in a test"),
    ],
)
def test_a_process_that_a_device_blocks_ends_itself(module: str, ending: str, reason: str, is_blocked: bool) -> None:
    """A process on a GPU may wait for a lost rank forever. One that raises the loss does not end itself."""
    program = (
        "import os, signal, time; from pipeline.engine.parallel import group as groups\n"
        f"groups.RANK_MODULE = {module!r}\n"
        "group = groups.RankGroup(2, 1 << 20, exits_when_lost=True)\n"
        f"{ending}\n"
        + ("time.sleep(30)" if is_blocked else "group.lost(OSError()); time.sleep(4); raise group.lost(OSError())")
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=45)
    assert ran.returncode == (EnvironmentFailed.exit_code if is_blocked else 1)
    assert reason in ran.stderr
    assert ("RankLost" in ran.stderr) == (not is_blocked)
