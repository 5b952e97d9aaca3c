"""Write the input of the demonstration job as Parquet: generated reports that are not in the training data.

    python -m tools.demo.data --out jobs/data

The folder is flat, with several files of several row groups, and short and long reports in each file.
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.demo.reports import make_report

NUM_FILES = 4
ROW_GROUPS_PER_FILE = 4
ROWS_PER_GROUP = 128
NUM_REPORTS = NUM_FILES * ROW_GROUPS_PER_FILE * ROWS_PER_GROUP
SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("report_id", "report")])


def job_table(first: int, num_reports: int) -> pa.Table:
    """Return `num_reports` reports of the job's split, from number `first`."""
    reports = [make_report("job", index) for index in range(first, first + num_reports)]
    columns = {"report_id": [r.report_id for r in reports], "report": [r.text for r in reports]}
    return pa.table(columns, schema=SCHEMA)


def write_job_data(out: Path) -> list[Path]:
    """Write the files into `out` and return their paths. Rows, files and row groups are deterministic."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    rows_per_file = ROW_GROUPS_PER_FILE * ROWS_PER_GROUP
    for number in range(NUM_FILES):
        path = out / f"reports-{number:02d}.parquet"
        table = job_table(number * rows_per_file, rows_per_file)
        pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_GROUP, write_page_checksum=True)
        paths.append(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the input of the demonstration job.")
    parser.add_argument("--out", type=Path, default=Path("jobs/data"))
    for path in write_job_data(parser.parse_args().out):
        print(f"{path}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
