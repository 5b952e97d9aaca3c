"""Tasks of a session: each has its limit, its log and its end, whatever it does."""

import os
import signal
import subprocess
import sys
import time
from types import ModuleType

import pytest

from pipeline.bench.gpu.result import read_results
from pipeline.bench.gpu.session.processes import asked_apart, run_side_by_side
from pipeline.bench.gpu.task import Setting, Task

SECTIONS = "pipeline.bench.gpu.sections"


def works(result, value):
    print("working")
    result.keep(f"value {value}", value=value, folder=os.environ["WHERE"])


def fails(result):
    result.keep("before")
    raise ValueError("not this one")


def hangs(result, deaf=False):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    result.keep("still there", child=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    time.sleep(60)


def dies(result):
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    for section in (works, fails, hangs, dies):
        module = ModuleType(section.__name__)
        module.run = section
        monkeypatch.setitem(sys.modules, f"{SECTIONS}.{section.__name__}", module)
    there = Setting(str(tmp_path))
    there.results.mkdir()
    return there


def run(setting, *tasks, left_s=lambda: 60.0):
    began = time.monotonic()
    outcomes = run_side_by_side(tasks, setting, {"WHERE": "here"}, left_s, began)
    return {outcome.name: outcome for outcome in outcomes}, time.monotonic() - began


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_that_fails_hangs_or_dies_costs_only_itself(setting):
    tasks = (
        Task("good", "works", 30, {"value": 3}),
        Task("bad", "fails", 30),
        Task("stuck", "hangs", 1.0),
        Task("dead", "dies", 30),
        Task("unknown", "no_such_section", 30),
    )
    outcomes, took_s = run(setting, *tasks)
    assert took_s < 10
    assert {name: outcome.verdict for name, outcome in outcomes.items()} == {
        "good": "done", "bad": "failed", "stuck": "ended", "dead": "failed", "unknown": "failed",
    }  # fmt: skip
    assert outcomes["dead"].why.startswith("left with -11: ")
    assert "at its limit of 1 s" in outcomes["stuck"].why
    assert 1.0 <= outcomes["stuck"].seconds < 6
    found = read_results(setting.results)
    assert found["good"].figures == {"value": 3, "folder": "here"}
    assert found["bad"].failures == ("bad: ValueError: not this one",)
    assert found["bad"].text == "before"
    assert found["stuck"].text == "still there"
    assert not is_alive(found["stuck"].figures["child"]), "what a task started ends with it"
    assert (setting.results / "good.log").read_text() == "working\n"
    assert "in hangs" in (setting.results / "stuck.log").read_text(), "where it stood"


def test_one_that_hears_nothing_is_killed(setting):
    outcomes, took_s = run(setting, Task("deaf", "hangs", 0.5, {"deaf": True}))
    assert outcomes["deaf"].verdict == "ended"
    assert 2.0 < took_s < 8
    assert "did not go on SIGKILL" not in outcomes["deaf"].why
    assert not is_alive(read_results(setting.results)["deaf"].figures["child"])


def test_the_budgets_end_is_everybodys(setting):
    began = time.monotonic()
    outcomes, _ = run(setting, Task("stuck", "hangs", 50), left_s=lambda: 0.7 - (time.monotonic() - began))
    assert "at the budget's end" in outcomes["stuck"].why


def test_those_that_run_end_when_the_session_is_stopped(setting):
    calls = []

    def left_s():
        calls.append(1)
        if (setting.results / "stuck.json").exists() and "child" in (setting.results / "stuck.json").read_text():
            raise KeyboardInterrupt
        return 30.0

    with pytest.raises(KeyboardInterrupt):
        run(setting, Task("stuck", "hangs", 50), left_s=left_s)
    assert not is_alive(read_results(setting.results)["stuck"].figures["child"])


def test_a_question_is_answered_by_another_process():
    assert asked_apart(lambda: str(os.getpid())) != str(os.getpid())
    assert asked_apart(lambda: "") == ""
