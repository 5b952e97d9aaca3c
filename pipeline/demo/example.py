"""The example: generated reports that are not in the training data of the embedded models, product reviews, and the job
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
SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("report_id", "report")])
_PRODUCTS = ("This phone", "The kettle", "My new lamp", "The backpack", "This blender", "The tent", "Our printer",
             "The headset", "This jacket", "The keyboard")  # fmt: skip
_OPINIONS = {
    5: (
        "works perfectly and I love it.",
        "is the best I have ever bought.",
        "arrived early and looks beautiful.",
        "is worth every cent, highly recommended.",
        "exceeded my expectations in every way.",
        "makes me happy each time I use it.",
        "is sturdy, quiet and easy to clean.",
        "was a great gift, my sister adores it.",
        "feels wonderful and lasts all day.",
        "solved my problem at once, thank you!",
    ),
    1: (
        "broke after two days and I want my money back.",
        "is the worst I have ever bought.",
        "arrived late and was badly scratched.",
        "is a waste of money, do not buy it.",
        "stopped working during the first week.",
        "smells terrible and feels cheap.",
        "is loud, slow and impossible to clean.",
        "was a big disappointment for my sister.",
        "leaks, and customer service never answers.",
        "never worked at all, very annoying.",
    ),
}
"""Opinions by stars."""


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


def write_reviews(path: Path) -> None:
    """Write product reviews with their stars as CSV, for any model that follows instructions."""
    reviews = [
        (stars, f"{product} {opinion}")
        for product in _PRODUCTS
        for stars, opinions in _OPINIONS.items()
        for opinion in opinions
    ]
    Random(0).shuffle(reviews)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["review_id", "stars", "text"])
        rows.writerows((f"R-{number:03d}", stars, text) for number, (stars, text) in enumerate(reviews))


def job_in(folder: str) -> str:
    """Return the job file with its paths below `folder`."""
    text = JOB.read_text(encoding="utf-8")
    return text.replace("jobs/data", f"{folder}/data").replace("jobs/summarize.yaml", f"{folder}/summarize.yaml")
