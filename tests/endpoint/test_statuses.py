"""Rejections, names of models, refusals and tool calls after the start: what becomes of the row, and of the run."""

import json
from typing import Any

import pytest

from pipeline.endpoint.engine import EndpointEngine
from pipeline.engine.completion import Completion
from pipeline.errors import ConfigError, EngineUnusable
from tests.endpoint.fake_server import CALL, FakeServer
from tests.endpoint.test_engine import assert_right, compute, opened, prompt_of, request, short_waits, steps

__all__ = ["short_waits"]  # a fixture
NO = {"error": {"message": "No endpoints support this."}}
FIRST = 2  # requests of a start, on the chat route
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
PLAIN_AND_STREAMED = pytest.mark.parametrize("metrics", [True, False], ids=["plain", "streamed"])


def collect(engine: EndpointEngine, done: list[Completion]) -> None:
    while engine.has_unfinished:
        done += engine.step()


def until_error(engine: EndpointEngine, num_rows: int = 40) -> tuple[dict[object, Completion], str]:
    """Return the finished rows, and the error that follows them."""
    for index in range(num_rows):
        engine.add(request(index, is_chat=True))
    done: list[Completion] = []
    with pytest.raises(EngineUnusable) as caught:
        collect(engine, done)
    assert_right({one.row_id: one for one in done})
    return {one.row_id: one for one in done}, str(caught.value)


@PLAIN_AND_STREAMED
@pytest.mark.parametrize("status", [402, 403, 404, 405])
def test_a_rejected_row_is_an_error_row_and_costs_one_probe(status: int, metrics: bool):
    with FakeServer(error={"match": "word3.", "status": status, "body": NO}, metrics=metrics) as server:
        done = compute(server, route="chat")
        assert len(server.requests) == FIRST + 40 + 1
    rejected = done.pop(3)
    assert rejected.error == "rejected"
    assert rejected.error_message == f"the server rejects the request (status {status}): No endpoints support this."
    assert_right(done)


def test_rejections_that_arrive_together_share_a_probe():
    with FakeServer(error={"match": "word", "status": 403, "body": NO}, seconds_per_request=0.05) as server:
        done = compute(server, route="chat", num_rows=64)
        assert {one.error for one in done.values()} == {"rejected"}
        assert len(server.requests) - FIRST - 64 <= 16


@PLAIN_AND_STREAMED
@pytest.mark.parametrize("status", [402, 403, 404, 405])
def test_a_server_that_rejects_all_rows_ends_the_engine_with_its_sentence(status: int, metrics: bool):
    fault = {"status": status, "after": 20, "body": NO}
    with FakeServer(error=fault, metrics=metrics, slots=8) as server, opened(server, route="chat") as engine:
        done, message = until_error(engine, num_rows=100)
        assert len(done) == server.num_answered - FIRST == 20 - FIRST
        num_sent = len(server.requests)
        assert num_sent < 100
        assert f"rejects all requests: status {status}: No endpoints support this." in message


def test_a_401_ends_the_engine_after_its_open_rows():
    # The open rows of the first window are slow, and end after the 401.
    fault = {"status": 401, "match": "word3.", "body": NO}
    with FakeServer(error=fault, seconds_per_request=0.3) as server, opened(server, route="chat") as engine:
        done, message = until_error(engine, num_rows=100)
        assert len(done) == server.num_answered - FIRST == 15
        assert len(server.requests) == FIRST + 16
        assert message.startswith(f"server.api_key: {server.url}/v1 rejects all requests: status 401: No endpoints")


def test_rows_of_a_server_with_a_wrong_key_move_to_others_and_it_is_never_asked_again():
    wrong = {"status": 401, "after": 12, "body": NO}
    with (
        FakeServer(error=wrong) as bad,
        FakeServer(seconds_per_request=0.01) as good,
        opened(bad, good, route="chat") as engine,
    ):
        for index in range(150):
            engine.add(request(index, is_chat=True))
        assert_right(steps(engine))
        num_sent = len(bad.requests)
        good.behaviour.seconds_per_request = 0.4  # several times as long as between probes
        for index in range(40):
            engine.add(request(index, is_chat=True))
        assert_right(steps(engine))
        assert len(bad.requests) == num_sent < 60


@pytest.mark.parametrize("other", [{"error": {"status": 403, "after": 14, "body": NO}}, {"die": {"after": 14}}])
def test_without_a_server_that_works_the_engine_ends(other: dict[str, Any]):
    with (
        FakeServer(error={"status": 401, "after": 12, "body": NO}) as bad,
        FakeServer(**other) as worse,
        opened(bad, worse, route="chat") as engine,
    ):
        done, message = until_error(engine, num_rows=200)
        assert f"{bad.url}/v1 rejects all requests: status 401" in message
        assert len(done) < 200


def test_a_server_that_comes_back_with_a_wrong_key_is_not_used():
    with (
        FakeServer(refuse_connections=2, api_key="sk-other") as late,
        FakeServer(seconds_per_request=0.2) as good,
        opened(good, late, route="chat", api_key="sk-mine", max_concurrency=2) as engine,
    ):
        for index in range(10):
            engine.add(request(index, is_chat=True))
        assert_right(steps(engine))
        assert len(late.requests) <= 1


# -- names of the model


@PLAIN_AND_STREAMED
def test_an_alias_answers_with_another_name(metrics: bool):
    with (
        FakeServer(model="chat-2026-05", metrics=metrics) as server,
        opened(server, route="chat", requested_model="chat") as engine,
    ):
        assert engine.resolved["model"] == "chat-2026-05"
        engine.add(request(1, is_chat=True))
        assert_right(steps(engine))


@PLAIN_AND_STREAMED
def test_an_answer_of_another_model_is_kept_back_and_ends_the_engine(metrics: bool):
    other = {"kind": "second", "after": 12}
    with FakeServer(model_name=other, metrics=metrics) as server, opened(server, route="chat") as engine:
        done, message = until_error(engine)
        assert len(done) == 12 - FIRST
        assert "serves 'second', and the first answer was of 'fake-model'" in message
        assert "server.accept_models" in message
        assert len(server.requests) < FIRST + 40
        assert engine.counters()["prompt_tokens"] == server.ledger.prompt_tokens
    with FakeServer(model_name=other, metrics=metrics) as server:
        assert_right(compute(server, route="chat", accept_models=("third", "second")))


@pytest.mark.parametrize("kind", ["empty", "absent", "router/fake-model"])
def test_streamed_answers_may_have_another_name_than_plain_ones_or_none(kind: str):
    with FakeServer(stream_model={"kind": kind}, metrics=False) as server:
        assert_right(compute(server, route="chat"))
    with FakeServer(stream_model={"kind": kind, "every": 2}, metrics=False) as server:
        if kind.startswith("router"):
            with pytest.raises((EngineUnusable, ConfigError)):
                compute(server, route="chat")
        else:
            assert_right(compute(server, route="chat"))


@PLAIN_AND_STREAMED
@pytest.mark.parametrize("kind", ["empty", "absent"])
def test_answers_without_a_name_are_not_compared(kind: str, metrics: bool):
    with (
        FakeServer(model_name={"kind": kind}, metrics=metrics) as server,
        opened(server, route="chat", expected_model="fake-model") as engine,
    ):
        assert engine.resolved["model"] == "fake-model"  # as requested
        engine.add(request(1, is_chat=True))
        assert_right(steps(engine))


@PLAIN_AND_STREAMED
def test_a_probe_is_sent_as_rows_are_sent(metrics: bool):
    with FakeServer(metrics=metrics) as server:
        compute(server, route="chat")
        options = [{name: one.body.get(name) for name in ("stream", "stream_options")} for one in server.requests]
    assert options[0]["stream"] is (None if metrics else True)
    assert all(each == options[0] for each in options)


def test_servers_of_one_job_and_resumed_runs_have_one_model():
    with FakeServer() as one, FakeServer(model="second") as two:
        different = r"^server: .* serves .*, and the first answer was of .*server\.accept_models"
        with pytest.raises(ConfigError, match=different):
            compute(one, two, route="chat")
        assert_right(compute(one, two, route="chat", accept_models=("fake-model", "second")))
        with pytest.raises(ConfigError, match=r"serves 'second', .* 'first'; .*'second' in server\.accept_models"):
            compute(two, route="chat", expected_model="first")
        assert_right(compute(two, route="chat", expected_model="first", accept_models=("second",)))
        with opened(two, route="chat", expected_model="first", accept_models=("second",)) as engine:
            two.behaviour.model = "third"
            assert "'third', and the output was begun with 'first'" in until_error(engine)[1]
    with FakeServer(model="second", model_name={"kind": "first", "after": 12}) as server:
        assert_right(compute(server, route="chat", expected_model="first", accept_models=("second",)))


# -- refusals, tool calls, failed choices


@PLAIN_AND_STREAMED
def test_a_refusal_is_an_error_row_with_the_models_sentence(metrics: bool):
    refusal = {"match": "word3.", "kind": "I cannot help with that."}
    with FakeServer(refusal=refusal, metrics=metrics) as server:
        done = compute(server, route="chat")
        assert len(server.requests) == FIRST + 40
    refused = done.pop(3)
    assert (refused.error, refused.error_message, refused.text) == ("refused", "I cannot help with that.", "")
    assert_right(done)


@PLAIN_AND_STREAMED
def test_tool_calls_are_kept_if_tools_were_sent(metrics: bool):
    with FakeServer(tool_calls={"match": "word3."}, metrics=metrics) as server:
        done = compute(server, route="chat", extra_body={"tools": TOOLS})
        called = done.pop(3)
        assert (called.error, called.text, called.finish_reason, called.num_tokens) == (None, "", "stop", 4)
        arguments = " ".join(prompt_of(3).split()[::-1])
        assert json.loads(called.tool_calls or "") == [
            {**CALL, "function": {**CALL["function"], "arguments": arguments}}
        ]
        assert {one.tool_calls for one in done.values()} == {None}
        assert_right(done)
        without = compute(server, route="chat")[3]
    assert without.error == "server_error"
    assert "calls a tool, and server.extra_body has no tools" in (without.error_message or "")


@PLAIN_AND_STREAMED
def test_a_choice_with_an_error_is_sent_again(metrics: bool):
    with FakeServer(choice_error={"kind": "upstream lost", "every": 4}, metrics=metrics) as server:
        assert_right(compute(server, route="chat"))
    with FakeServer(choice_error={"kind": "upstream lost", "match": "word3."}, metrics=metrics) as server:
        failed = compute(server, route="chat")[3]
    assert failed.error == "server_error"
    assert "choice 0 of the answer failed: upstream lost" in (failed.error_message or "")
