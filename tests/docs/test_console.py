"""Every `console` block of the pages runs, in a folder with the repository's jobs and presets; each command prints the
lines that the page shows below it."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks, name

CONSOLE = blocks("console")
PYTHON = blocks("python")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which the commands run; later pages see the files of earlier ones."""
    folder = tmp_path_factory.mktemp("typed")
    for link in ("jobs", "configs", "pipeline", "tests", "tools"):
        (folder / link).symlink_to(ROOT / link)
    return folder


@pytest.fixture
def folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to the folder; child processes find this Python and the repository's modules."""
    monkeypatch.chdir(shared)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return shared


def typed(command: str) -> str:
    """Run a command, which must exit with 0, and return its output."""
    ended = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ended.returncode == 0, f"{command}\n{ended.stdout[-4000:]}"
    return ended.stdout


def sessions(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a block with the lines that are shown below it."""
    command, shown = "", []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        elif line.strip() and line.strip() != "...":
            shown.append(line.strip())
    yield command, shown


@pytest.mark.parametrize("block", CONSOLE, ids=str)
@pytest.mark.usefixtures("folder", "engines_in_threads")
def test_commands_print_the_shown_lines(block: Block, pipe):
    """Commands of this package and their engines run in this process, which saves imports of torch."""
    for command, shown in sessions(block):
        program, *arguments = shlex.split(command)
        if program == "pipeline":
            code, *streams = pipe(*arguments)
            printed = "".join(streams)
            assert code == 0, f"{command}\n{printed[-4000:]}"
        else:
            printed = typed(command)
        assert not [line for line in shown if line not in printed], printed


def run_script(text: str) -> None:
    exec(compile(text, "example", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", PYTHON, ids=str)
@pytest.mark.usefixtures("folder", "engines_in_threads")
def test_python_runs(block: Block):
    run_script(block.text)


@pytest.mark.usefixtures("folder", "engines_in_threads")
def test_the_notebook_runs(capsys: pytest.CaptureFixture):
    cells = json.loads((ROOT / "docs" / "python.ipynb").read_text(encoding="utf-8"))["cells"]
    run_script("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    assert "20 rows, 0 errors" in capsys.readouterr().out


def test_drafts_change_no_text(shared: Path):
    """The two outputs of docs/speculation.md are equal."""
    import pyarrow.parquet as pq

    def texts(output: str) -> list[dict]:
        table = pq.read_table(shared / "out" / output, columns=["report_id", "generated_text"])
        return table.sort_by("report_id").to_pylist()

    assert texts("try") == texts("plain")


def test_each_user_page_has_an_example_that_runs():
    with_example = {name(block.page) for block in CONSOLE}
    for page in ("job-file", "output", "guarantees", "models", "speculation", "gpu", "clusters", "cookbook"):
        assert f"docs/{page}.md" in with_example
