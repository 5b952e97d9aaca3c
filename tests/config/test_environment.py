"""Environment variables in a job file: in its paths, and nowhere else."""

import json

import pytest

from pipeline.config import JobFileError, load_job
from pipeline.config.identity import free_of, identity_of, numerics_of

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


SERVER = """\
input: {path: data}
prompt: {template: "{text}"}
output: {path: out}
server: %s
"""


def test_variables_are_replaced_in_urls_and_headers(job):
    given = {"A": "http://a", "B": "http://b", "KEY": "secret-1234\n"}
    found = job(given, SERVER % '{base_url: ["${A}/v1", "${B}/v1"], headers: {api-key: "${KEY}", x-team: mine}}')
    config = found.server.config(given)
    assert config.urls == ("http://a/v1", "http://b/v1")
    assert config.headers == {"api-key": "secret-1234", "x-team": "mine"}
    assert {"secret-1234", "mine"} == config.secrets
    for text in (found.server, config, identity_of(found), numerics_of(found), free_of(found)):
        assert "secret-1234" not in str(text)
    found = job({}, SERVER % '{base_url: "http://a", extra_body: {note: "${A}"}}')
    assert found.server.config().extra_body == {"note": "${A}"}


def test_the_command_of_a_server_is_recorded_without_its_variables(job):
    """The output has the command. Its variables are filled in when the server starts."""
    text = SERVER % '{serve: [vllm, serve, m, --api-key, "${KEY}", "--hf-token=${TOKEN:-none-given}"]}'
    given = {"KEY": "secret-1234"}
    found = job(given, text)
    config = found.server.config(given)
    assert config.serve == ("vllm", "serve", "m", "--api-key", "secret-1234", "--hf-token=none-given")
    assert config.secrets == {"secret-1234", "none-given"}
    assert "${KEY}" in json.dumps(numerics_of(found))
    for shown in (numerics_of(found), identity_of(found), free_of(found), config):
        assert "secret-1234" not in str(shown)
    with pytest.raises(JobFileError, match=r"server\.serve: the environment variable KEY is not set"):
        job({}, SERVER % '{serve: [vllm, serve, m, --api-key, "${KEY}"]}')


@pytest.mark.parametrize(
    "serve",
    [
        '[vllm, serve, m, --api-key, abc]',
        '[vllm, serve, m, "--api-key=abc"]',
        '[vllm, serve, m, --hf-token, abc]',
        '[vllm, serve, m, --key, sk-1234567890]',
        '[vllm, serve, m, "hf_abcdefgh"]',
        '[curl, -H, "Bearer abc"]',
    ],
)  # fmt: skip
def test_a_secret_in_the_command_of_a_server_is_refused(job, serve):
    with pytest.raises(JobFileError, match=r"server\.serve: .*looks like a secret.*\$\{API_KEY\}") as caught:
        job({}, SERVER % f"{{serve: {serve}}}")
    assert "abc" not in str(caught.value)
    assert "1234" not in str(caught.value)


def test_other_commands_and_urls_are_accepted(job):
    for server in (
        '{serve: [vllm, serve, m, --max-model-len, "8192", --tokenizer, t]}',
        '{base_url: "https://h/openai/deployments/d?api-version=2024-02-01"}',
    ):
        assert job({}, SERVER % server).server is not None
    for server, message in (
        ('{base_url: "https://user:pw@h/v1"}', "cannot contain a user"),
        ('{base_url: "https://h/v1", headers: {"a b": x}}', "not a valid header name"),
        ('{base_url: "https://h/v1", headers: {a: "x\\ny"}}', "printable ASCII"),
        ('{serve: [vllm], requests_per_minute: 5}', "need base_url"),
    ):  # fmt: skip
        with pytest.raises(JobFileError, match=message):
            job({}, SERVER % server)


@pytest.mark.parametrize(("text", "options", "expected"), [
    ("server: {base_url: '${URL}', windw: 2}\nstorage_options: {s3: {profile: x}}\n",
     {}, ["input.path: the env", "output.path: the env", "server.base_url: the environment variable URL",
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
