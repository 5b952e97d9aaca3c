"""A Ray cluster of several nodes on this machine: one dies mid-job, another joins late, and each row is written once.
An elastic pool grows and shrinks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from pipeline.data.units import UNIT_TOKENS
from pipeline.job.dataflow.spec import units_in_flight

ROOT = Path(__file__).parents[3]
TEXTS = [f"text {i} " + "x" * (i % 13) for i in range(480)]
NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 * 2**20}  # room for one actor and one reader
UNIT_ROWS = 8
IN_FLIGHT = units_in_flight(UNIT_ROWS, UNIT_ROWS, UNIT_TOKENS, max_tokens=6)
HEAD = {"include_dashboard": False, "include_log_monitor": False}  # processes that these tests do not need


@pytest.fixture
def cluster():
    # a node counts as dead after five seconds; on a busy machine a live one may be slow to respond
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    head = {"num_cpus": 0, "object_store_memory": 100 * 2**20, "_system_config": quick} | HEAD
    made = Cluster(initialize_head=True, head_node_args=head)
    yield made
    made.shutdown()


def start(job, cluster, num_parts=0, **run):
    """Start a driver of the job on the cluster; return it when it has written `num_parts` parts."""
    run = {"actors": 1, "cpus_per_actor": 1, "gpus_per_actor": 1, "window_rows": 40, **run}
    job.config(
        engine={"max_num_seqs": UNIT_ROWS},
        run=run,
        output={"rows_per_file": UNIT_ROWS},
    )
    command = [sys.executable, "-m", "tests.job.drive", str(job.folder / "job.yaml")]
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    driver = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(job.parts()) < num_parts:
        assert driver.poll() is None, driver.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return driver


def finished(job, driver, texts):
    """Wait for the driver, check that each row is written once, and return the job's report."""
    stderr = driver.communicate(timeout=180)[1].decode()
    assert driver.returncode == 0, stderr
    job.check(texts)
    return json.loads((job.output / "_pipeline" / "report.json").read_text())


def slow_end(job, texts, of_last, engines):
    """Write the job's rows and return their texts. The last ones are slow until `engines` have been loaded, so that one
    that joins late, on a busy machine very late, finds work. Otherwise the job takes about ten seconds."""
    (job.folder / "loaded").mkdir()
    until = {"slow": "text", "slow_s": 1.5, "slow_until": engines, "loaded_in": str(job.folder / "loaded")}
    changed = [text.replace("text", "word") for text in texts[:-of_last]] + texts[-of_last:]
    job.fake(step_s=0.15, **until).rows(changed)
    return changed


def test_a_node_that_dies_costs_its_open_units_alone_and_one_that_joins_gets_work(job, cluster):
    nodes = [cluster.add_node(**NODE) for _ in range(3)]
    cluster.wait_for_nodes()
    texts = slow_end(job, TEXTS, 240, engines=4)
    driver = start(job, cluster, 6, actors=3)
    cluster.remove_node(nodes[1], allow_graceful=False)
    late = cluster.add_node(**NODE)
    report = finished(job, driver, texts)
    (run,) = report["runs"]
    actors = run["actors"]
    (lost,) = [actor for actor in actors if actor["node_lost"]]
    assert lost["node_id"] == nodes[1].node_id
    (replacement,) = [actor for actor in actors if actor["replaces"] == lost["actor"]]
    assert replacement["node_id"] == late.node_id
    assert replacement["units"] > 0
    (fault,) = [fault for fault in report["faults"] if fault["kind"] == "machine_lost"]
    assert fault["count"] == 1
    assert fault["nodes"] == [f"{lost['host']} (Ray node {lost['node_id'][:8]})"]
    assert 0 <= fault["tokens"]["generated"] <= IN_FLIGHT * UNIT_ROWS * 6
    assert fault["machine_us"] > 0
    assert run["duplicate_units"] == 0
    assert report["work"]["nodes_lost"] == 1
    assert "machine lost: " in (job.output / "_pipeline" / "report.md").read_text()
    # the lost machine costs nothing after its end, the other one nothing before its start
    machine_us = [sum(actor["phases_us"].values()) for actor in (lost, replacement)]
    assert sum(machine_us) < run["wall_us"]


def test_an_elastic_pool_grows_as_nodes_join_and_gives_actors_back_before_the_tail_ends(job, cluster):
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    texts = [*TEXTS, *(f"slow {i} " + "y" * 60 for i in range(UNIT_ROWS))]
    # about a minute on one engine: on a busy machine nodes join late, and must still find work
    job.fake(step_s=0.6, slow="slow", slow_s=3.0).rows(texts)
    driver = start(job, cluster, 3, actors=[1, 3])
    joined = {cluster.add_node(**NODE).node_id for _ in range(2)}
    report = finished(job, driver, texts)
    (run,) = report["runs"]
    first, *later = sorted(run["actors"], key=lambda actor: actor["started_us"])
    assert (first["started_us"], first["node_id"] in joined) == (0, False)
    assert {actor["node_id"] for actor in later} == joined
    assert all(actor["started_us"] > 0 and actor["units"] > 0 and actor["replaces"] is None for actor in later)
    ends = [actor["started_us"] + sum(actor["phases_us"].values()) for actor in run["actors"]]
    for actor, end in zip(run["actors"], ends, strict=True):
        assert actor["released"] == (end < run["wall_us"] - 4e6), (ends, run["wall_us"])
    assert sum(actor["released"] for actor in run["actors"]) == 2
    page = (job.output / "_pipeline" / "report.md").read_text()
    assert "3 engines: 2 joined after the start, 2 released before the end" in page


def test_a_node_that_is_drained_finishes_what_is_open_and_its_actor_goes_elsewhere(job, cluster):
    nodes = [cluster.add_node(**NODE) for _ in range(2)]
    cluster.wait_for_nodes()
    texts = slow_end(job, TEXTS[:320], 160, engines=3)
    driver = start(job, cluster, 6, actors=2, drain_timeout="1 min")  # for the open units there, slow ones too
    drain = ["drain-node", f"--address={cluster.address}", f"--node-id={nodes[1].node_id}", "--reason-message=test",
             "--reason=DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds=600"]  # fmt: skip
    subprocess.run([Path(sys.executable).parent / "ray", *drain], check=True, capture_output=True)
    late = cluster.add_node(**NODE)
    report = finished(job, driver, texts)
    actors = {actor["node_id"]: actor for actor in report["runs"][0]["actors"]}
    assert actors.keys() == {nodes[0].node_id, nodes[1].node_id, late.node_id}
    drained, joined = actors[nodes[1].node_id], actors[late.node_id]
    assert joined["replaces"] == drained["actor"]
    assert joined["units"] > 0
    assert drained["units"] < actors[nodes[0].node_id]["units"]
    assert report["runs"][0]["duplicate_units"] == 0
    for fault in report["faults"]:  # Ray ends an idle drained machine sooner or later
        assert fault["kind"] in ("machine_lost", "engine_restarted")
        assert fault["tokens"] == {"prompt": 0, "generated": 0}


def test_all_workers_leave_and_others_join(job, cluster):
    only = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    job.fake(step_s=0.1).rows(TEXTS[:120])
    driver = start(job, cluster, 3)
    cluster.remove_node(only, allow_graceful=False)
    late = cluster.add_node(**NODE)
    report = finished(job, driver, TEXTS[:120])
    assert [actor["node_id"] for actor in report["runs"][0]["actors"]] == [only.node_id, late.node_id]
    assert report["runs"][0]["duplicate_units"] == 0


def test_the_head_restarts_and_the_same_command_resumes(job):
    job.fake(step_s=0.1).rows(TEXTS[:120])
    cluster = Cluster(initialize_head=True, head_node_args=NODE | HEAD)
    driver = start(job, cluster, 3)
    cluster.shutdown()
    stderr = driver.communicate(timeout=120)[1].decode()
    assert driver.returncode != 0, stderr  # the command's guard turns Ray's exit code into 3
    assert 0 < len(job.parts()) < 15
    cluster = Cluster(initialize_head=True, head_node_args=NODE | HEAD)
    try:
        finished(job, start(job, cluster), TEXTS[:120])
    finally:
        cluster.shutdown()
