"""The command that prints JSON Schemas, of job files and of what runs leave: schema."""

import click

from pipeline.cli.console import print_lines


@click.command()
@click.argument("of", type=click.Choice(["job", "status", "run", "report"]), default="job")
def schema(of: str) -> None:
    """Print the JSON Schema (draft 2020-12) of job files, for editors, or of a record that runs leave.

    \b
    Examples:
      pipeline schema > job.schema.json
      pipeline schema report                     of _pipeline/report.json, and of `pipeline report --json`

    \b
    An editor with a YAML language server then completes and explains keys, where the job file begins with
      # yaml-language-server: $schema=job.schema.json

    The path is from the job file's own folder. `pipeline validate` sees more: columns, folders and keys that must
    agree with each other. Records say with `schema_version` which schema they have.
    """
    if of == "job":
        from pipeline.config.schema import schema_text

        print_lines(schema_text())
    else:
        from pipeline.job.telemetry.record_schemas import record_schema_text

        print_lines(record_schema_text(of))
