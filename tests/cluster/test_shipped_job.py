"""Jobs sent to a cluster mean there what the job file means here."""

import json

import pytest

from pipeline.cluster.shipped_job import JOB_FILE, TEMPLATE_FILE, ShippedJob
from pipeline.config import load_job
from pipeline.config.identity import identity_of
from pipeline.errors import ConfigError

TEXT = """\
vars: {date: "2026-11-20"}
input: {path: "in/${date}"}
prompt: {template: "${price} {text} $(reboot) 'quoted'\\n"}
model: {path: demo:target}
sampling: {max_tokens: 7, temperature: 1e-05, stop: ["no", "1e5", "012", "~"]}
output: {path: "out/${date}"}
"""


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "night ly;x.yaml").write_text(TEXT)
    return "night ly;x.yaml"


def shipped(job_file, *sets, vars=()):
    return ShippedJob.from_config(load_job(job_file, sets, vars=vars))


def test_a_job_means_the_same_in_another_folder(job_file, tmp_path, monkeypatch):
    sent = shipped(job_file, "sampling.seed=3", vars=["date=2026-11-21"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sent.write(elsewhere)
    before = load_job(job_file, ["sampling.seed=3"], vars=["date=2026-11-21"])
    monkeypatch.chdir(elsewhere)
    after = load_job(JOB_FILE)
    assert identity_of(after) == identity_of(before)
    assert (after.prompt, after.sampling, after.name) == (before.prompt, before.sampling, before.name)
    assert after.input.path == str(tmp_path / "in/2026-11-21")
    assert after.output.path == str(tmp_path / "out/2026-11-21")
    assert after.model.path == "demo:target"
    assert after.run.ray_address == "auto"


def test_adapters_are_found_from_another_folder(job_file, tmp_path):
    (tmp_path / "short").mkdir()
    adapters = "model={path: demo, adapters: {a: short, b: 'demo:short', c: owner/name}, adapter: {column: style}}"
    sent = shipped(job_file, adapters)
    found = json.loads(sent.files[JOB_FILE])["model"]["adapters"]
    assert found == {"a": str(tmp_path / "short"), "b": "demo:short", "c": "owner/name"}
    assert sent.made_absolute["model.adapters.a"] == "short"


def test_the_name_follows_the_output_and_the_digest_all_else(job_file):
    one, same = shipped(job_file), shipped(job_file)
    assert (one.name, one.digest) == (same.name, same.digest)
    assert one.name.startswith("night-ly-x-")
    other_settings, other_day = shipped(job_file, "run.actors=2"), shipped(job_file, vars=["date=2026-11-21"])
    assert other_settings.name == one.name
    assert other_settings.digest != one.digest
    assert other_day.name != one.name
    assert shipped(job_file, "output.path=out/2026-11-20/").name == one.name


def test_a_chat_template_is_sent_with_the_job(job_file, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    sent = shipped(job_file, "prompt.chat={template: mine.jinja}")
    assert sent.files[TEMPLATE_FILE] == "{{ messages[0].content }}"
    assert json.loads(sent.files[JOB_FILE])["prompt"]["chat"]["template"] == TEMPLATE_FILE
    (tmp_path / "mine.jinja").write_text("{{ messages[1].content }}")
    assert shipped(job_file, "prompt.chat={template: mine.jinja}").digest != sent.digest
    with pytest.raises(ConfigError, match=r"none\.jinja: no such file"):
        shipped(job_file, "prompt.chat={template: none.jinja}")


def test_urls_and_addresses_are_unchanged(job_file, tmp_path):
    (tmp_path / "weights").mkdir()
    sent = shipped(
        job_file, "output.path=s3://bucket/a", "input.path=x-${date}", "model.path=weights", "quality.model=weights",
        "run.ray_address=10.0.0.1:6379",
    )  # fmt: skip
    data = json.loads(sent.files[JOB_FILE])
    assert data["output"]["path"] == sent.output == "s3://bucket/a"
    assert not sent.is_local
    assert data["model"]["path"] == data["quality"]["model"] == str(tmp_path / "weights")
    assert data["run"]["ray_address"] == "10.0.0.1:6379"
