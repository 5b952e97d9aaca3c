"""The engine benchmark at a small size: it proves equal work, rounds alternate, peers follow their protocol."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import contenders
from benchmarks.contenders import Agreement, Peer, PeerTask, ThisEngine, compare, parse_peer
from benchmarks.engine import bench_engine
from benchmarks.request_sets import BenchRequest, workload
from benchmarks.shapes import bench_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.engine import Engine
from pipeline.errors import ConfigError, EnvironmentFailed, PipelineError

SETS = {"warm-up": [BenchRequest([1], 1)], "set 1": [BenchRequest([5, 6], 3), BenchRequest([7], 2)]}
TASK = PeerTask(
    model="m", dense_model="m", quantized=False, dtype="float32", threads=1, max_model_len=16, work_folder="w",
    shared_prefixes=False, sets=SETS, device="cpu",
)  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _in_cache(cache, monkeypatch):
    monkeypatch.setenv("PIPELINE_CACHE", str(cache))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setitem(contenders.DRIVERS, "fake", "fake_peer")


def test_a_small_benchmark_runs_end_to_end():
    found = bench_engine(
        "tiny-awq",
        requests=6,
        rounds=1,
        prompt_tokens=20,
        output_tokens=(3, 8),
        batch_sizes=(2, 6),
        dtype="float32",
        peers=[("fake", sys.executable)],
    )
    ours, *others = found.speeds
    assert ours.name == "this engine"
    assert ours.faster is None
    by_name = {speed.name.split(",")[0]: speed for speed in others}
    assert set(by_name) == {"fake", "transformers.generate"}
    static = by_name["transformers.generate"]
    assert static.agreement.equal_requests + static.agreement.near_ties == static.agreement.requests == 6 + 6 + 1
    assert by_name["fake"].agreement.equal_requests < 13
    assert static.faster.count == static.single_faster.count == 1
    assert static.faster.median == pytest.approx(ours.tokens_per_s.median / static.tokens_per_s.median)
    assert static.cpu_ratio.median > 0
    assert by_name["fake"].cpu_ratio is None
    assert set(found.trials) == {2, 6}
    assert found.strict
    tokens = sum(n.prompt + n.output - 1 for n in workload(6, 20, (3, 8)).lengths())
    assert found.computed_tokens == tokens
    assert found.peers["fake"] == {"threads": str(found.settings["num_threads"]), "dtype": "float32", "sets": "4"}
    text = "\n".join(found.to_lines())
    assert "CPU time of transformers.generate" in text
    assert "AWQ int4" in text
    assert "6 requests" in text


def test_the_engine_refuses_repeated_and_failing_requests():
    folder = bench_model("tiny").folder
    with Engine(EngineConfig(str(folder), dtype="float32", max_model_len=64, max_num_batched_tokens=64)) as engine:
        ours = ThisEngine(engine, shares_prefixes=False)
        requests = [BenchRequest(list(range(20, 40)), 4), BenchRequest(list(range(50, 60)), 2)]
        ran = ours.run(requests)
        assert [len(tokens) for tokens in ran.token_ids] == [4, 2]
        assert ran.computed_tokens == 20 + 3 + 10 + 1
        with pytest.raises(PipelineError, match="not a fresh round"):
            ours.run(requests)
        with pytest.raises(PipelineError, match="request 0 failed"):
            ours.run([BenchRequest([5_000], 1)])


def test_rows_of_the_demonstration_job_end_by_themselves():
    found = bench_engine("demo", 4, rounds=1, batch_sizes=(4,), dtype="float32", reports=True)
    static = found.speeds[1]
    assert static.agreement.equal_requests + static.agreement.near_ties == 9
    assert 9 * 20 < static.agreement.compared_tokens < 9 * 96
    assert "4 rows of the demonstration job" in found.work


def test_tokens_are_equal_or_diverge_at_a_near_tie():
    requests = [BenchRequest([1, 2], 3)]
    ties = {(1, 2, 5): torch.tensor([1.0, 1.00005, 0.0])}

    def next_logits(token_ids):
        return ties[tuple(token_ids)]

    assert compare(requests, [[5, 0, 1]], [[5, 0, 1]], next_logits) == Agreement(1, 1, 3)
    assert compare(requests, [[5, 0, 1]], [[5, 1, 2]], next_logits) == Agreement(1, 0, 2, 1)
    assert compare(requests, [[5, 0, 1]], [[5, 2, 2]]) == Agreement(1, 0, 2)
    with pytest.raises(PipelineError, match="token 1 is 0 in this engine and 2 in the other, whose logit is -1"):
        compare(requests, [[5, 0, 1]], [[5, 2, 2]], next_logits)
    ends = [BenchRequest([1, 2], 3, ignore_eos=False)]
    assert compare(ends, [[5, 2]], [[5, 2]]) == Agreement(1, 1, 2)
    with pytest.raises(PipelineError, match="unequal work"):
        compare(ends, [[5]], [[5, 2]])
    with pytest.raises(PipelineError, match="unequal work"):
        compare(requests, [[5, 0, 1]], [[5, 0]])


@pytest.mark.parametrize(
    ("name", "reason"), [("broken", "exited with code 1\n(.|\n)*no such instruction"), ("mortal", "exited with code 7")]
)
def test_the_error_of_a_failed_peer_names_the_reason(name, reason):
    with (
        pytest.raises(EnvironmentFailed, match=f"peer fake: its process {reason}"),
        Peer("fake", sys.executable, replace(TASK, model=name)) as peer,
    ):
        peer.run_set("set 1")


def test_peers_are_named():
    assert parse_peer(f"vllm={sys.executable}") == ("vllm", sys.executable)
    for wrong in ("vllm", "tgi=/bin", "vllm=/no/such/python"):
        with pytest.raises(ConfigError, match="--peer"):
            parse_peer(wrong)
