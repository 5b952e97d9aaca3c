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
# Jobs use processes, signals and exit codes; the other commands run in this process and save an import of torch.
IN_A_PROCESS = ("run",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folder in which the commands run; later pages see the files of earlier ones."""
    folder = tmp_path_factory.mktemp("typed")
    for link in ("jobs", "configs", "pipeline", "tests", "tools"):
        (folder / link).symlink_to(ROOT / link)
    programs = folder / "bin"
    programs.mkdir()
    for program, call in {"pipeline": "-m pipeline", "python": ""}.items():
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        (programs / program).chmod(0o755)
    return folder


def typed(folder: Path, command: str) -> str:
    """Run a command, which must exit with 0, and return its output."""
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, shell=True, cwd=folder, env={**os.environ, **variables}, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
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
def test_commands_print_the_shown_lines(block: Block, folder: Path, pipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    for command, shown in sessions(block):
        program, *arguments = shlex.split(command)
        if program == "pipeline" and arguments[0] not in IN_A_PROCESS:
            code, *streams = pipe(*arguments)
            printed = "".join(streams)
            assert code == 0, f"{command}\n{printed[-4000:]}"
        else:
            printed = typed(folder, command)
        assert not [line for line in shown if line not in printed], printed


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block: Block, folder: Path):
    script = folder / "example.py"
    script.write_text(block.text, encoding="utf-8")
    typed(folder, "python example.py")


def test_the_notebook_runs(folder: Path):
    cells = json.loads((ROOT / "docs" / "python.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (folder / "notebook.py").write_text("\n\n".join(code), encoding="utf-8")
    assert "20 rows, 0 errors" in typed(folder, "python notebook.py")


def test_drafts_change_no_text(folder: Path):
    """The two outputs of docs/speculation.md are equal."""
    import pyarrow.parquet as pq

    def texts(output: str) -> list[dict]:
        table = pq.read_table(folder / "out" / output, columns=["report_id", "generated_text"])
        return table.sort_by("report_id").to_pylist()

    assert texts("try") == texts("plain")


def test_each_user_page_has_an_example_that_runs():
    with_example = {name(block.page) for block in CONSOLE}
    for page in ("job-file", "output", "guarantees", "models", "speculation", "gpu", "clusters", "cookbook"):
        assert f"docs/{page}.md" in with_example
