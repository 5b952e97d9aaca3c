"""Command that prints JSON Schemas of job files and of records: schema."""

import click

from pipeline.cli.console import print_lines


@click.command()
@click.argument("kind", type=click.Choice(["job", "status", "run", "report"]), default="job")
def schema(kind: str) -> None:
    """Print the JSON Schema (draft 2020-12) of job files, for editors, or of a run's records.

    \b
    Examples:
      pipeline schema > job.schema.json
      pipeline schema report                     for _pipeline/report.json and `pipeline report --json`

    \b
    An editor with a YAML language server completes and explains keys if the job file begins with
      # yaml-language-server: $schema=job.schema.json

    The path is relative to the job file's folder. `pipeline validate` checks more: columns, folders and keys that must
    agree with each other. `schema_version` in a record names the version of its schema.
    """
    if kind == "job":
        from pipeline.config.schema import schema_text

        print_lines(schema_text())
    else:
        from pipeline.job.telemetry.record_schemas import record_schema_text

        print_lines(record_schema_text(kind))
