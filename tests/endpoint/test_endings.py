"""Ends of jobs on a server before their last row: budgets, stops, servers that no restart heals; all against the ledger
of what the server would bill."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load_job
from pipeline.errors import EnvironmentFailed, Interrupted, LimitReached
from pipeline.job.running.run import run_job
from tests.endpoint.fake_server import FakeServer
from tests.endpoint.test_job import RUNS, assert_right, job_file, rows
from tests.faults.processes import family

pytestmark = pytest.mark.usefixtures("default_sighup")

PRICES = {"input": 100.0, "cached_input": 50.0, "output": 1000.0}
BUDGET_USD = 0.25  # for some forty rows


def runs_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "out").glob(RUNS))]


def accounted_usd(folder: Path) -> tuple[float, float]:
    """Return the cost in the records of all runs: of known tokens, and the most that unknown ones may add."""
    known = unknown = 0.0
    for run in runs_of(folder):
        for actor in run["actors"]:
            count = {"cached_tokens": 0, **actor["stats"]}
            known += (count["prompt_tokens"] - count["cached_tokens"]) * PRICES["input"] / 1e6
            known += count["cached_tokens"] * PRICES["cached_input"] / 1e6
            known += count["generated_tokens"] * PRICES["output"] / 1e6
            unknown += count["unmetered_prompt_tokens"] * PRICES["input"] / 1e6
            unknown += count["unmetered_generated_tokens"] * PRICES["output"] / 1e6
    return known, unknown


def check_ledger(server: FakeServer, folder: Path) -> None:
    known, unknown = accounted_usd(folder)
    assert known - 1e-9 <= server.ledger.usd(PRICES) <= known + unknown + 1e-9


def saved_rows(folder: Path) -> int:
    return sum(
        len(json.loads(path.read_text())["rows"]) for path in (folder / "out" / "_pipeline" / "partial").glob("*")
    )


LONGER = {"extra_body": {"max_tokens": None, "max_completion_tokens": 12}}
BUDGETS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({}, LONGER, {}),  # usage above sampling.max_tokens
    ({"usage": "missing"}, {}, {}),
    ({"truncate": {"every": 4}}, {}, {}),
    ({}, {}, {"n": 2, "temperature": 1.0}),
]


@pytest.mark.parametrize(("behaviour", "keys", "sampling"), BUDGETS, ids=str)
def test_a_budget_holds_on_the_servers_ledger_and_a_higher_one_finishes_the_job(
    tmp_path: Path, behaviour: dict[str, Any], keys: dict[str, Any], sampling: dict[str, Any]
):
    slow = {"slots": 8, "seconds_per_request": 0.05}
    sections: dict[str, Any] = {"engine": {"max_num_seqs": 8}, "sampling": sampling, "prompt": {"chat": {}}}
    with FakeServer(**slow, **behaviour) as server:
        cost = {"usd_per_million": PRICES, "budget_usd": BUDGET_USD}
        path = job_file(tmp_path, server.url, 120, cost=cost, server=keys, **sections)
        with pytest.raises(LimitReached, match=r"cost.budget_usd reached"):
            run_job(load_job(path))
        assert 0.5 * BUDGET_USD < server.ledger.usd(PRICES) <= BUDGET_USD
        check_ledger(server, tmp_path)
        (first,) = runs_of(tmp_path)
        assert (first["outcome"], first["stopped_by"]) == ("interrupted", "cost.budget_usd")
        num_kept = first["rows_written"] + saved_rows(tmp_path)
        assert num_kept >= 10
        for name, fault in (("usage", None), ("truncate", None)):
            setattr(server.behaviour, name, fault)
        server.behaviour.seconds_per_request = 0.0
        num_sent = len(server.requests)
        path = job_file(tmp_path, server.url, 120, cost={**cost, "budget_usd": 100.0}, server=keys, **sections)
        report = run_job(load_job(path))
        check_ledger(server, tmp_path)
        assert len(server.requests) - num_sent <= 120 - num_kept + 4  # the first requests of the run, and no row twice
    assert report.cost.total_usd == pytest.approx(accounted_usd(tmp_path)[0])
    assert len(rows(tmp_path)) == 120


def test_a_stop_sends_nothing_more_and_keeps_every_answer_that_was_paid(tmp_path: Path):
    """Rows finish every few milliseconds, in one unit."""
    with FakeServer(slots=4, seconds_per_request=0.02) as server:
        sections: dict[str, Any] = {"output": {"rows_per_file": 400}, "engine": {"max_num_seqs": 4}}
        path = job_file(tmp_path, server.url, 400, run={"drain_timeout": "2 s"}, **sections)

        def stop() -> None:
            while server.num_answered < 40:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=stop, daemon=True).start()
        with pytest.raises(Interrupted, match="Stopped by SIGINT"):
            run_job(load_job(path))
        num_answered = server.num_answered
        check_ledger(server, tmp_path)
        assert server.running.now == 0
        num_kept = saved_rows(tmp_path)
        assert 30 < num_kept < 300
        assert num_answered - num_kept <= 6  # first requests
        run_job(load_job(path))
        assert server.num_answered <= 400 + 2 * 6
        check_ledger(server, tmp_path)
    assert len(rows(tmp_path)) == 400


def test_requests_that_were_open_when_the_engines_process_died_are_counted_as_unknown(tmp_path: Path):
    with FakeServer(slots=64, seconds_per_request=0.6, metrics=False) as server:
        path = job_file(tmp_path, server.url, 200, engine={"max_num_seqs": 64}, prompt={"chat": {}})

        def kill() -> None:
            while server.num_answered < 80 or server.running.now < 30:
                time.sleep(0.01)
            time.sleep(0.3)  # all have been reported, and the next answers take as long again
            (engine,) = family([os.getpid()])["engine"]
            os.kill(engine, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        report = run_job(load_job(path))
        check_ledger(server, tmp_path)
        assert accounted_usd(tmp_path)[0] < server.ledger.usd(PRICES)
    assert report.work.engine_restarts == 1
    assert len(rows(tmp_path)) == 200


ENDINGS = [
    ("error", {"status": 401, "body": {"error": {"message": "key revoked"}}, "after": 60}, "key revoked"),
    ("error", {"status": 403, "body": {"error": {"message": "account closed"}}, "after": 60}, "account closed"),
    ("error", {"status": 402, "body": {"error": {"message": "no credit"}}, "after": 60}, "no credit"),
    ("model_name", {"kind": "another-model", "after": 60}, r"'another-model'.*accept_models"),
]


@pytest.mark.parametrize(("name", "fault", "message"), ENDINGS, ids=lambda value: str(value)[:40])
def test_a_server_that_no_restart_heals_ends_the_run_and_finished_rows_are_kept(
    tmp_path: Path, name: str, fault: dict[str, Any], message: str
):
    with FakeServer(slots=8, seconds_per_request=0.01, **{name: fault}) as server:
        path = job_file(tmp_path, server.url, 200, output={"rows_per_file": 100}, prompt={"chat": {}})
        with pytest.raises(EnvironmentFailed, match=message) as raised:
            run_job(load_job(path))
        assert raised.value.exit_code == 3
        check_ledger(server, tmp_path)
        (first,) = runs_of(tmp_path)
        assert [actor["restarts"] for actor in first["actors"]] == [0]
        num_kept = first["rows_written"] + saved_rows(tmp_path)
        assert 40 <= num_kept < 100
        setattr(server.behaviour, name, None)
        num_sent = len(server.requests)
        run_job(load_job(path))
        assert len(server.requests) - num_sent <= 200 - num_kept + 4
        check_ledger(server, tmp_path)
    found = rows(tmp_path)
    assert len(found) == 200
    for name in found.keys() - {"row5"}:
        assert_right(found[name])
