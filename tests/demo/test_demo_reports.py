"""Generator of reports: always the same reports, and no open-ended value in more than one split."""

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.config import load_job
from pipeline.demo.check import facts_of
from pipeline.demo.example import write_reports
from pipeline.demo.reports import FORMS, MISLEADING_FILLERS, PLAIN_FILLERS, PROMPT_TEMPLATE, make_report
from pipeline.demo.words import MONTHS, SPLITS, Split

JOB_DATA = Path(__file__).parents[2] / "jobs" / "data"
_FORMS = [form for style in FORMS.values() for forms in style.values() for form in forms]
_FIXED_WORDS = {*MONTHS, *re.findall(r"[A-Z][a-z]+", " ".join((*PLAIN_FILLERS, *MISLEADING_FILLERS, *_FORMS)))}


def open_ended_values(text: str) -> set[str]:
    """Find names and part codes by their form, without the generator."""
    names = re.findall(r"\b[A-Z][a-z]+\b(?!-)", text)
    return (set(names) - _FIXED_WORDS) | set(re.findall(r"[A-Z][a-z]+-\d{3}", text))


def test_the_same_number_gives_the_same_report() -> None:
    assert make_report("train", 7) == make_report("train", 7)
    assert make_report("train", 7) != make_report("train", 8)
    assert make_report("train", 7).text != make_report("train", 7, fillers=False).text


def test_the_texts_have_not_changed() -> None:
    # The shipped weights were trained on these wordings: a change needs a new training.
    assert make_report("heldout", 0).report_id == "heldout-00000"
    assert make_report("job", 3).text == (
        "site Tambapol #79; tech Kanu Solsol; date May 24; unit conveyor 146; fault a burnt smell; "
        "cause a loose wire; action dried the housing; part So-742; hours 1.5; cost $1267;"
    )
    assert make_report("job", 3).summary == (
        "On May 24 at Tambapol #79, Kanu Solsol serviced conveyor 146 for a burnt smell caused by a loose "
        "wire, dried the housing, fitted part So-742, and logged 1.5 hours for $1267."
    )
    assert PROMPT_TEMPLATE == "Summarize the report in one sentence.\n{report}\nSummary:"


def test_the_input_of_the_demonstration_job_is_what_the_generator_writes(tmp_path: Path) -> None:
    written = write_reports(tmp_path)
    assert sorted(path.name for path in JOB_DATA.iterdir()) == [path.name for path in written]
    for fresh in written:
        assert pq.read_table(JOB_DATA / fresh.name).equals(pq.read_table(fresh))


def test_the_example_is_a_job_and_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = pipe("demo", "here/x")
    assert (code, err) == (0, "")
    assert "pipeline run here/x/summarize.yaml" in out
    assert load_job("here/x/summarize.yaml").input.path == "here/x/data"
    assert pipe("validate", "here/x/summarize.yaml")[0] == 0
    reviews = (tmp_path / "here/x/reviews.csv").read_text().splitlines()
    assert reviews[0] == "review_id,stars,text"
    assert len({review.split(",", 2)[2] for review in reviews[1:]}) == 200
    code, _, err = pipe("demo", "here/x")
    assert (code, "here/x: exists already" in err) == (2, True)


def test_no_open_ended_value_is_in_two_splits() -> None:
    values = {
        split: set().union(*(open_ended_values(make_report(split, index).text) for index in range(2500)))
        for split in SPLITS
    }
    assert all(len(found) > 2000 for found in values.values())
    for one, other in combinations(SPLITS, 2):
        assert not values[one] & values[other]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("fillers", [True, False])
def test_the_facts_are_read_back_from_the_text(split: Split, fillers: bool) -> None:
    for index in range(500):
        report = make_report(split, index, fillers=fillers)
        assert facts_of(report.text) == report.facts
