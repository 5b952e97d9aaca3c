"""Jobs of the GPU benchmark: every request gets its tokens or the round ends, and other engines take their turn."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.bench.engines import peer as peer_module
from pipeline.bench.gpu import peers
from pipeline.bench.gpu.jobs import Limits, OurJobs, run_our_jobs, run_round
from pipeline.bench.gpu.peers import run_peers
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.gpu.variants import VARIANTS, Variant
from pipeline.bench.request_sets import BenchRequest, Lengths, RequestSet
from pipeline.bench.roofline import model_size
from pipeline.bench.shapes import bench_model
from pipeline.engine.engine import Engine
from pipeline.engine.params import EngineConfig
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.errors import PipelineError
from pipeline.model.config import read_config
from pipeline.roofline.cost_model import Reached
from pipeline.roofline.job_simulation import job_flops

SETS = (
    RequestSet("some", 5, Lengths(3, 30), Lengths(2, 9)),
    RequestSet("alike", 4, Lengths(2, 5), Lengths(3, 3), shared_prefix=40),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return bench_model("tiny", str(tmp_path_factory.mktemp("shapes"))).folder


def test_each_set_is_told_as_it_ends(folder):
    said = []
    size, weights, _ = model_size("tiny")
    limits = Limits(size, weights, Rates(1e9, 1e12), Reached(0.5, 0.5, 0.5, 0.5, 0.5), 1e9)
    four = Variant({"max_num_seqs": 4})
    told = list(run_our_jobs(folder, torch.device("cpu"), "float32", SETS, 2, limits, four, said.append))
    assert [[job.requests for job in each.jobs] for each in told] == [["some"], ["some", "alike"]]
    assert OurJobs.from_json(json.loads(json.dumps(told[-1].to_json()))) == told[-1]
    some, alike = told[-1].jobs
    lengths = SETS[0].lengths()
    assert len(some.wall_s) == 2
    assert (some.prompt_tokens, some.output_tokens) == (sum(n.prompt for n in lengths), sum(n.output for n in lengths))
    assert (some.cached_tokens, alike.cached_tokens) == (0, 3 * 32)  # whole blocks of 16
    assert 1 < some.sequences <= 4
    assert 0 < some.kv_used < 1
    assert 0 < some.tail_s <= some.wall_s[-1]
    assert some.mfu == pytest.approx(job_flops(lengths, size) / some.wall_s[-1] / 1e12)
    assert some.predicted_s == pytest.approx(2 * some.bound_s, rel=1e-3)
    assert [len(tokens) for tokens in told[-1].token_ids["some"]] == [n.output for n in lengths]
    assert told[-1].settings["max_num_seqs"] == 4
    assert "alike, round 2 of 2: this engine" in said


def test_a_request_that_comes_short_ends_the_round(folder):
    wrong = {
        "request 1 .*: .*33 tokens": BenchRequest([20] * 33, 2),
        "request 1 .*: 12 of 20": BenchRequest([20] * 20, 20),
    }
    for why, request in wrong.items():
        with (
            Engine(EngineConfig(str(folder), dtype="float32", max_model_len=32)) as engine,
            pytest.raises(PipelineError, match=why),
        ):
            run_round(engine, [BenchRequest([20] * 4, 2), request])


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "engines"))
    monkeypatch.setitem(peer_module.DRIVERS, "fake", "fake_peer")
    monkeypatch.setitem(peers.MODES, "fake", (None, "throughput"))


def our_tokens(rounds):
    """What the fake peer answers to the last round: the prompt's first token, again and again."""
    return {each.name: [[r.prompt_token_ids[0]] * r.max_tokens for r in each.round(str(rounds), 2048)] for each in SETS}


def test_another_engine_runs_the_same_sets_in_each_of_its_modes(folder, fake):
    ours = OurJobs({"dtype": "float32", "device": "cpu"}, (), our_tokens(2))
    said = []
    told = list(run_peers([("fake", sys.executable)], folder, SETS, 2, read_config(folder), ours, said.append))
    assert [each.name for each in told] == ["fake", "fake, throughput"]
    assert said[0] == "starting fake"
    for each in told:
        assert not each.failure
        assert each.about["sets"] == "5"
        assert [job.requests for job in each.jobs] == ["some", "alike"]
        assert all(len(job.wall_s) == 2 for job in each.jobs)
        assert [job.agreement.equal_requests for job in each.jobs] == [5, 4]


def test_one_that_fails_is_told_and_keeps_what_it_had(folder, fake, tmp_path):
    mortal = tmp_path / "mortal"  # ends in the set after its warm-up
    mortal.symlink_to(sys.executable)
    ours = OurJobs({"dtype": "float32", "device": "cpu"}, (), our_tokens(1))
    first, second = run_peers([("fake", str(mortal))], folder, SETS, 1, read_config(folder), ours, print)
    assert "ended with 7" in first.failure
    assert "ended with 7" in second.failure
    short = replace(ours, token_ids={name: [row[:-1] for row in rows] for name, rows in ours.token_ids.items()})
    unequal, _ = run_peers([("fake", sys.executable)], folder, SETS, 1, read_config(folder), short, print)
    assert "unequal work" in unequal.failure
    assert unequal.jobs == ()


def test_each_choice_of_the_engine_does_the_same_work(folder):
    """Greedy tokens do not depend on who is let in when, nor on how many at once."""
    tokens = {}
    for name, variant in VARIANTS.items():
        if "fp8" in name:
            continue  # which rounds
        options = {"max_num_seqs": 4} | dict(variant.options)
        with Engine(EngineConfig(str(folder), dtype="float32", max_model_len=64, **options)) as engine:
            variant.prepare(engine)
            tokens[name] = run_round(engine, SETS[0].round("1", 2048) * 3).token_ids
    assert len(tokens) == 5
    assert len({json.dumps(each) for each in tokens.values()}) == 1


def test_prompts_may_be_launched_kernel_by_kernel(folder):
    with Engine(EngineConfig(str(folder), dtype="float32", max_model_len=64, max_num_seqs=4)) as engine:
        assert engine.runner.replays_mixed
        VARIANTS["64 rows, prompts by kernel"].prepare(engine)
        assert not engine.runner.replays_mixed


def test_free_slots_need_not_be_gathered(folder):
    with Engine(EngineConfig(str(folder), dtype="float32", max_model_len=64, max_num_seqs=4)) as engine:
        engine.scheduler.pacing = AdmissionPacing()
        VARIANTS["admitted at once"].prepare(engine)
        assert engine.scheduler.pacing is None
