"""Tokens that the engine counts against those that a server bills, and grants that it never exceeds."""

import json
import time
from typing import Any

import pytest

from pipeline.endpoint import engine as module
from pipeline.endpoint.engine import EndpointEngine
from pipeline.endpoint.meter import IMAGE_TOKENS, MESSAGE_TOKENS, Meter, Reservation, Usage
from pipeline.engine.completion import Completion
from pipeline.engine.sampling_params import SamplingParams
from pipeline.errors import EngineUnusable
from pipeline.prices import Prices
from tests.endpoint.fake_server import FakeServer
from tests.endpoint.test_engine import opened, request, short_waits, steps

__all__ = ["short_waits"]  # a fixture
PRICES = {"input": 2.0, "cached_input": 1.0, "output": 10.0}
TOKENS = ("prompt_tokens", "cached_tokens", "generated_tokens")
LONGER = {"max_tokens": None, "max_completion_tokens": 40}  # than the job's max_tokens
SOME = {"every": 4}


def assert_counted(engine: EndpointEngine, server: FakeServer, is_exact: bool) -> None:
    """Check that the ledger equals the counters, or is between those with and without unmetered requests."""
    counted, ledger = engine.counters(), server.ledger
    assert counted["open_prompt_tokens"] == counted["open_generated_tokens"] == 0
    if is_exact:
        assert {name: counted[name] for name in TOKENS} == {name: getattr(ledger, name) for name in TOKENS}
        assert counted["num_unmetered"] == 0
    else:
        assert counted["num_unmetered"] > 0
        for name in "prompt_tokens", "generated_tokens":
            assert counted[name] <= getattr(ledger, name) <= counted[name] + counted[f"unmetered_{name}"], name


def run(engine: EndpointEngine, num_rows: int = 40) -> list[Completion]:
    """Compute rows until all have ended, or the engine fails."""
    for index in range(num_rows):
        engine.add(request(index, is_chat=True))
    done: list[Completion] = []
    try:
        while engine.has_unfinished:
            done += engine.step()
    except EngineUnusable:
        pass
    return done


@pytest.mark.parametrize("metrics", [True, False], ids=["plain", "streamed"])
@pytest.mark.parametrize(("behaviour", "is_exact"), [
    ({}, True), ({"cached_tokens": 3}, True), ({"usage": {"kind": "too_large", **SOME}}, True),
    ({"content_filter": SOME}, True), ({"refusal": {"kind": "I cannot do that.", **SOME}}, True),
    ({"finish_reason": {"kind": "pause", **SOME}}, True), ({"choice_error": {"kind": "lost", **SOME}}, True),
    ({"tool_calls": SOME}, True), ({"duplicate": SOME}, True), ({"model_name": {"kind": "other", "after": 12}}, True),
    ({"error": {"status": 403, **SOME}}, True), ({"error": {"status": 401, "after": 12}}, True),
    ({"error": {"status": 500, "body": {"usage": {"prompt_tokens": 7, "completion_tokens": 9}}, **SOME}}, True),
    ({"usage": {"kind": "missing", **SOME}}, False), ({"usage": "negative"}, False), ({"usage": "text"}, False),
    ({"truncate": SOME}, False), ({"truncate": {"kind": "clean", **SOME}}, False), ({"html": SOME}, False),
    ({"truncate": {"match": "word3."}}, False),
], ids=str)  # fmt: skip
def test_all_answers_are_counted(behaviour: dict[str, Any], is_exact: bool, metrics: bool):
    with FakeServer(metrics=metrics, **behaviour) as server, opened(server, route="chat") as engine:
        run(engine)
        assert server.ledger.generated_tokens > 10
        assert_counted(engine, server, is_exact)


def test_usage_above_max_tokens_is_trusted():
    with FakeServer() as server, opened(server, route="chat", extra_body=LONGER) as engine:
        params = SamplingParams(max_tokens=2)
        engine.add(request(1, is_chat=True, params=params))
        engine.add(request(2, is_chat=True, params=params, prompt="a " * 50))
        done = steps(engine)
        assert [done[index].num_generated_tokens for index in (1, 2)] == [4, 40]
        assert_counted(engine, server, is_exact=True)


def test_a_stalled_server_is_counted():
    behaviour = {"seconds_per_request": 0.01, "hang": {"match": "word", "after": 5}}
    with (
        FakeServer(**behaviour) as bad,
        FakeServer() as good,
        opened(bad, good, route="chat", stall_timeout_s=0.3) as engine,
    ):
        assert len(run(engine)) == 40
        counted = engine.counters()
        assert counted["num_unmetered"] >= 1
        for name in "prompt_tokens", "generated_tokens":
            billed = getattr(bad.ledger, name) + getattr(good.ledger, name)
            assert counted[name] <= billed <= counted[name] + counted[f"unmetered_{name}"]


def begun(engine: EndpointEngine, num_rows: int = 60) -> list[Completion]:
    for index in range(num_rows):
        engine.add(request(index, is_chat=True))
    done: list[Completion] = []
    while not done:
        done += engine.step()
    return done


@pytest.mark.parametrize("metrics", [True, False])
def test_a_drain_sends_nothing_and_keeps_the_rows_of_open_requests(metrics: bool):
    with (
        FakeServer(slots=4, seconds_per_request=0.02, metrics=metrics) as server,
        opened(server, route="chat") as engine,
    ):
        first = len(server.requests)
        done = begun(engine)
        engine.drain()
        num_sent = len(server.requests)
        engine.add(request(100, is_chat=True))  # on its way when the drain began
        done += [one for _ in range(400) if engine.has_unfinished for one in engine.step()]
        assert not engine.has_unfinished
        assert len(server.requests) <= num_sent + 16  # a window that was sent, and not yet received
        assert len({one.row_id for one in done}) == len(done) == len(server.requests) - first < 60
        assert_counted(engine, server, is_exact=True)


def test_a_drain_forgets_rows_that_wait_or_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RETRY_S", 60.0)
    with FakeServer(error={"match": "word3.", "status": 500}) as server, opened(server, route="chat") as engine:
        begun(engine, 4)
        while len(server.requests) < 4:
            engine.step()
        engine.drain()
        begin_s = time.monotonic()
        while engine.has_unfinished:
            engine.step()
        assert time.monotonic() - begin_s < 20
    with (
        FakeServer(truncate={"match": "word"}, seconds_per_request=1.0) as server,
        opened(server, route="chat") as engine,
    ):
        engine.add(request(1, is_chat=True))
        while server.accepted.now == 0:
            engine.step()
        engine.drain()
        while engine.has_unfinished:
            assert engine.step() == []
        assert_counted(engine, server, is_exact=False)


def test_abandoned_requests_are_counted_and_end_at_once():
    with FakeServer(slots=4) as server, opened(server, route="chat") as engine:
        server.behaviour.seconds_per_request = 60.0
        for index in range(40):
            engine.add(request(index, is_chat=True))
        while server.accepted.now < 16:
            engine.step()
        assert engine.counters()["open_generated_tokens"] >= 16 * 8
        begin_s = time.monotonic()
        engine.abandon()
        assert time.monotonic() - begin_s < 10
        assert not engine.has_unfinished
        assert_counted(engine, server, is_exact=False)
        assert engine.counters()["num_unmetered"] == len(server.requests) - 2


def request_costs(meter: Meter, **body: Any) -> tuple[int, int]:
    reserved = meter.reserve(body, 16)
    return reserved.prompt_tokens, reserved.generated_tokens


def test_reservations_follow_the_request_as_it_is_sent():
    meter = Meter(Prices(usd_per_million=PRICES), True)
    assert request_costs(meter, prompt=[1, 2, 3], max_tokens=5) == (3, 5)
    assert request_costs(meter, prompt="é" * 10, max_tokens=5, n=3) == (10, 15)
    assert request_costs(meter, prompt="a" * 20, max_completion_tokens=50, max_tokens=5) == (10, 50)
    assert request_costs(meter, prompt="a" * 20) == (10, 16)
    assert request_costs(meter, input="a" * 20, dimensions=4) == (10, 0)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    parts = [{"type": "text", "text": "a" * 20}, image, image]
    messages = [{"role": "system", "content": "b" * 4}, {"role": "user", "content": parts}]
    expected = 12 + 2 * MESSAGE_TOKENS + 2 * IMAGE_TOKENS
    assert request_costs(meter, messages=messages) == (expected, 16)
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = request_costs(meter, messages=messages, tools=tools)[0] - expected
    assert more == -(-len(json.dumps(tools)) // 2)


def test_estimates_follow_the_highest_ratio_of_answers():
    meter = Meter(Prices(usd_per_million=PRICES), True)
    for tokens, expected in (5, 100), (30, 300), (20, 300):
        meter.open(meter.reserve({"prompt": "a" * 20}, 16)).pay(Usage(tokens, 0, 1))
        assert meter.reserve({"prompt": "a" * 200}, 16).prompt_tokens == expected
    assert meter.reserve({"prompt": [1, 2]}, 16).prompt_tokens == 2


def test_a_bill_is_settled_once_and_unknown_ones_are_logged_a_few_times(capsys: pytest.CaptureFixture[str]):
    meter = Meter(Prices(usd_per_million=PRICES), True)
    bill = meter.open(Reservation(10, 20))
    bill.pay(Usage(1, 0, 2))
    bill.lose("late")
    assert (meter.counts["prompt_tokens"], meter.counts["num_unmetered"], meter.num_open) == (1, 0, 0)
    for _ in range(20):
        meter.open(Reservation(10, 20)).lose("cut off")
    logged = capsys.readouterr().out.splitlines()
    assert len(logged) == 5
    assert "(cut off): counted as 10 + 20" in logged[0]
    assert meter.counts["unmetered_generated_tokens"] == 400


BUDGETS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({"cached_tokens": 2}, {}, {}),
    ({}, {"extra_body": LONGER}, {}),
    ({}, {}, {"n": 3, "temperature": 1.0}),
    ({"usage": {"kind": "missing", "every": 3}}, {}, {}),
    ({"usage": "missing"}, {}, {"n": 2, "temperature": 1.0}),
    ({"truncate": {"every": 5}}, {}, {}),
    ({"error": {"status": 429, "every": 5}}, {}, {}),
]


@pytest.mark.parametrize(("behaviour", "config", "params"), BUDGETS, ids=str)
@pytest.mark.parametrize("metrics", [True, False], ids=["plain", "streamed"])
def test_grants_are_never_exceeded(
    behaviour: dict[str, Any], config: dict[str, Any], params: dict[str, Any], metrics: bool
):
    sampling, num_raises = SamplingParams(**{"max_tokens": 8, **params}), 0
    with (
        FakeServer(slots=16, metrics=metrics, **behaviour) as server,
        opened(server, route="chat", prices=Prices(usd_per_million=PRICES), has_budget=True, **config) as engine,
    ):
        num_probes = len(server.requests)
        for index in range(300):
            prompt = f"word{index}." + " a" * (index % 20)
            engine.add(request(index, is_chat=True, params=sampling, prompt=prompt))
        done = engine.step()
        assert (done, len(server.requests)) == ([], num_probes)
        granted = 0.0
        while engine.has_unfinished:
            done += engine.step()
            if needed := engine.needed_usd:
                counted = engine.counters()
                assert counted["needed_nanousd"] == pytest.approx(needed * 1e9, abs=2)
                assert counted["open_generated_tokens"] == 0
                num_sent = num_rows(server)
                engine.grant(granted)
                assert (engine.step(), num_rows(server)) == ([], num_sent)
                num_raises += 1
                granted = spent_usd(counted) + (needed if num_raises % 2 else 40 * needed)
                engine.grant(granted)
            assert server.ledger.usd(PRICES) <= granted + 1e-9 or granted == 0.0
        assert engine.needed_usd == 0.0
        assert spent_usd(engine.counters()) <= granted + 1e-9
    assert len({one.row_id for one in done}) == len(done) == 300
    assert {one.error for one in done} <= {None, "server_error"}
    assert num_raises >= 3


def num_rows(server: FakeServer) -> int:
    """Return the number of requests that are no probes."""
    return sum(received.prompts() != ["Hi"] for received in server.requests)


def spent_usd(counted: dict[str, int]) -> float:
    prompt = counted["prompt_tokens"] - counted["cached_tokens"] + counted["unmetered_prompt_tokens"]
    generated = counted["generated_tokens"] + counted["unmetered_generated_tokens"]
    cached = counted["cached_tokens"] * PRICES["cached_input"]
    return (prompt * PRICES["input"] + cached + generated * PRICES["output"]) / 1e6


def test_without_a_budget_nothing_waits_for_a_grant():
    with FakeServer() as server, opened(server, route="chat", prices=Prices(usd_per_million=PRICES)) as engine:
        assert len(run(engine)) == 40
        assert engine.needed_usd == 0.0
