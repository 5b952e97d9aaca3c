"""Variables of a job file: they name parts of its paths, and never lead out of them."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from pipeline.config import JobFileError, load_job
from pipeline.config.identity import identity_of
from pipeline.config.variables import moment_of

JOB = """\
vars: {date: {today: Pacific/Auckland}, team: blue}
input: {path: "in/${team}/${date}"}
prompt: {template: "${date} {text}"}
model: {path: demo}
output: {path: "out/${date}"}
"""


@pytest.fixture
def job(tmp_path):
    def load(*vars, text=JOB, environ=None, at=datetime(2026, 11, 20, 12, 30, tzinfo=UTC), **options):
        (tmp_path / "job.yaml").write_text(text)
        path = tmp_path / "job.yaml"
        return load_job(path, vars=vars, environ=environ or {}, now=lambda zone: at.astimezone(zone), **options)

    return load


def test_values_of_the_command_override_those_of_the_job(job):
    found = job()
    assert (found.input.path, found.output.path) == ("in/blue/2026-11-21", "out/2026-11-21")
    assert found.prompt.template == "${date} {text}"
    found = job("date=2026-01-02", "team=red")
    assert (found.input.path, found.output.path) == ("in/red/2026-01-02", "out/2026-01-02")
    found = job("date=x", environ={"date": "of the environment"})
    assert found.output.path == "out/x"


def test_today_is_the_date_in_the_zone(job):
    before, after = datetime(2026, 11, 20, 10, 59, tzinfo=UTC), datetime(2026, 11, 20, 11, 0, tzinfo=UTC)
    assert job(at=before).output.path == "out/2026-11-20"
    assert job(at=after).output.path == "out/2026-11-21"


def test_a_yaml_date_keeps_its_text(job):
    assert job(text=JOB.replace("{today: Pacific/Auckland}", "2026-11-20")).output.path == "out/2026-11-20"


def test_another_day_is_the_same_job(job):
    assert identity_of(job("date=1")) == identity_of(job("date=2", "team=red"))


@pytest.mark.parametrize(
    "value",
    ["", "..", "a/../b", "a/b", "/etc", "~", "-rf", ".hidden", "a b", "a\nb", "a\\b", "$(id)", "${HOME}", "a;b", "*",
     "a?b", "[a]", "s3:x", "a#b", "%2e%2e", "a..b", "é", "٣", "x" * 201, "a\x00"],
)  # fmt: skip
def test_a_value_is_never_a_path(job, value):
    with pytest.raises(JobFileError, match=r"--var: vars\.date: .* cannot be part of a path"):
        job(f"date={value}")


@pytest.mark.parametrize(("vars", "text", "expected"), [
    (["day=1"], JOB, "--var: day: is not declared in the job file\n    Declared: date, team."),
    (["day=1"], JOB.replace("vars:", "#"), "--var: day: is not declared in the job file\n    Declared: none."),
    ([], JOB.replace("team: blue", "team: ../blue"), "job.yaml:1: vars.team: '../blue' cannot be part of a path"),
    (["date"], JOB, "--var date: expected NAME=VALUE"),
    (["=1"], JOB, "--var =1: expected NAME=VALUE"),
    ([], JOB.replace("team: blue", "team: null"), "job.yaml:1: vars.team: has no value\n    Pass --var team="),
    ([], JOB.replace("Pacific/Auckland", "Mars/Phobos"), "vars.date: 'Mars/Phobos' is not a time zone"),
    ([], JOB.replace("Pacific/Auckland", "../../etc/passwd"), "vars.date: '../../etc/passwd' is not a time zone"),
    ([], JOB.replace("team: blue", "team: blue, x: y"), "job.yaml:1: vars.x: is not used\n    Write ${x} in"),
    ([], JOB.replace("path: demo", 'path: "${team}"'), "model.path: the variable team is not allowed here"),
    ([], JOB.replace("team: blue", "team: blue, a-b: y"), "job.yaml:1: vars.a-b: is not a valid variable name"),
    ([], JOB.replace("{today: P", "{tomorrow: P"), "job.yaml:1: vars.date: expected a text, {today"),
    ([], JOB.replace("team: blue", "team: 7"), "job.yaml:1: vars.team: expected a text, {today: ZONE} or null"),
    ([], JOB.replace("{today: Pacific/Auckland}", "[1]"), "job.yaml:1: vars.date: expected a text, {today"),
])  # fmt: skip
def test_mistakes_are_named_with_their_location(job, vars, text, expected):
    with pytest.raises(JobFileError) as error:
        job(*vars, text=text)
    assert expected in str(error.value)


@pytest.mark.parametrize("flag", ["0001-01-01T00:00+00:00", "9999-12-31T23:59-12:00", "@99999999999999", "@", "now"])
def test_a_time_without_a_date_in_every_zone_is_refused(flag):
    with pytest.raises(JobFileError, match="expected a time with its zone"):
        moment_of(flag)


def test_times_of_any_zone_are_accepted():
    assert moment_of("@0")(ZoneInfo("America/Los_Angeles")).date().isoformat() == "1969-12-31"
