"""Options: consistent names, headings in long help texts, completion."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli


def commands(group: click.Group = cli):
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else (command,)


def test_every_command_writes_to_output():
    options = [option for command in commands() for option in command.params]
    forms = [option for option in options if isinstance(option.type, click.Choice)]  # `convert --to` names a form
    names = {name for option in options if option not in forms for name in option.opts}
    assert "--output" in names
    assert not {"--out", "--to", "--out-dir", "--output-path"} & names


def test_the_options_of_generate_have_headings(pipe):
    out = pipe("generate", "--help")[1]
    headings = [line.rstrip(":") for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Prompts", "Output", "Model", "Sampling", "Form", "Other"]
    options = {name for option in cli.commands["generate"].params for name in option.opts if name.startswith("--")}
    assert all(name in out for name in options)
    assert [len(line) for line in out.splitlines() if len(line) > 100] == []
    assert out.index("Sampling:") < out.index("--temperature") < out.index("Other:") < out.rindex("--json")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(pipe, shell):
    code, out, _ = pipe("completion", shell)
    assert code == 0
    assert f"_PIPELINE_COMPLETE={shell}_complete" in out


def test_a_shell_completes_commands_options_and_values():
    script = Path(sys.executable).with_name("pipeline")
    source = subprocess.run([script, "completion", "bash"], capture_output=True, text=True, timeout=60, check=True)
    env = os.environ | {"PATH": f"{script.parent}:{os.environ['PATH']}"}
    values = {"stat": "status", "generate --temp": "--temperature", "generate --dtype bf": "bfloat16"}
    for words, expected in values.items():
        lines = f"{source.stdout}\nCOMP_WORDS=(pipeline {words}); COMP_CWORD={len(words.split())}\n"
        lines += '_pipeline_completion pipeline; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, timeout=60, check=True, env=env)
        assert done.stdout.split() == [expected], done.stderr


def test_help_cuts_no_sentence_of_a_command():
    listed = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert "..." not in listed.partition("Commands:")[2]
    assert "Write the Kubernetes manifests of a job: a Ray cluster of its own, once or on a schedule." in " ".join(
        listed.split()
    )
