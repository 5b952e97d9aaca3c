"""Command that prints a shell completion script: completion."""

import click
from click.shell_completion import get_completion_class

from pipeline.cli.console import print_lines


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and values in a shell.

    \b
    Examples:
      pipeline completion bash > ~/.local/share/bash-completion/completions/pipeline
      pipeline completion zsh  > ~/.zfunc/_pipeline        with ~/.zfunc in fpath, before compinit
      pipeline completion fish > ~/.config/fish/completions/pipeline.fish

    For the current shell only: eval "$(pipeline completion bash)"
    """
    kind = get_completion_class(shell)
    assert kind is not None
    print_lines(kind(context.find_root().command, {}, "pipeline", "_PIPELINE_COMPLETE").source())
