"""Prometheus metrics of a run: real names, sums that never fall, an address that ends with the run."""

import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pipeline.job.telemetry import progress
from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.metrics import MetricsServer, Snapshot
from pipeline.job.telemetry.progress import Progress
from pipeline.job.telemetry.status import Status
from pipeline.machine.liveness import ACTOR_SILENT_S
from pipeline.prices import Prices
from pipeline.report.record.quality_stats import QualityStats
from pipeline.report.record.row_stats import RowStats, Timing, latency_of
from pipeline.report.record.run_record import ActorRecord, no_phases
from tests.job.conftest import run

MONITORING = Path(__file__).parents[3] / "infra" / "monitoring"
STATS = {"num_steps": 4, "prompt_tokens": 90, "cached_tokens": 10, "generated_tokens": 20, "batch_sum": 40,
         "kv_used_ppm_sum": 2_000_000, "num_preemptions": 1}  # fmt: skip


def actor(number=0, report_number=1, **record):
    given = {"stats": STATS, "phases_us": {**no_phases(), "decode": 3_600_000_000}} | record
    return ActorState(ActorRecord(number, **given), report_number=report_number)


def snapshot(**changed):
    rows = RowStats(latency_of([Timing(0, 2_000_000, 8_000_000, 7)]))
    status = Status("0001-x", "running", rows_total=100, rows_done=8, rows_written=5, units=1, elapsed_s=3.0)
    given = {"actors": [actor(host="h", storage_retries={"reset": 1})], "rows": rows, "error_rows": {"empty_prompt": 2}}
    made = Snapshot(
        job="my job",
        status=status,
        **given,
        health=["ready"],
        progress=Progress(1800),
        prices=Prices(hourly_usd=2.5),
    )
    return replace(made, **changed)


@pytest.fixture
def server():
    made = MetricsServer("127.0.0.1:0")
    yield made
    made.close()


def get(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def shown(server):
    """Return every sample by its name and labels."""
    families = list(text_string_to_metric_families(get(server)))
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *sorted(v for k, v in s.labels.items() if k not in ("job_name", "run"))): s for s in samples}


def test_prometheus_reads_what_is_shown(server):
    assert get(server) == ""
    server.snapshot = snapshot()
    found = shown(server)
    value = {key: sample.value for key, sample in found.items()}
    assert value["pipeline_rows",] == 100
    assert value["pipeline_rows_written",] == 5
    assert value["pipeline_generation_tokens_total", "0"] == 20
    assert value["pipeline_engine_kv_cache_usage_ratio_total", "0"] == 2.0
    assert value["pipeline_error_rows_total", "empty_prompt"] == 2
    assert value["pipeline_phase_seconds_total", "0", "decode"] == 3600
    assert value["pipeline_cost_usd_total",] == 2.5
    assert value["pipeline_actor_health", "0", "h", "ready"] == 1
    assert value["pipeline_actor_health", "0", "h", "silent"] == 0
    assert value["pipeline_e2e_request_latency_seconds_bucket", "5.0"] == 0
    assert value["pipeline_e2e_request_latency_seconds_bucket", "10.0"] == 1
    assert value["pipeline_inter_token_latency_seconds_bucket", "1.0"] == 1
    assert not [key for key in found if key[0].startswith("pipeline_quality")]
    for job in ("my job", 'a"b', "a\nb", "a\\b", "é{}"):
        server.snapshot = snapshot(job=job)
        assert shown(server)["pipeline_rows",].labels == {"job_name": job, "run": "0001-x"}


def test_a_quality_watch_is_shown_once_it_compared_a_row(server):
    server.snapshot = snapshot(rows=RowStats(quality=QualityStats.of_row(40, 38, 3_000_000_000, True)))
    value = {key[0].removeprefix("pipeline_quality_"): sample.value for key, sample in shown(server).items()}
    names = ("rows_total", "tokens_total", "agreed_tokens_total", "kl_nats_total")
    assert [value[name] for name in names] == [1, 40, 38, 3]


def test_progress_shows_the_health_of_each_actor_and_the_time_without_progress(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    watch = Progress(limit_s=1800)

    def healths(rows_done, actors):
        watch.look(rows_done, actors)
        return [watch.health(actor) for actor in actors], watch.still_s

    loading = replace(actor(1, stats={}), loading="reading weights")
    actors = [actor(0), loading, actor(2, node_lost=True), actor(3, released=True)]
    assert healths(1, actors) == (["ready", "loading", "lost", "released"], 0.0)
    now = ACTOR_SILENT_S + 1
    starting = actor(4, stats={}, phases_us={**no_phases(), "startup": 5})
    assert healths(1, [actor(0), starting]) == (["silent", "starting"], 0.0)
    now += 10
    assert healths(1, [actor(0, report_number=2), starting]) == (["ready", "starting"], 10.0)
    assert healths(2, [actor(0, report_number=3)]) == (["ready"], 0.0)


def test_an_address_in_use_is_a_warning_of_the_run(job, without_ray):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        _, statuses = run(job.rows(["text"]), metrics=f"127.0.0.1:{occupied.getsockname()[1]}")
    assert "in use; this run shows no metrics" in statuses[-1].warning


def test_a_run_shows_its_metrics_and_the_address_ends_with_it(job, without_ray):
    """Counters do not fall when an engine's process ends and another one begins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seen = []

    def look(status):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                seen.append({(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples})
        except urllib.error.URLError:
            assert not status.rows_done
        return False

    job.rows([f"text {i}" for i in range(120)]).fake(step_s=0.02)
    run(job, [(look, 0)], metrics=f"127.0.0.1:{port}")
    counters = {key for found in seen for key in found if key[0].endswith(("_total", "_bucket", "_count"))}
    assert counters
    for key in counters:
        values = [found[key] for found in seen if key in found]
        assert values == sorted(values), key
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)


def test_the_dashboard_the_alerts_and_the_page_name_existing_metrics(server):
    server.snapshot = snapshot(rows=RowStats(quality=QualityStats.of_row(40, 38, 3_000_000_000, True)))
    names = {name for name, *_ in shown(server)}
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules]
    assert len(expressions) > 20
    for expression in expressions:
        assert set(re.findall(r"pipeline_\w+", expression)) <= names, expression
    table = MONITORING.parents[1].joinpath("docs/monitoring.md").read_text().partition("## What is shown")[2]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    documented = {f"pipeline_{name}" for cell in first_cells for name in re.findall(r"`(\w+)", cell)}
    assert documented == {re.sub(r"_(bucket|sum|count)$", "", name) for name in names if not name.endswith("_created")}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_when_they_should():
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
