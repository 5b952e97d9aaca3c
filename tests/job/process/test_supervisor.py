"""The engine's process ends in every possible way; each row still gets exactly one completion, always the same."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from pipeline.engine.config import EngineConfig
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import EngineUnusable, EnvironmentFailed
from pipeline.job.process.child import ChildSpec, Ended
from pipeline.job.process.messages import Ready, Start
from pipeline.job.process.supervisor import Supervisor, computed
from pipeline.report.record.row_stats import Computed
from tests.job.fake_engine import answer


@pytest.fixture
def start(tmp_path):
    """Return `start(step_timeout_s=..., **fake)`, which returns a Supervisor over a fake engine."""
    started = []

    def start(step_timeout_s: float = 60.0, load_timeout_s: float = 60.0, **fake) -> Supervisor:
        (tmp_path / "config.json").write_text(json.dumps({"fake": fake}))
        config = EngineConfig(model=str(tmp_path))
        launch = ChildSpec("tests.job.fake_engine:FakeEngine", config, step_timeout_s, load_timeout_s)
        started.append(Supervisor(launch))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.close()


def requests(prompts: list[str]) -> list[Request]:
    return [Request(i, list(p.encode()), SamplingParams(max_tokens=6, seed=i)) for i, p in enumerate(prompts)]


def check(requested: list[Request], completions, failed: set[int] = frozenset()) -> None:
    assert sorted(c.row_id for c in completions) == [r.row_id for r in requested]
    for completion in completions:
        request = requested[completion.row_id]
        if completion.row_id in failed:
            assert (completion.error, completion.finish_reason) == ("engine_failure", "error")
            assert (completion.text, completion.token_ids) == ("", [])
        else:
            assert completion.error is None
            assert completion.token_ids == answer(request.prompt_token_ids, request.params.seed, 6)


def generate(supervisor, rows):
    done = supervisor.generate(rows)
    supervisor.raise_failure()
    return done


def test_rows_of_several_threads_return_to_their_callers(start):
    supervisor = start()
    requested = [requests([f"thread {t} row {i}" for i in range(20)]) for t in range(4)]
    with ThreadPoolExecutor() as pool:
        for rows, answers in zip(requested, pool.map(supervisor.generate, requested)):
            check(rows, answers)
    assert supervisor.deaths().count == 0
    assert supervisor.generate([]) == []


def test_a_process_that_is_killed_in_a_step_is_replaced_and_no_row_is_blamed(start, tmp_path):
    supervisor = start(kill="row 3", once=str(tmp_path / "once"))
    for texts in (["before"], [f"row {i}" for i in range(10)]):
        requested = requests(texts)
        check(requested, supervisor.generate(requested))
    deaths = supervisor.deaths()
    (reason,) = deaths.reasons
    assert reason == "signal SIGKILL from outside, as by the kernel when memory runs out"
    assert deaths.count == 1


def test_a_process_that_reads_no_rows_is_replaced(start, tmp_path):
    """The rows are more than its socket holds."""
    supervisor = start(step_timeout_s=1.0, stops_once=str(tmp_path / "once"), load_s=0.5)
    requested = requests([f"row {i} " + "word " * 8000 for i in range(100)])
    with ThreadPoolExecutor(1) as pool:
        check(requested, pool.submit(supervisor.generate, requested).result(timeout=60))
    assert "no step for 1 s" in supervisor.deaths().reasons[0]


def test_what_processes_computed_is_what_was_delivered_or_lost_with_them(start, tmp_path):
    """The last row ends the process when others have finished and others are half done; twice."""
    once = tmp_path / "once"
    supervisor = start(kill="row 9", once=str(once))
    done = []
    for deaths in (1, 2):
        requested = requests([f"row {i}" for i in range(10)])
        done += supervisor.generate(requested)
        assert supervisor.deaths().count == deaths
        once.unlink()
    lost, stats = supervisor.deaths().lost, supervisor.stats()
    assert lost.generated > 0
    assert computed(done) + lost == Computed(stats["prompt_tokens"], stats["generated_tokens"])


def test_interrupted_calls_return_what_is_finished(start):
    supervisor = start(step_s=0.2, max_num_seqs=2)
    requested = requests([f"row {i}" for i in range(20)])
    answers = []
    call = threading.Thread(target=lambda: answers.extend(supervisor.generate(requested)))
    call.start()
    while supervisor.open_rows_done() < 3:
        time.sleep(0.02)
    supervisor.interrupt()
    call.join(timeout=60)
    assert 3 <= len(answers) < 20
    for completion in answers:
        assert completion.token_ids == answer(requested[completion.row_id].prompt_token_ids, completion.row_id, 6)
    assert supervisor.generate(requested) == []


def test_a_row_is_not_blamed_for_one_death_while_it_was_alone(start, tmp_path):
    """A process may be killed from outside, by chance three times with the same row inside."""
    cured = tmp_path / "cured"
    supervisor = start(kill="row 0", cured_by=str(cured))
    requested, done = requests(["row 0", "row 1"]), []
    call = threading.Thread(target=lambda: done.extend(supervisor.generate(requested)))
    call.start()
    while supervisor.deaths().count < 3:  # in the first and second with row 1, in the third alone
        time.sleep(0.005)
    cured.touch()
    call.join(timeout=30)
    check(requested, done)
    assert supervisor.deaths().count == 3


@pytest.mark.parametrize("fault", ["kill", "crash"])
def test_the_row_that_ends_the_process_is_found_and_becomes_an_error_row(start, fault):
    supervisor = start(**{fault: "poison"})
    requested = requests([f"row {i}" + " poison" * (i == 5) for i in range(12)])
    check(requested, supervisor.generate(requested), failed={5})
    assert supervisor.deaths().count <= 7
    more = requests(["after"])
    check(more, supervisor.generate(more))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("crash", "RuntimeError: a fake step failed"), ("out_of_memory", "out of memory: MemoryError: fake")],
)
def test_an_engine_that_raised_is_never_used_again(start, tmp_path, fault, reason):
    """An error of a device stays with the process that had it."""
    supervisor = start(**{fault: "row 3"}, once=str(tmp_path / "once"))
    supervisor.generate(requests(["before"]))
    first = supervisor._child.process
    requested = requests([f"row {i}" for i in range(6)])
    check(requested, supervisor.generate(requested))
    assert first.poll() == 70
    assert supervisor._child.process.pid != first.pid
    assert supervisor.deaths().reasons == (f"exit code 70: {reason}",)


def test_a_hung_step_is_ended_its_stack_kept_and_its_row_found(start):
    supervisor = start(hang="poison", step_timeout_s=0.4)
    requested = requests(["fine", "poison", "fine too"])
    check(requested, supervisor.generate(requested), failed={1})
    reason = supervisor.deaths().reasons[0]
    assert reason.startswith("signal SIGKILL, by us: no step for 0.4 s (run.stall_timeout): File ")
    assert reason.endswith("in _maybe_fail")


def test_too_little_memory_to_load_is_the_environments_failure(start):
    supervisor = start(fail_load="MemoryError")
    with pytest.raises(EnvironmentFailed, match=r"not enough memory to load .*kv_cache_memory_bytes"):
        generate(supervisor, requests(["row"]))


def test_an_engine_that_always_dies_is_not_taken_for_bad_rows(start):
    supervisor = start(kill="row")
    with pytest.raises(EnvironmentFailed, match=r"rows in a row ended the engine's process .signal SIGKILL"):
        generate(supervisor, requests([f"row {i}" for i in range(8)]))


def test_more_memory_is_advised_only_if_it_may_be_short():
    for ended, is_short in [
        (Ended("signal SIGKILL", "", killed=True), True),
        (Ended("signal SIGKILL, by us: not loaded within 5 s", ""), False),
        (Ended("exit code 1", 'Traceback ...\n  File "a.py", line 1\nMemoryError'), True),
        (Ended("exit code 1", "...\ntorch.OutOfMemoryError: CUDA out of memory."), True),
        (Ended("signal SIGABRT", "terminate called ... what():  std::bad_alloc"), True),
        (Ended("signal SIGSEGV", 'Current thread (most recent call first):\n  File "a.py", line 3 in f'), False),
        (Ended("exit code 9", ""), False),
    ]:
        assert ended.advice() == (" Is there enough memory?" if is_short else ""), ended


def test_an_import_that_fails_is_not_taken_for_too_little_memory(start, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "queue.py").write_text("from random import nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path / "broken"))
    with pytest.raises(EnvironmentFailed, match=r"queue\.py, line 1: ImportError: cannot import") as raised:
        generate(start(), requests(["row"]))
    assert "enough memory" not in str(raised.value)


def test_a_load_that_reports_nothing_for_too_long_is_ended(start):
    supervisor = start(load_s=60, load_timeout_s=1.5)
    with pytest.raises(EnvironmentFailed, match=r"no message while loading for 1\.5 s \(run\.stall_timeout\)"):
        generate(supervisor, requests(["row"]))


def test_closing_ends_the_process_and_open_calls(start):
    supervisor = start(step_s=0.2)
    done = []
    thread = threading.Thread(target=lambda: done.extend(supervisor.generate(requests(["row"] * 100))))
    thread.start()
    time.sleep(1.0)
    process = supervisor._child.process
    supervisor.close()
    thread.join(timeout=60)
    assert len(done) < 100
    assert process.poll() is not None
    with pytest.raises(EnvironmentFailed, match=r"^The engine was closed\.$"):
        supervisor.raise_failure()


def running(supervisor, requested):
    """Start a call of `generate` in a thread; return it and the list that receives its completions."""
    answers = []
    call = threading.Thread(target=lambda: answers.extend(supervisor.generate(requested)))
    call.start()
    return call, answers


def test_after_a_drain_no_row_begins_and_those_that_run_finish_however_fast_rows_finish(start):
    """Rows that finish every few milliseconds leave the supervisor no pause in which it could notice a stop."""
    supervisor = start(step_s=0.002, max_num_seqs=4)
    requested = requests([f"row {i}" for i in range(4000)])
    call, answers = running(supervisor, requested)
    while supervisor.open_rows_done() < 20:
        time.sleep(0.005)
    before = supervisor.open_rows_done()
    supervisor.drain()
    began = time.monotonic()
    call.join(timeout=60)
    assert time.monotonic() - began < 3
    assert before <= len(answers) < 1000
    stats = supervisor.stats()
    assert computed(answers) == Computed(stats["prompt_tokens"], stats["generated_tokens"])  # all that began finished
    assert supervisor.generate(requested) == []


@pytest.mark.parametrize("end", ["interrupt", "close"])
def test_the_process_ends_soon_after_the_end_however_fast_rows_finish(start, end):
    supervisor = start(step_s=0.002, max_num_seqs=4)
    call, answers = running(supervisor, requests([f"row {i}" for i in range(20_000)]))
    while supervisor.open_rows_done() < 20:
        time.sleep(0.005)
    process, began = supervisor._child.process, time.monotonic()
    getattr(supervisor, end)()
    call.join(timeout=60)
    assert process.wait(timeout=60) is not None
    assert time.monotonic() - began < 3
    assert 20 <= len(answers) < 10_000


def test_a_process_that_dies_in_a_drain_is_not_replaced(start):
    supervisor = start(step_s=0.05, max_num_seqs=2, kill="last")
    call, answers = running(supervisor, requests([f"row {i}" for i in range(3)] + ["last"] + ["never"] * 50))
    while supervisor.open_rows_done() < 2:
        time.sleep(0.005)
    supervisor.drain()
    call.join(timeout=60)
    assert 2 <= len(answers) <= 4
    time.sleep(0.5)
    assert supervisor.deaths().count <= 1


def test_a_drain_while_the_model_loads_ends_the_calls(start):
    supervisor = start(load_s=30)
    call, answers = running(supervisor, requests(["row"]))
    time.sleep(0.3)
    supervisor.drain()
    call.join(timeout=5)
    assert not call.is_alive()
    assert answers == []


def test_finished_rows_survive_a_failure_of_the_engine(start):
    supervisor = start(step_s=0.02, max_num_seqs=1, unusable="row 5")
    done = supervisor.generate(requests([f"row {i}" for i in range(10)]))
    assert [completion.row_id for completion in done] == [0, 1, 2, 3, 4]
    assert supervisor.deaths().count == 0
    with pytest.raises(EngineUnusable, match=r"^a fake failure that no restart heals$"):
        supervisor.raise_failure()


def test_the_process_ends_when_its_parent_has_ended(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline.job.process.main", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    connection = Connection(ours.detach())
    connection.send(Start("tests.job.fake_engine:FakeEngine", EngineConfig(model=str(tmp_path))))
    assert [connection.recv().activity for _ in range(3)] == ["opening it", "reading weights", "warming up"]
    assert isinstance(connection.recv(), Ready)
    connection.close()
    assert process.wait(timeout=60) == 0
