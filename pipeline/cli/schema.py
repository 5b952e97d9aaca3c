"""The command that prints the job file's JSON Schema: schema."""

import click

from pipeline.cli.console import print_lines


@click.command()
def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of job files, for editors.

    \b
    Examples:
      pipeline schema > job.schema.json

    \b
    An editor with a YAML language server then completes and explains keys, where the job file begins with
      # yaml-language-server: $schema=job.schema.json

    The path is from the job file's own folder. `pipeline validate` sees more: columns, folders and keys that must
    agree with each other.
    """
    from pipeline.config.schema import schema_text

    print_lines(schema_text())
