"""The input of the demonstration job: what the generator writes, unseen in training, of spread lengths."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipeline.demo import demo_model
from pipeline.demo.reports import PROMPT_TEMPLATE, make_report
from tests.demo.test_demo_reports import open_ended_values
from tools.demo.data import write_job_data

JOB_DATA = Path(__file__).parents[2] / "jobs" / "data"


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return sorted(JOB_DATA.iterdir())


@pytest.fixture(scope="module")
def reports(files: list[Path]) -> list[dict[str, str]]:
    return pa.concat_tables([pq.read_table(path, page_checksum_verification=True) for path in files]).to_pylist()


def test_it_is_what_the_generator_writes(files: list[Path], tmp_path: Path) -> None:
    written = write_job_data(tmp_path)
    assert [path.name for path in files] == [path.name for path in written]
    for committed, fresh in zip(files, written, strict=True):
        assert pq.read_table(committed).equals(pq.read_table(fresh))


def test_it_has_several_files_of_several_row_groups(files: list[Path], reports: list[dict[str, str]]) -> None:
    assert len(files) >= 4
    assert all(pq.ParquetFile(path).num_row_groups >= 2 for path in files)
    assert pq.read_schema(files[0]).names == ["report_id", "report"]
    assert len(reports) == len({row["report_id"] for row in reports}) >= 2000
    assert all(row["report"] for row in reports)


def test_prompt_lengths_are_spread_and_fit(files: list[Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model("target"))
    for path in files:  # each file holds short and long ones: the spread does not come from one odd file
        texts = [PROMPT_TEMPLATE.format(report=text) for text in pq.read_table(path)["report"].to_pylist()]
        lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
        assert max(lengths) >= 8 * min(lengths)
        assert max(lengths) + 96 <= 1024
        assert 100 < sum(lengths) / len(lengths) < 200


def test_it_shares_no_open_ended_value_with_training(reports: list[dict[str, str]]) -> None:
    ours = set().union(*(open_ended_values(row["report"]) for row in reports))
    assert len(ours) > 2000
    for first in (0, 10_000_000):  # where training takes its reports without and with fillers
        trained = (make_report("train", index, fillers=first > 0) for index in range(first, first + 2000))
        assert not ours & set().union(*(open_ended_values(report.text) for report in trained))
