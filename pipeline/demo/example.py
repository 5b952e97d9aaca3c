"""The example: generated reports that are not in the training data of the embedded models, support tickets, and the job
that summarizes the reports. `pipeline demo` writes them where there is no clone."""

import csv
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.demo.reports import make_report

JOB = Path(__file__).with_name("summarize.yaml")
NUM_FILES = 4
ROW_GROUPS_PER_FILE = 4
ROWS_PER_GROUP = 128
NUM_REPORTS = NUM_FILES * ROW_GROUPS_PER_FILE * ROWS_PER_GROUP
SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("report_id", "report")])
NUM_TICKETS = 200
_SUBJECTS = ("the March invoice", "my last order", "the mobile app", "the export button", "our team account",
             "the yearly plan", "the login page", "two-factor login", "the search box", "the API key")  # fmt: skip
_TICKETS = (
    "I was charged twice for {}. Please refund one payment.",
    "Why does {} cost more than on your price page?",
    "Since the update {} shows an error and nothing happens.",
    "{} crashes as soon as I open it on my phone.",
    "How do I change the settings of {}?",
    "Where can I find the documentation for {}?",
    "Thank you, {} works perfectly again!",
)


def report_table(first: int, num_reports: int) -> pa.Table:
    """Return `num_reports` reports of the job's split, from number `first`."""
    reports = [make_report("job", index) for index in range(first, first + num_reports)]
    columns = {"report_id": [r.report_id for r in reports], "report": [r.text for r in reports]}
    return pa.table(columns, schema=SCHEMA)


def write_reports(folder: Path) -> list[Path]:
    """Write all reports into `folder`: several files of several row groups, with short and long reports in each. Return
    their paths. Rows, files and row groups are deterministic."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    rows_per_file = ROW_GROUPS_PER_FILE * ROWS_PER_GROUP
    for number in range(NUM_FILES):
        path = folder / f"reports-{number:02d}.parquet"
        table = report_table(number * rows_per_file, rows_per_file)
        pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_GROUP, write_page_checksum=True)
        paths.append(path)
    return paths


def write_tickets(path: Path) -> None:
    """Write support tickets as CSV, for any model that follows instructions."""
    draw = Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["ticket_id", "text"])
        for number in range(NUM_TICKETS):
            text = draw.choice(_TICKETS).format(draw.choice(_SUBJECTS))
            rows.writerow([f"T-{number:04d}", text[0].upper() + text[1:]])


def job_in(folder: str) -> str:
    """Return the job file with its paths below `folder`."""
    text = JOB.read_text(encoding="utf-8")
    return text.replace("jobs/data", f"{folder}/data").replace("jobs/summarize.yaml", f"{folder}/summarize.yaml")
