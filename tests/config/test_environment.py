"""Environment variables in a job file: in its paths, and nowhere else."""

import pytest

from pipeline.config import JobFileError, load_job
from pipeline.config.identity import identity_of

JOB = """\
input: {path: "${DATA:-data}/${DAY}"}
prompt: {template: "${DATA} {text}"}
model: {path: "${MODEL:-demo}"}
sampling: {stop: ["${DATA}"]}
output: {path: "out/${DAY}"}
quality: {model: "${MODEL:-demo}-16bit"}
"""


@pytest.fixture
def job(tmp_path):
    def load(environ, text=JOB, **options):
        (tmp_path / "job.yaml").write_text(text)
        return load_job(tmp_path / "job.yaml", environ=environ, **options)

    return load


def test_variables_are_replaced_in_paths_only(job):
    found = job({"DAY": "monday"})
    assert (found.input.path, found.model.path, found.output.path) == ("data/monday", "demo", "out/monday")
    assert (found.prompt.template, found.sampling.stop) == ("${DATA} {text}", ("${DATA}",))
    found = job({"DAY": "1", "DATA": "s3://b", "MODEL": ""}, sets=["output.path=${OUT:-x}"])
    assert (found.input.path, found.model.path, found.output.path) == ("s3://b/1", "demo", "x")
    assert found.location("input.path").endswith("job.yaml:1")
    assert found.location("output.path") == "--set"
    assert job({"DAY": "1", "MODEL": "s3://m"}).quality.model == "s3://m-16bit"


def test_the_location_of_data_does_not_change_the_identity(job):
    assert identity_of(job({"DAY": "1"})) == identity_of(job({"DAY": "2", "DATA": "elsewhere"}))


def test_values_of_variables_are_not_expanded_again(job):
    assert job({"DAY": "${DATA}"}).output.path == "out/${DATA}"


def test_all_unset_variables_are_named_at_once(job):
    with pytest.raises(JobFileError) as error:
        job({"DAY": ""}, JOB.replace('"${MODEL:-demo}"', '"${MO DEL}"'))
    message = str(error.value)
    assert "job.yaml:1: input.path: the environment variable DAY is not set\n    Set it, or give a default" in message
    assert "job.yaml:5: output.path: the environment variable DAY is not set" in message
    assert "job.yaml:3: model.path: expected ${NAME} or ${NAME:-default}" in message


@pytest.mark.parametrize(("text", "options", "expected"), [
    ("server: {url: '${URL}', windw: 2}\nstorage_options: {s3: {profile: x}}\n",
     {}, ["input.path: the env", "output.path: the env", "server.url: the environment variable URL",
          "server.windw: unknown key"]),
    ("sampling: {structured_outputs: {json_file: '${DAY}.json'}, max_tokens: few}\n",
     {}, ["input.path: ", "output.path: ", "sampling.max_tokens: expected", "structured_outputs.json_file: the env"]),
    ("sampling: {structured_outputs: {json_file: missing.json}, max_tokens: few}\n",
     {"environ": {"DAY": "1"}}, ["sampling.max_tokens: expected", "json_file: missing.json: cannot be read"]),
    ("vars: {a: x}\nrun: {actor: 1}\n", {},
     ["input.path", "output.path", "run.actor: unknown key", "vars.a: is not used"]),
    ("run: {actor: 1, notify: \"\\ud800\"}\ntask: {type: choice, labels: [a, \"\\ud800\"]}\n",
     {"environ": {"DAY": "1"}},
     ["run.actor: unknown key", "run.notify: contains a lone surrogate", "task.labels[1]: contains a lone surrogate"]),
    ("", {"sets": ["nonsense", "a..b=1"], "overlays": ["missing.yaml"]},
     ["missing.yaml: no such file", "--set nonsense: expected key=value", "--set a..b=1: expected key=value"]),
])  # fmt: skip
def test_mistakes_of_all_kinds_are_named_at_once(job, text, options, expected):
    rest = JOB.replace('sampling: {stop: ["${DATA}"]}\n', "")
    with pytest.raises(JobFileError) as error:
        job(**{"environ": {}, "text": rest + text, **options})
    found = [str(mistake) for mistake in error.value.mistakes]
    assert [mistake.partition("\n")[0] for mistake in found if not any(part in mistake for part in expected)] == []
    assert all(any(part in mistake for mistake in found) for part in expected)
    assert len(found) == len(expected)
