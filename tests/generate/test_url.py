"""`pipeline generate --url`: prompts for a server instead of this project's engine."""

import json

from click.testing import CliRunner, Result

from pipeline.cli.main import cli
from tests.endpoint.fake_server import FakeServer, answer_text


def generate(server: FakeServer, *options: str) -> Result:
    return CliRunner().invoke(cli, ["generate", "--url", server.url, "--json", *options])


def test_a_prompt_is_completed_by_a_server():
    with FakeServer() as server:
        done = generate(server, "--prompt", "one two three", "--max-tokens", "2")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["generated_text"] == answer_text("one two three", 2)
    assert "prompt" in server.requests[-1].body


def test_a_chat_goes_to_the_model_with_that_name():
    with FakeServer(model="m") as server:
        done = generate(server, "--prompt", "one two", "--system", "be brief", "--model", "m")
    assert done.exit_code == 0, done.output
    assert server.requests[-1].body["model"] == "m"
    assert [message["role"] for message in server.requests[-1].body["messages"]] == ["system", "user"]


def test_options_of_our_own_engine_are_refused():
    with FakeServer() as server:
        done = generate(server, "--prompt", "one", "--dtype", "float32")
    assert done.exit_code == 2
    assert "engine.dtype: has no effect with a server" in done.output
    assert not server.requests
