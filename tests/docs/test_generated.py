"""Generated files are up to date: reference pages, the picture, the sample rows."""

from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest

from tools import copies, picture, recording, reference, samples
from tools.generated import stale


def test_the_page_of_job_file_keys_is_up_to_date():
    page = reference.PAGE.read_text(encoding="utf-8")
    assert reference.written(page) == page, "run `python -m tools.reference`"


def test_the_page_of_commands_has_the_help_of_each():
    page = reference.command_page()
    assert "### pipeline run\n" in page
    assert "--sample" in page


def test_the_picture_is_up_to_date_and_serves_both_color_schemes():
    drawn = picture.FILE.read_text(encoding="utf-8")
    assert picture.picture() == drawn, "run `python -m tools.picture`"
    assert "prefers-color-scheme: dark" in drawn
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("name", samples.samples())
def test_sample_rows_are_up_to_date(name: str):
    assert pq.read_table(samples.FOLDER / f"{name}.parquet").equals(samples.samples()[name]), (
        "run `python -m tools.samples`"
    )


def test_the_sample_of_requests_is_up_to_date():
    assert (samples.FOLDER / "requests.jsonl").read_text(encoding="utf-8") == samples.requests()


def test_the_sample_document_is_up_to_date():
    assert (samples.FOLDER / "scan.pdf").read_bytes() == samples.scan(), "run `python -m tools.samples`"


def test_the_presets_at_the_root_are_those_of_the_package():
    assert stale(copies.files()) == [], "run `python -m tools.copies`"
    assert {*(copies.ROOT / "configs").iterdir()} == {path for path in copies.files() if path.parent.name == "configs"}


def test_the_recording_shows_its_commands_and_is_younger_than_the_code_that_printed_it():
    drawn = recording.FILE.read_text(encoding="utf-8")
    assert f"<desc>{recording.digest()}</desc>" in drawn, "run `make recording`"
    texts = {
        "".join(text.itertext()) for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {f"$ {command}" for command in recording.SCRIPT} <= texts
    assert any("sound: " in text and "2,048 rows (0 error rows)" in text for text in texts)
