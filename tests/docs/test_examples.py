"""Examples of the pages are valid: job files, parts of them, commands with their options, Python."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from pipeline.cli.main import cli
from pipeline.config import load_job
from tests.docs.pages import LOG, PAGES, ROOT, Block, blocks, commands, name, prose

MINIMAL = {"input": {"path": "a"}, "prompt": {"column": "text"}, "model": {"path": "demo"}, "output": {"path": "b"}}
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
YAML = [block for block in blocks("yaml") if yaml.safe_load(block.text) is not None]
SHELL = [block for block in blocks("sh", "console") if LOG not in block.page.parents]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_is_a_job_file_or_sections_of_one(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("API_KEY", "secret")
    job = tmp_path / "job.yaml"
    if set(MINIMAL) <= set(yaml.safe_load(block.text)):
        job.write_text(block.text, encoding="utf-8")
    else:
        given = MINIMAL | yaml.safe_load(block.text)
        if given["input"].get("format") == "openai":  # its lines are the prompts
            del given["prompt"]
        job.write_text(yaml.safe_dump(given), encoding="utf-8")
    load_job(str(job))


def check_command(words: list[str]) -> None:
    """Raise click.UsageError if a `pipeline` command or one of its options does not exist."""
    command: Any = cli
    above = click.Context(cli, **cli.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command, name = command.get_command(above, words[0]), words[0]
        if command is None:
            raise click.UsageError(f"no command {name}")
        words = words[1:]
    if "--help" not in words and "--version" not in words and not isinstance(command, click.Group):
        command.make_context(command.name, [word for word in words if word != "..."], parent=above)


def ours(command: str) -> list[str] | None:
    """Return the arguments of a `pipeline` command, or None for another command."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    words = words[: next((i for i, word in enumerate(words) if word in (">", "|")), None)]
    return words[1:] if words and words[0] in ("pipeline", ".venv/bin/pipeline") else None


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_in_blocks_are_known_with_their_options(block: Block):
    for command in commands(block):
        if (words := ours(command)) is not None:
            check_command(words)


@pytest.mark.parametrize("page", [page for page in PAGES if LOG not in page.parents], ids=name)
def test_commands_in_sentences_are_known_with_their_options(page: Path):
    for span in re.findall(r"`((?:pipeline|python -m) [^`\n]+)`", prose(page)):
        if span.startswith("pipeline "):
            # A sentence may leave out arguments.
            try:
                check_command(ours(span) or [])
            except click.MissingParameter:
                continue
        else:
            module = shlex.split(span)[2].replace(".", "/")
            assert (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir() or module == "pytest", span


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_commands_in_job_files_are_known_with_their_options(job: Path):
    for line in re.findall(r"^#   (pipeline .+)$", job.read_text(encoding="utf-8"), re.MULTILINE):
        check_command(shlex.split(re.split(r" {3,}", line)[0])[1:])


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_the_jobs_of_the_cookbook_validate_unchanged(job: Path, pipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    name = f"jobs/{job.name}"
    assert f"(../{name})" in (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
    code, out, err = pipe("validate", name)
    assert (code, err) == (0, "")
    assert "First prompt" in out
