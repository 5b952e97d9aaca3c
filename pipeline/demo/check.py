"""Check which facts of a report a summary states correctly.

    python -m pipeline.demo.check out/summarize

The facts are parsed from the report's text by the cues of `reports`, so only the report and the summary are needed. A
fact is correct if its slot in the sentence occurs once and holds exactly the value. The command reads the completions
of the demonstration job, finds each report by its id in the job's input, and exits with 1 if too few summaries are
correct or a report has no row.
"""

import argparse
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

from pipeline.demo.reports import FACT_NAMES, FORMS, Facts

# Fact -> the text around it in a summary.
_SUMMARY_CUES = {
    "date": r"\bOn (?P<v>[^,]*?) at ",
    "site": r" at (?P<v>[^,]*?), ",
    "technician": r", (?P<v>[^,]*?) serviced ",
    "device": r" serviced (?P<v>[^,]*?) for ",
    "fault": r" serviced [^,]*? for (?P<v>[^,]*?) caused by ",
    "cause": r" caused by (?P<v>[^,]*?), ",
    "action": r" caused by [^,]*, (?P<v>[^,]*?), fitted part ",
    "part": r", fitted part (?P<v>[^,]*?), ",
    "hours": r" and logged (?P<v>[^,]*?) hours ",
    "cost": r" hours for (?P<v>\$[^,]*?)\.$",
}


@cache
def _report_cue(name: str) -> re.Pattern[str]:
    forms = {form for style in FORMS.values() for form in style.get(name, ())}
    alternatives = (re.escape(form).replace(r"\{\}", r"([^;:\n]+?)") for form in sorted(forms))
    return re.compile("|".join(rf"(?:^|(?<=[.;] )|(?<=\n)){form}(?= |\n|$)" for form in alternatives))


def facts_of(report: str) -> Facts:
    """Return the facts of a report. Raises ValueError if a fact is missing or stated twice."""
    values: dict[str, str] = {}
    for name in FACT_NAMES:
        matches = _report_cue(name).finditer(report)
        found = [next(group for group in match.groups() if group) for match in matches]
        if len(found) != 1:
            raise ValueError(f"the report states {name} {len(found)} times, expected once: {report[:200]!r}")
        values[name] = found[0]
    return Facts(**values)


def wrong_facts(report: str, summary: str) -> tuple[str, ...]:
    """Return the names of the facts that `summary` misses or states differently than `report`."""
    facts = facts_of(report)
    text = summary.strip()
    wrong = []
    for name, cue in _SUMMARY_CUES.items():
        if [match["v"] for match in re.finditer(cue, text)] != [getattr(facts, name)]:
            wrong.append(name)
    return tuple(wrong)


def check_output(out: Path, data: Path, *, at_least: float, num_examples: int) -> bool:
    """Check the `part-*.parquet` files of `out` against the reports in `data`, and print the result.

    Returns whether every report has exactly one row and at least the share `at_least` of rows is correct in every fact.
    A row without text counts as wrong. Raises ValueError if `out` is not an output of this job.
    """
    inputs = _rows(data, "*.parquet", ["report_id", "report"])
    reports = {str(row["report_id"]): str(row["report"]) for row in inputs}
    rows = _rows(out, "part-*.parquet", ["report_id", "generated_text", "error"])
    seen = Counter(str(row["report_id"]) for row in rows)
    unknown = sorted(set(seen) - set(reports))
    if unknown:
        raise ValueError(f"{out} has {len(unknown)} rows without a report in {data}, such as {unknown[:3]}")
    by_fact: Counter[str] = Counter()
    bad: list[str] = []
    num_errors = 0
    for row in rows:
        report, text = reports[str(row["report_id"])], row["generated_text"]
        if text is None:
            num_errors += 1
            bad.append(f"{row['report_id']}: no text, error {row['error']}")
        elif wrong := wrong_facts(report, text):
            by_fact.update(wrong)
            bad.append(f"{row['report_id']}: wrong {', '.join(wrong)}\n  {facts_of(report)}\n  {text!r}")
    share = 1 - len(bad) / len(rows)
    num_missing = len(set(reports) - set(seen))
    num_doubled = sum(count > 1 for count in seen.values())
    print(f"rows           {len(rows):,}  ({num_missing:,} reports without a row, {num_doubled:,} with several)")
    print(f"correct        {len(rows) - len(bad):,}  ({share:.2%} in every fact; required {at_least:.2%})")
    print(f"without text   {num_errors:,}")
    print(f"wrong by fact  {', '.join(f'{name} {by_fact[name]}' for name in FACT_NAMES)}")
    for example in bad[:num_examples]:
        print(example)
    print(f"\nSome summaries in {out}/part-*.parquet:")
    for row in rows[:: max(1, len(rows) // 3)][:3]:
        print(f"  {row['report_id']}: {str(row['generated_text']).strip()}")
    print(f"Report: {out}/_pipeline/report.md")
    return share >= at_least and not num_missing and not num_doubled


def _rows(folder: Path, pattern: str, columns: list[str]) -> list[dict[str, str | None]]:
    """Return the rows of the Parquet files directly in `folder`, without subfolders such as `_pipeline`."""
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise ValueError(f"{folder} contains no {pattern} file")
    return [row for path in paths for row in pq.ParquetFile(path).read(columns=columns).to_pylist()]


def _input_of(out: Path) -> Path:
    """Return the input of the job that wrote `out`."""
    return Path(json.loads((out / "_pipeline" / "job.json").read_text(encoding="utf-8"))["free"]["input"]["path"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the summaries that the demonstration job wrote.")
    parser.add_argument("out", type=Path, help="output folder of the job")
    parser.add_argument("--data", type=Path, help="input folder of the job; default: as recorded in the output")
    parser.add_argument("--at-least", type=float, default=0.97, help="required share of rows with every fact correct")
    parser.add_argument("--examples", type=int, default=3, help="number of wrong rows to print")
    options = parser.parse_args()
    try:
        data = options.data or _input_of(options.out)
        good = check_output(options.out, data, at_least=options.at_least, num_examples=options.examples)
    except (ValueError, OSError) as error:
        sys.exit(f"check: {error}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
