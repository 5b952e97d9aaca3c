"""The date that a chat template prints is the same in a whole output, whatever the time and the actor of a row."""

import json
from datetime import datetime

import pytest

from pipeline.checkpoints.chat_template import folder_reads_date
from pipeline.errors import FingerprintError
from pipeline.job.actor.backends import OwnEngine
from pipeline.job.planning.plan import make_plan
from pipeline.job.running.run import run_job
from pipeline.stores.local_folder import LocalFolder
from tests.job.conftest import Started
from tests.tokenization import small_tokenizers

pytestmark = pytest.mark.usefixtures("without_ray")

REAL_TOKENIZER = OwnEngine("tests.job.fake_engine:FakeEngine")
TEXTS = [f"text {i}" for i in range(30)]
DATED = "{{ strftime_now('%d %B %Y') }}: {{ messages[0].content }}"
UNDATED = "2026: {{ messages[0].content }}"
FIRST, LATER = datetime(2026, 11, 23, 23, 59, 58), datetime(2026, 11, 24, 0, 0, 3)


@pytest.fixture
def run(job, monkeypatch):
    """Return a function that runs the job at a given time of the clock and returns the completions by row."""

    def at(now: datetime, date: str | None = None, template: str | None = None, **sections) -> dict[int, str]:
        monkeypatch.setattr("pipeline.job.running.run.wall_time", lambda: now)
        given = {"date": date, "chat_template": template}
        config = job.config(prompt={"chat": {k: v for k, v in given.items() if v is not None}}, **sections)
        run_job(config, backend=REAL_TOKENIZER)
        return {row["id"]: row["generated_text"] for row in job.table().to_pylist()}

    use_template(job, DATED)
    job.rows(TEXTS)
    return at


def use_template(job, template: str) -> None:
    small_tokenizers.save_byte_level(job.folder / "model", chat_template=template)


def forget(job) -> None:
    """Leave only what a run that was killed early leaves."""
    for part in job.parts():
        part.unlink()
    (job.output / "_SUCCESS").unlink()


def identity(job) -> dict:
    return json.loads((job.output / "_pipeline" / "job.json").read_text())["identity"]


def test_a_job_that_resumes_after_midnight_sends_the_same_prompts(job, run):
    first = run(FIRST)
    assert identity(job)["prompt"]["chat"]["date"] == "2026-11-23T23:59:58"
    forget(job)
    assert run(LATER, run={"actors": 2}) == first
    assert Started.count == 2
    job.output = job.folder / "other"
    assert run(LATER, output={"path": str(job.output)}) != first, "the date is in the prompts"


def test_the_job_file_names_the_date(job, run):
    first = run(FIRST)
    forget(job)
    with pytest.raises(FingerprintError, match=r'prompt\.chat\.date: "2026-11-23T23:59:58" -> "2026-11-24T00:00:00"'):
        run(LATER, date="2026-11-24")
    assert run(LATER, date="2026-11-23 23:59:58") == first
    job.output = job.folder / "named"
    given = run(LATER, date="2026-11-23", output={"path": str(job.output)})
    assert given == first, "only the day is printed"
    assert identity(job)["prompt"]["chat"]["date"] == "2026-11-23T00:00:00"


def test_of_two_first_runs_at_midnight_the_second_uses_the_date_of_the_first(job, run, monkeypatch):
    first = run(FIRST)
    forget(job)
    read, reads = LocalFolder.read, []

    def blind(store, name):
        """Find nothing on the first read, as before the other run has written."""
        if name.endswith("job.json"):
            reads.append(name)
            if len(reads) == 1:
                return None
        return read(store, name)

    monkeypatch.setattr(LocalFolder, "read", blind)
    assert run(LATER) == first
    reads.clear()
    forget(job)
    with pytest.raises(FingerprintError, match=r"sampling\.max_tokens: 6 -> 7"):
        run(LATER, sampling={"max_tokens": 7})


def test_jobs_without_a_date_in_their_prompts_stay_the_jobs_they_were(job):
    job.rows(TEXTS)

    def planned(template, **prompt):
        use_template(job, template)
        found = make_plan(job.config(prompt=prompt), "cpu").fingerprint
        return found.needs_date, found.identity["prompt"]["chat"]

    bare = {"system": None, "continue_final_message": True, "template_kwargs": {}}
    assert planned(UNDATED, chat={}) == (False, bare)
    assert planned(UNDATED, chat={"date": "2026-11-23"}) == (False, bare)
    assert planned(DATED) == (False, None)
    assert planned(DATED, chat={}) == (True, bare)


def test_files_that_may_hold_a_template(tmp_path):
    assert not folder_reads_date(tmp_path)
    escaped = "\\u0073trftime_now('%Y')"
    for name, text, reads_date in (
        ("tokenizer_config.json", json.dumps({"chat_template": DATED}), True),
        ("tokenizer_config.json", f'{{"chat_template": "{escaped}"}}', True),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "default", "template": DATED}]}), True),
        ("tokenizer_config.json", json.dumps({"chat_template": UNDATED}), False),
        ("tokenizer_config.json", "{strftime_now", True),  # the tokenizer's loader refuses it
        ("chat_template.jinja", DATED, True),
        ("chat_template.jinja", UNDATED, False),
        ("chat_template.json", json.dumps({"chat_template": DATED}), True),
        ("README.md", DATED, False),
    ):
        (tmp_path / name).write_text(text)
        assert folder_reads_date(tmp_path) == reads_date, (name, text)
        (tmp_path / name).unlink()


def test_a_template_of_the_job_is_in_its_identity_and_decides_if_the_date_is_too(job):
    job.rows(TEXTS)
    use_template(job, UNDATED)
    file = job.folder / "t.jinja"
    chat = {"chat": {"chat_template": str(file)}}

    def planned(template):
        file.write_text(template)
        return make_plan(job.config(prompt=chat), "cpu").fingerprint

    one, other = planned("A {{ messages[0].content }}"), planned(DATED)
    assert (one.needs_date, other.needs_date) == (False, True)
    assert one.identity["prompt"]["chat"]["template"] != other.identity["prompt"]["chat"]["template"]
    assert planned("A {{ messages[0].content }}").digest == one.digest


def test_rows_go_through_the_template_of_the_job(job, run):
    use_template(job, UNDATED)
    (job.folder / "t.jinja").write_text(DATED)
    by_file = run(FIRST, template=str(job.folder / "t.jinja"))
    job.output = job.folder / "other"
    use_template(job, DATED)
    assert run(FIRST, output={"path": str(job.output)}) == by_file
