"""A session: in which order, while the budget lasts, and all of it once on a machine with nothing but torch."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pipeline.bench.gpu import variants
from pipeline.bench.gpu.session import plan, run
from pipeline.bench.gpu.session.plan import Stage, follow_up_plan, main_plan, only
from pipeline.bench.gpu.session.request import SessionRequest, parse_budget
from pipeline.bench.gpu.session.run import run_session
from pipeline.bench.gpu.task import Setting, Task
from pipeline.errors import ConfigError, OutputError

ROOT = Path(__file__).parents[4]
ABSENT = ("ray", "pydantic", "click", "pyarrow", "pandas", "s3fs", "boto3", "rich", "accelerate", "numba")
BARE = f"""
import runpy, socket, sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # as where it is not installed
def refuse(*_):
    raise OSError("no network here")
socket.socket.connect = refuse
runpy.run_module("pipeline.bench.gpu.session", run_name="__main__", alter_sys=True)
"""


def names(stages):
    return [[task.name for task in stage.tasks] for stage in stages]


def test_what_is_worth_most_comes_first():
    stages = main_plan(("large", "small"), [("vllm", "python")], False)
    first = [tasks[0] for tasks in names(stages)]
    assert first == [
        "machine", "checks-1-of-12", "steps-large", "jobs-large", "linears-large", "kernels-large", "steps-small",
        "jobs-small", "jobs-small-variant-5", "jobs-small-variant-6", "jobs-small-variant-1", "jobs-small-variant-2",
        "tiles-large", "checks-float16-1-of-12", "deterministic-1-of-12", "jobs-large-variant-2",
        "jobs-large-variant-3", "peers-large",
    ]  # fmt: skip
    side_by_side = names(stages)[1]
    assert len(side_by_side) == 12 + 2
    assert side_by_side[-2:] == ["checkpoint-large", "checkpoint-small"]
    every = [task.name for stage in stages for task in stage.tasks]
    assert len(every) == len(set(every)), "files are named by tasks"
    timed = [stage for stage in stages if any(task.section != "correctness" for task in stage.tasks)]
    assert all(len(stage.tasks) == 1 for stage in timed[2:]), "nothing runs beside what is timed"
    assert sum(max(task.limit_s for task in stage.tasks) for stage in stages[:4]) < 600
    assert set(plan.LARGE_VARIANTS) | set(plan.SMALL_VARIANTS) <= set(variants.VARIANTS)


def test_the_second_session_looks_closer():
    first = [tasks[0] for tasks in names(follow_up_plan(("large",), False))]
    assert first[:6] == ["machine", *(f"compute-sanitizer-{k}" for k in ("int4", "decode", "cascade")), "ncu-int4",
                         "ncu-decode"]  # fmt: skip


def test_some_sections_alone():
    stages = main_plan(("large", "small"), [], False)
    assert names(only(stages, ["steps"])) == [["machine"], ["steps-large"], ["steps-small"]]
    assert names(only(stages, ["steps-small", "jobs-large"])) == [["machine"], ["jobs-large"], ["steps-small"]]
    with pytest.raises(ConfigError, match=r"--sections speed: expected some of .*steps"):
        only(stages, ["speed"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("600", 600), ("10m", 600), ("9m40s", 580), ("90 s", 90), ("2 min", 120)]
)
def test_a_budget_is_a_time(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "1h"])
def test_a_budget_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"--budget .*: expected a time"):
        parse_budget(text)


@pytest.fixture
def sections(monkeypatch):
    """Sections that take as long as they are told to."""
    module = ModuleType("takes")

    def takes(result, seconds, size=0, trace=0):
        result.keep(f"took {seconds}", model="tiny", noise=os.urandom(size).hex())
        if trace:
            (result.setting.traces / f"{result.task.name}.json.gz").write_bytes(os.urandom(trace))
        time.sleep(seconds)

    module.run = takes
    monkeypatch.setitem(sys.modules, "pipeline.bench.gpu.sections.takes", module)


def stage(name, least_s=0.0, limit_s=30.0, **options):
    return Stage((Task(name, "takes", limit_s, options),), least_s)


def test_what_the_budget_has_no_time_for_does_not_start(sections, tmp_path):
    said = []
    stages = [stage("one", seconds=0), stage("slow", seconds=60), stage("long", 50, seconds=0), stage("two", seconds=0)]
    began = time.monotonic()
    told = run_session(
        stages, Setting(str(tmp_path / "work"), "cpu", is_smoke=True), tmp_path / "out", 3.0, say=said.append
    )
    assert time.monotonic() - began < 3.0 + 3
    verdicts = {outcome.name: outcome.verdict for outcome in told.outcomes}
    assert verdicts == {"one": "done", "slow": "ended", "long": "not started", "two": "not started"}
    assert "50 are needed" in told.outcomes[2].why
    assert told.complete
    assert told.failed, "a section was ended"
    text = (tmp_path / "out" / "report.txt").read_text()
    assert "=== one\ntook 0" in text
    assert "=== slow\ntook 60" in text, "what it had kept"
    assert "not started" in text
    assert any("not started: long" in line for line in said)


def test_a_session_that_is_cut_off_has_packed_what_it_had(sections, tmp_path, monkeypatch):
    """After each stage; here the second is never started."""
    real, stopped = run.run_side_by_side, []

    def stops(tasks, *others):
        if stopped:
            os._exit(9) if os.getpid() != stopped[0] else None
            raise KeyboardInterrupt
        stopped.append(os.getpid())
        return real(tasks, *others)

    monkeypatch.setattr(run, "run_side_by_side", stops)
    with pytest.raises(KeyboardInterrupt):
        run_session(
            [stage("one", seconds=0, trace=500), stage("two", seconds=0)],
            Setting(str(tmp_path / "work"), "cpu", is_smoke=True),
            tmp_path / "out",
            20.0,
        )
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as tar:
        assert {"results/one.json", "results/one.log", "results/report.json"} <= set(tar.getnames())
        told = json.load(tar.extractfile("results/report.json"))
    assert not told["complete"]
    assert [outcome["name"] for outcome in told["outcomes"]] == ["one"]
    with tarfile.open(tmp_path / "out" / "traces.tar.gz") as tar:
        assert tar.getnames() == ["traces/one.json.gz"]


def test_archives_stay_below_their_limit_and_say_what_they_lack(sections, tmp_path):
    stages = [stage(f"noise-{number}", seconds=0, size=20_000, trace=30_000) for number in range(4)]
    setting = Setting(str(tmp_path / "work"), "cpu", is_smoke=True)
    told = run_session(stages, setting, tmp_path / "out", 30.0, max_bytes=70_000)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert set(sizes) == {"report.txt", "results.tar.gz", "results-2.tar.gz", "traces.tar.gz", "traces-2.tar.gz"}
    assert max(sizes.values()) <= 70_000
    assert not told.left_out
    small = run_session(stages, setting, tmp_path / "out", 30.0, max_bytes=40_000)
    assert {name for name in small.left_out if name.endswith(".gz")} == {"noise-0.json.gz", "noise-1.json.gz"}
    assert "No room in the archives" in small.to_text()


def test_what_makes_no_sense_is_refused(tmp_path):
    def request(**options):
        return SessionRequest(10.0, str(tmp_path / "out"), **{"device": "cpu", "is_smoke": True} | options)

    with pytest.raises(ConfigError, match="only with --smoke"):
        request(is_smoke=False).run(print)
    with pytest.raises(ConfigError, match="--peer openvino: expected one of vllm"):
        request(peers=("openvino=/bin/true",)).run(print)
    with pytest.raises(ConfigError, match=r"--work .*lies in --output"):
        request(work=str(tmp_path / "out" / "work")).run(print)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        run_session([], Setting(str(tmp_path / "work"), "cpu", is_smoke=True), tmp_path / "file" / "out", 5.0)


def test_without_a_card_it_says_so(pipe, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    out = tmp_path / "out"
    code, stdout, stderr = pipe("bench", "gpu", "--output", str(out), "--work", str(tmp_path / "work"))
    assert (code, stdout) == (2, "")
    assert "needs an NVIDIA GPU" in stderr
    assert not out.exists()
    code, stdout, _ = pipe("bench", "gpu", "--json", "--output", str(out))
    assert json.loads(stdout)["error"]["kind"] == "ConfigError"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A whole session in a process that has neither Ray nor pydantic nor click nor a network."""
    place = tmp_path_factory.mktemp("smoke")
    options = ["--device", "cpu", "--smoke", "--budget", "240", "--folder", str(place / "models")]
    options += ["--output", str(place / "out"), "--work", str(place / "work")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", BARE, *options], capture_output=True, text=True, cwd=place, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return place, ran


def test_every_section_runs_on_a_bare_machine(smoke):
    place, ran = smoke
    told = json.loads((place / "work" / "results" / "report.json").read_text())
    assert told["complete"]
    assert {outcome["verdict"] for outcome in told["outcomes"]} == {"done"}
    planned = [task.name for stage in main_plan(plan.SMOKE_MODELS, [], True) for task in stage.tasks]
    assert [outcome["name"] for outcome in told["outcomes"]] == planned
    assert told["correctness"]["checks"] > 20
    assert not told["correctness"]["failed"]
    assert not told["on_card"]
    assert {aim["verdict"] for aim in told["aims"]} <= {"met", "missed", "not measured"}
    aims = {aim["name"]: aim for aim in told["aims"] if aim["model"] == "tiny-awq"}
    assert len(aims) == 11
    assert aims["linears as served"]["measured"] > 0
    assert aims["idle time of the card while decoding"]["about"] == "there was no card to trace"
    assert "vLLM took no part" in aims["the set generation against vLLM"]["about"]
    assert "this set was not asked for" in aims["the set mixed against vLLM"]["about"]
    assert "\nAims. Run on a processor" in ran.stdout
    assert {path.name for path in (place / "out").iterdir()} == {"report.txt", "results.tar.gz"}


def test_sections_keep_what_others_compute_with(smoke):
    results = smoke[0] / "work" / "results"

    def figures(task):
        return json.loads((results / f"{task}.json").read_text())["figures"]

    assert figures("machine")["rates"]["copy_bytes_per_s"] > 0
    steps = figures("steps-tiny-awq")
    assert [step["rows"] for step in steps["steps"]] == [2, 1]
    assert all(step["wall_s"] > 0 < step["mixed_s"] for step in steps["steps"])
    assert "reading weights" in steps["loading_s"]
    assert [job["requests"] for job in figures("jobs-tiny-awq")["jobs"]["jobs"]] == list(plan.SETS)
    assert all(0 < job["bound_s"] <= job["predicted_s"] for job in figures("jobs-tiny-awq")["jobs"]["jobs"])
    assert figures("jobs-tiny-variant-5")["variant"] == plan.SMALL_VARIANTS[0]
    kernels = {time["kernel"] for time in figures("kernels-tiny-awq")["kernels"]["times"]}
    assert {"attention", "attention, fp8", "sample", "greedy"} <= kernels
    linears = figures("linears-tiny-awq")["linears"]["times"]
    assert {time["path"] for time in linears} == {"16 bit", "fp8", "served"}
    assert figures("checks-1-of-24")["tests"], "tests/gpu took part"
    checked = {check["kernel"] for check in figures("checks-1-of-24")["checks"]}
    assert {"engine", "linear"} <= checked
