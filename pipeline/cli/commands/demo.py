"""Command that writes the example job and its data: demo."""

from pathlib import Path

import click

from pipeline.cli.console import handle_errors, json_flag, print_json, print_result


@click.command()
@click.argument("folder", default="demo", type=click.Path())
@json_flag
@handle_errors
def demo(folder: str, as_json: bool) -> None:
    """Write an example job with its data into a new folder, to try the pipeline offline.

    \b
    Examples:
      pipeline demo
      pipeline run demo/summarize.yaml

    summarize.yaml summarizes 2,048 reports in data/ with the embedded model, without a GPU or a download. reviews.csv
    has 200 product reviews for a model of your own.
    """
    from pipeline.demo.example import job_in, write_reports, write_reviews
    from pipeline.errors import ConfigError
    from pipeline.starter import write_job

    root = Path(folder)
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{folder}: exists already and is not replaced; choose another folder: pipeline demo NAME")
    reports = write_reports(root / "data")
    write_reviews(root / "reviews.csv")
    write_job(f"{folder}/summarize.yaml", job_in(folder))
    if as_json:
        return print_json({"job": f"{folder}/summarize.yaml", "data": [*map(str, reports), f"{folder}/reviews.csv"]})
    print_result(f"Wrote {folder}/summarize.yaml, {folder}/data and {folder}/reviews.csv. Next:")
    print_result(f"  pipeline run {folder}/summarize.yaml")
    print_result("  python -m pipeline.demo.check out/summarize    # compares every summary with its report")
    question = "What is the sentiment of this review, positive or negative? Review: {text}"
    print_result(f'  pipeline run {folder}/reviews.csv --prompt "{question}" \\')
    print_result("      --labels positive,negative --model Qwen/Qwen3-4B    # or another model")
