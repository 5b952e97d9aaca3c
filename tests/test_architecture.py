"""`docs/architecture.md` is true: its folders, its files, its three paths, and where families are named."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

from pipeline import Engine, EngineConfig, SamplingParams
from pipeline.engine.speculation.measured_drafts import MeasuredDrafts
from pipeline.model.config_values import WRAPPERS
from pipeline.model.families import FAMILIES
from tests.engine.ahead import run_ahead

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
PAGE = ROOT / "docs" / "architecture.md"


def test_the_page_is_short_and_names_every_folder_and_no_other_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 200
    named = set(re.findall(r"`([\w/]+)/`", page.partition("## Folders")[2]))
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/**/*.py")}
    missing = [name for name in packages if not any(name == one or name.startswith(f"{one}/") for one in named)]
    parents = {one.rpartition("/")[0] for one in named}
    assert not set(missing) - parents
    named |= set(re.findall(r"`([\w/]+\.py)`", page))
    assert not [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()]


def test_only_the_model_folder_names_families() -> None:
    """Benchmarks may: they make checkpoints of a family, and convert them for other engines. So does the reader of GGUF
    headers, which makes a config.json of them."""
    family = re.compile(rf'"(?:{"|".join({*FAMILIES, *WRAPPERS})})"')
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "model" and path.name != "gguf_folder.py"
        for name in family.findall(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def files_of_a_token(ahead: bool = False, **options: object) -> set[str]:
    """Return the files of `pipeline/` whose functions run during `Engine.generate`, with compiled kernels as one.
    `ahead`: schedule one step ahead of the tokens, as for a GPU. The policy turns drafts on itself: all steps take the
    same time on its fake clock, and three earlier rows made drafts win."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            name = frame.f_code.co_filename.removeprefix(f"{PACKAGE}/")
            is_kernel = name.startswith(("kernels/", "engine/drafts/lookup/compiled"))
            found.add("kernels/" if is_kernel else name)

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    report = "The pump was replaced on Monday. The pump was replaced on Monday. The pump was"
    with Engine(EngineConfig("demo", max_num_seqs=2, num_threads=1, **options)) as engine:  # type: ignore[arg-type]
        engine.warm_up()
        if engine.spec_decoder is not None:
            engine.spec_decoder.policy = MeasuredDrafts(6, clock=lambda: 10**6 * engine.stats.num_steps)
            engine.generate([report] * 3, SamplingParams(max_tokens=96, ignore_eos=True))
            assert engine.stats.num_draft_steps > 10
        if ahead:
            run_ahead(engine)
        sys.setprofile(note)
        try:
            engine.generate([report], params)
        finally:
            sys.setprofile(None)
    return found


def test_the_listed_paths_of_a_token_are_true() -> None:
    """Each other path lists only the files that it adds to the plain one."""
    page = PAGE.read_text(encoding="utf-8")
    plain: set[str] = set()
    for heading, options in (
        ("Without drafts", {"speculation": "off"}),
        ("With drafts", {"speculation": "auto"}),
        ("One step ahead", {"speculation": "off", "ahead": True}),
    ):
        listed = re.search(rf"\*\*{heading}\*\*(.*?)\n\n", page, re.DOTALL)
        assert listed is not None
        ran = files_of_a_token(**options)  # type: ignore[arg-type]
        assert set(re.findall(r"`([\w/]+(?:\.py|/))`", listed[1])) - {"engine/sampling/"} == ran - plain, heading
        plain = plain or ran


# `sitecustomize` of every process of a run: append the file of each function of the package that is called first.
TRACE = """
import os, sys, threading

log = os.open(os.environ["TRACE_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
package, seen = os.environ["TRACED_PACKAGE"], set()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in seen:
        seen.add(code)
        if code.co_flags & 1 and code.co_filename.startswith(package):  # 1: a function, not the body of a class
            os.write(log, f"{code.co_filename[len(package) + 1:]}\\n".encode())

sys.setprofile(note)
threading.setprofile(note)
"""
JOB = """
input: {path: jobs/data, limit: 4}
prompt: {column: report}
model: {path: model}
output: {path: out}
"""
DECLARATIONS = {"job/process/messages.py", "errors.py"}
OTHER_PROCESS = {"job/process/main.py"}  # runs at the same time as the rest
OTHER_JOBS = {"job/dataflow/graph.py", "job/actor/endpoint_rows.py", "endpoint/engine.py"}  # Ray, and a server


@pytest.fixture(scope="module")
def files_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the files whose functions ran during `pipeline run` with a fake engine, in the order of each function's
    first call in each process."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "sitecustomize.py").write_text(TRACE)
    (folder / "job.yaml").write_text(JOB)
    (folder / "jobs").symlink_to(ROOT / "jobs")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"seconds_per_step": 0}')
    (folder / "model" / "tokenizer.json").write_text("{}")
    log = folder / "trace"
    traced = {"PYTHONPATH": f"{folder}:{ROOT}", "TRACE_LOG": str(log), "TRACED_PACKAGE": str(PACKAGE)}
    command = [sys.executable, "-m", "tests.faults.driver", "run", "job.yaml"]
    subprocess.run(command, cwd=folder, env=os.environ | traced, check=True, capture_output=True, timeout=240)
    return log.read_text().splitlines()


@pytest.mark.parametrize("path", ["row", "command"])
def test_the_listed_paths_of_a_row_and_a_command_are_true(files_of_a_run: list[str], path: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"## Path of a {path}\n")[2].partition("\n## ")[0]
    listed = [name for name in re.findall(r"`([\w/]+\.py)`", section) if name not in DECLARATIONS]
    assert len(listed) > 10
    assert {*listed} - {*files_of_a_run} <= OTHER_JOBS
    rest = iter(files_of_a_run)
    for name in listed:
        assert name in OTHER_JOBS | OTHER_PROCESS or name in rest, f"{name} runs earlier than the page says"
