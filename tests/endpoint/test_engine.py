"""The engine of servers against fake ones: each row ends once, whatever the servers do."""

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.endpoint import engine as module
from pipeline.endpoint.body import chat_body, completion_body
from pipeline.endpoint.engine import EndpointEngine
from pipeline.endpoint.spec import EndpointConfig, EndpointRequest
from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import ConfigError, EnvironmentFailed
from tests.endpoint.fake_server import FakeServer, answer_text

KEY = "sk-very-secret-1234567890"
QUOTED = {"error": {"message": f"Incorrect API key provided: {KEY}"}}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"RETRY_S": 0.02, "PROBE_S": 0.02, "REJOIN_S": 0.1, "LOOK_S": 0.05}.items():
        monkeypatch.setattr(module, name, seconds)


def prompt_of(index: int) -> str:
    return f"word{index}. a b c"


def request(
    index: int, is_chat: bool = False, params: SamplingParams | None = None, prompt: str = "", **fields: Any
) -> EndpointRequest:
    params, prompt = params or SamplingParams(max_tokens=8), prompt or prompt_of(index)
    messages = [{"role": "user", "content": prompt}]
    body = chat_body(messages, params, {}) if is_chat else completion_body(prompt, params)
    return EndpointRequest(index, body, params, **fields)


@contextlib.contextmanager
def opened(*servers: FakeServer | str, **config: Any) -> Iterator[EndpointEngine]:
    urls = tuple(server if isinstance(server, str) else server.url for server in servers)
    engine = EndpointEngine(EndpointConfig(urls=urls, **{"route": "completion", **config}), lambda text: None)
    with contextlib.closing(engine):
        yield engine


def steps(engine: EndpointEngine) -> dict[object, Completion]:
    """Return the completions by row; no row may end twice."""
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    assert max(Counter(one.row_id for one in done).values()) == 1
    return {one.row_id: one for one in done}


def compute(*servers: FakeServer | str, num_rows: int = 40, **config: Any) -> dict[object, Completion]:
    with opened(*servers, **config) as engine:
        for index in range(num_rows):
            engine.add(request(index, is_chat=config.get("route") == "chat"))
        done = steps(engine)
    assert set(done) == set(range(num_rows))
    return done


def assert_right(done: dict[object, Completion]) -> None:
    for index, one in done.items():
        assert (one.error, one.error_message, one.text) == (None, None, answer_text(prompt_of(int(str(index))), 8))


@pytest.mark.parametrize("behaviour", [{}, {"metrics": False}, {"slots": 3, "seconds_per_request": 0.01},
    {"error": {"status": 503, "every": 3}}, {"error": {"status": 429, "after": 10, "first": 20, "retry_after": 0.1}},
    {"error": {"status": 500, "every": 4}}, {"limit": 3, "seconds_per_request": 0.005}, {"truncate": {"every": 4}},
    {"truncate": {"every": 4, "kind": "clean"}, "metrics": False}, {"truncate": {"every": 4}, "metrics": False},
    {"html": {"every": 4}}, {"duplicate": {"every": 4}}, {"error": {"status": 502, "every": 3}},
    {"usage": "missing"}, {"usage": "negative"}, {"usage": "text"}, {"usage": "too_large"},
    {"refuse_connections": 5}], ids=str)  # fmt: skip
def test_all_rows_are_right_on_servers_with_faults(behaviour: dict[str, Any]):
    for route in "completion", "chat":
        with FakeServer(**behaviour) as server:
            done = compute(server, route=route)
        assert_right(done)
        counted = {None: 4, "too_large": 1_000_000}.get(behaviour.get("usage"), 0)
        assert {one.num_generated_tokens for one in done.values()} == {counted}
        assert {one.num_prompt_tokens for one in done.values()} <= {0, 4}
        assert server.accepted.max <= behaviour.get("limit", 1000)


def test_a_row_that_always_fails_is_an_error_row():
    with FakeServer(
        html={"match": "word3."}, too_long=5, error={"match": "word4.", "status": 500, "body": QUOTED}
    ) as server:
        done = compute(server, api_key=KEY)
    assert_right({index: one for index, one in done.items() if index not in (3, 4)})
    for index, reason in (3, "not JSON"), (4, "Incorrect API key"):
        assert done[index].error == "server_error"
        assert "each of 5 tries failed" in (done[index].error_message or "")
        assert reason in (done[index].error_message or "")
    assert KEY not in str(done)


def test_a_row_that_was_not_sent_has_not_failed():
    """A server that ends well answers on its open connections, and refuses others."""
    for metrics in (True, False) * 3:
        with (
            FakeServer(no_new_connections=True, metrics=metrics) as server,
            contextlib.suppress(EnvironmentFailed),  # if each probe needed a new connection
        ):
            assert_right(compute(server, num_rows=200))


def failure(server: FakeServer | str, num_rows: int = 40, **config: Any) -> str:
    with pytest.raises(EnvironmentFailed) as caught:  # EngineUnusable too
        compute(server, num_rows=num_rows, **config)
    assert KEY not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("metrics", [True, False])
def test_servers_that_fail_for_good_end_the_engine(metrics: bool):
    with FakeServer(metrics=metrics, model_name={"kind": "other-model", "after": 12}) as server:
        assert "serves 'other-model', and the first answer was of 'fake-model'" in failure(server)
    with FakeServer(metrics=metrics, hang={"match": "word3."}) as server:
        assert "no token for 0.3 s (run.stall_timeout)" in failure(server, stall_timeout_s=0.3)
    with FakeServer(metrics=metrics, die={"match": "word20."}) as server:
        assert server.url in failure(server)
    with FakeServer(metrics=metrics, error={"status": 401, "after": 12, "body": QUOTED}) as server:
        assert "rejects all requests: status 401: Incorrect API key" in failure(server, api_key=KEY)


def test_a_server_without_an_answer_is_named_once_in_plain_words():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # never listens
        port = closed.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        message = failure(url, start_timeout_s=0.1)
        assert f"{url}/v1: it refuses connections. Start the server, or correct server.base_url" in message
        with pytest.raises(ConfigError) as caught:
            compute("http://no-such-host.invalid:1", start_timeout_s=60)
    with FakeServer(die={"match": "word20."}) as server:
        down = failure(server)
    assert "no address found for host 'no-such-host.invalid'" in str(caught.value)
    for text in (message, down, str(caught.value)):
        assert "ssl:" not in text
        assert "ClientConnector" not in text
    assert down.count("it refuses connections") == 1
    assert down.count(server.url) == 1


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_rows_of_a_server_that_fails_are_computed_by_the_others(fault: str):
    with FakeServer(seconds_per_request=0.01, **{fault: {"match": "word", "after": 5}}) as bad, FakeServer() as good:
        assert_right(compute(bad, good, num_rows=100, stall_timeout_s=1.0))
        assert len(bad.requests) > 5


def test_servers_share_the_rows_and_join_late():
    with (
        socket.socket() as closed,
        FakeServer(seconds_per_request=0.02) as one,
        FakeServer(seconds_per_request=0.02) as two,
    ):
        closed.bind(("127.0.0.1", 0))  # never listens
        assert_right(compute(one, f"http://127.0.0.1:{closed.getsockname()[1]}", two, num_rows=200))
        assert min(one.num_answered, two.num_answered) > 20
    with FakeServer(refuse_connections=3) as late, FakeServer(seconds_per_request=0.2) as server:
        with opened(server, late, max_concurrency=2) as engine:
            for index in range(10):
                engine.add(request(index))
            assert_right(steps(engine))
        assert late.num_answered > 2  # more than the probe


def test_wrong_settings_end_the_start_with_the_key_to_change():
    with (
        FakeServer(api_key="sk-other") as server,
        pytest.raises(ConfigError, match=r"^server\.api_key: .* 401") as caught,
    ):
        compute(server, api_key=KEY)
    assert KEY not in str(caught.value)
    with (
        FakeServer(error={"status": 401, "body": QUOTED}) as server,
        pytest.raises(ConfigError, match="api_key") as caught,
    ):
        compute(server, api_key=KEY)
    assert KEY not in str(caught.value)
    with FakeServer(other_models=["second"]) as server:
        with pytest.raises(ConfigError, match=r"^server\.model: .* 2 models: fake-model, second"):
            compute(server)
        assert_right(compute(server, requested_model="fake-model"))
        with pytest.raises(ConfigError, match="serves 'fake-model', and the output was begun with 'first'"):
            compute(server, requested_model="fake-model", expected_model="first")
    with FakeServer() as server, pytest.raises(ConfigError, match=r"the first request failed: .*expected ids"):
        compute(server, params=SamplingParams(logprobs=1), extra_body={"return_tokens_as_token_ids": False})
    begin_s = time.monotonic()
    with FakeServer(refuse_connections=1 << 30) as server:
        assert "within 0 s (server.start_timeout)" in failure(server, start_timeout_s=0.1)
    assert time.monotonic() - begin_s < 20


def test_control_tokens_are_sent_as_tokens_or_only_if_allowed():
    with FakeServer() as server:
        for allowed, ids, error in (False, (), "control_tokens"), (True, (), None), (False, (5, 6), None):
            with opened(server, allow_control_tokens=allowed) as engine:
                engine.add(request(1, prompt_token_ids=ids, control_token="<|end|>"))
                (done,) = steps(engine).values()
            assert done.error == error
            assert (error is None) or "'<|end|>'" in (done.error_message or "")
            if error is None:
                assert server.requests[-1].body["prompt"] == (list(ids) or prompt_of(1))


def test_extra_body_adds_and_removes_fields():
    with FakeServer() as server:
        compute(server, num_rows=1, extra_body={"temperature": None, "priority": 3})
    assert "temperature" not in server.requests[-1].body
    assert server.requests[-1].body["priority"] == 3
