"""Servers in the forms of a dozen products: each row ends right, and all that is billed is counted."""

from typing import Any

import pytest

from pipeline.engine.sampling_params import SamplingParams
from tests.endpoint.dialects import DIALECTS
from tests.endpoint.fake_server import FakeServer, answer_text
from tests.endpoint.test_engine import assert_right, opened, prompt_of, request, short_waits, steps

__all__ = ["short_waits"]  # a fixture
NUM_ROWS = 200
LONG = " d" * 20


@pytest.mark.parametrize("name", DIALECTS)
def test_a_server_of_each_dialect(name: str):
    dialect = DIALECTS[name]
    with FakeServer(dialect=name, metrics=False, too_long=16 if dialect.too_long else 1 << 30) as server:
        url = server.url + dialect.base + dialect.query
        with opened(url, route="chat", **dialect.config) as engine:
            first = len(server.requests)
            for index in range(NUM_ROWS):
                text = prompt_of(index) + LONG * (index == 7)
                engine.add(request(index, is_chat=True, prompt=text))
            done = steps(engine)
            counted = engine.counters()
    assert len(done) == NUM_ROWS
    assert len(server.requests) - first == NUM_ROWS, "each is sent once"
    if dialect.too_long:
        assert done.pop(7).error == "prompt_too_long"
    else:
        done.pop(7)
    assert_right(done)
    assert {one.finish_reason for one in done.values()} == {"stop"}
    for kind in "prompt_tokens", "generated_tokens":
        known, billed = counted[kind], getattr(server.ledger, kind)
        if dialect.has_usage:
            assert known == billed > NUM_ROWS
        else:
            assert 0 <= known < billed <= known + counted[f"unmetered_{kind}"]


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if "n" in dialect.ignored])
def test_samples_of_a_server_that_computes_one_are_requested_one_by_one(name: str):
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=11)
    seeds = [None] * 3 if "seed" in DIALECTS[name].ignored else [11, 12, 13]
    with (
        FakeServer(dialect=name, metrics=False, error={"status": 503, "every": 9}) as server,
        opened(server, route="chat", params=params) as engine,
    ):
        for index in range(20):
            engine.add(request(index, is_chat=True, params=params))
        done = steps(engine)
        for index in range(20):
            expected = [answer_text(prompt_of(index), 8, 0, seed) for seed in seeds]
            assert [one.text for one in done[index].each] == expected
        counted = engine.counters()
    assert (counted["open_prompt_tokens"], counted["num_unmetered"]) == (0, 0)
    assert counted["generated_tokens"] == server.ledger.generated_tokens
    assert all("n" not in one.body for one in server.requests[-20:])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gateway", {"truncate": {"every": 11}}),
        ("azure", {"truncate": {"every": 11}}),
        ("tgi", {"truncate": {"every": 11}}),
        ("ollama", {"error": {"status": 403, "match": "word3."}}),
    ],
)
def test_probes_of_a_running_server_have_the_form_of_its_rows(name: str, fault: dict[str, Any]):
    """And rows that are sent meanwhile keep it. A row and the probes before its next try are fewer than 11 requests."""
    dialect = DIALECTS[name]
    params = SamplingParams(max_tokens=8, n=2 if "n" in dialect.ignored else 1, temperature=1.0)
    with (
        FakeServer(dialect=name, metrics=False, seconds_per_request=0.005, **fault) as server,
        opened(server.url + dialect.base + dialect.query, route="chat", params=params, **dialect.config) as engine,
    ):
        for index in range(60):
            engine.add(request(index, is_chat=True, params=params))
        done = steps(engine)
    if "error" in fault:
        assert done.pop(3).error == "rejected"
    for index, one in done.items():
        assert [each.text for each in one.each] == [answer_text(prompt_of(int(str(index))), 8)] * params.n
