"""Files that pages and help texts name exist, and those of help texts are in the wheel."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipeline.cli.main import cli
from tests.docs.pages import LOG, PAGES, ROOT, name

TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FOLDERS = sorted({path.partition("/")[0] for path in TRACKED if "/" in path and not path.startswith(".")})
NAMED = re.compile(rf"(?<![\w/.:$-])(?<!> )(?:{'|'.join(FOLDERS)})/[\w./-]*\w")


def helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the help text of a command and of all its subcommands, each on one line."""
    yield context.command_path, " ".join(command.get_help(context).split())
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            yield from helps(below, click.Context(below, parent=context, info_name=word))


def in_wheel() -> set[str]:
    """Return the files of the wheel: modules and package data."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    found = {path for path in TRACKED if path.startswith("pipeline/") and path.endswith(".py")}
    for package, patterns in data.items():
        folder = ROOT / package.replace(".", "/")
        found |= {path.relative_to(ROOT).as_posix() for pattern in patterns for path in folder.glob(pattern)}
    return found


def test_help_texts_name_files_that_the_wheel_has():
    shipped, texts = in_wheel(), dict(helps(cli, click.Context(cli, info_name="pipeline", **cli.context_settings)))
    assert len(texts) > len(cli.commands)
    wrong = {(command, path) for command, text in texts.items() for path in NAMED.findall(text) if path not in shipped}
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if LOG not in page.parents], ids=name)
def test_pages_name_existing_files(page: Path):
    text = page.read_text(encoding="utf-8")
    wrong = [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    assert not wrong
