"""`pipeline bench roofline`, which needs no card: datasheet figures, model sizes, jobs that do not fit."""

import json
from dataclasses import asdict, replace

import pytest

from pipeline.bench import roofline
from pipeline.bench.request_sets import find_set
from pipeline.bench.roofline import Serving, bench_roofline, model_size
from pipeline.bench.shapes import bench_model
from pipeline.errors import ConfigError
from pipeline.kernels.triton.linear.crossover import Crossover
from pipeline.model.config import read_config
from pipeline.roofline.cards import find_card, load_cards
from pipeline.roofline.cost_model import Ceilings, Reached
from pipeline.roofline.shares import BOUND, MEASURED

SLOW = Reached(0.5, 0.5, 0.5, 0.25, 0.5, int4_read=0.5)


def test_a_bound_comes_from_the_cards_own_figures():
    found = bench_roofline("llama-8b", ["h100"], ["single"], reached=BOUND)
    (card,) = found.cards
    alone = next(bound.seconds for bound in found.steps if bound.work == "decoding, 1 at once")
    size, _, _ = model_size("llama-8b")
    assert alone.linears_s == pytest.approx(2 * size.linear_parameters / card.bandwidth_bytes_per_s)
    (job,) = found.jobs
    assert (job.requests, job.weights) == ("single", "16 bit")
    prompt_s = 2 * 512 * size.linear_parameters / card.bf16_flops
    assert 255 * alone.linears_s + prompt_s < job.job.wall_s < 1.1 * (255 * alone.total_s + prompt_s)
    assert "A bound: no engine is faster." in found.to_text()
    assert json.loads(json.dumps(found.to_json()))["jobs"][0]["job"]["num_steps"] == 256


def test_shares_slow_the_job_down_and_the_text_names_their_source():
    bound, slow, measured = (
        bench_roofline("llama-8b-awq", ["H200"], ["single"], reached=reached) for reached in (BOUND, SLOW, MEASURED)
    )
    assert slow.jobs[0].job.wall_s == pytest.approx(2 * bound.jobs[0].job.wall_s, rel=0.1)
    assert "Kernels at the data sheet." in bound.to_text()
    assert "Kernels as measured on one H200 (2026-11-26)." in measured.to_text()
    assert "H200: int4 kernel up to 64 tokens with 16-bit weights kept, up to 192 without" in measured.to_text()
    assert "(assumed)" in bench_roofline("llama-8b-awq", ["l4"], ["single"]).to_text()


def test_paths_follow_the_engines_rules_or_are_the_fastest():
    engine, fastest = (
        bench_roofline("llama-8b-awq", ["L4"], ["classification"], Serving(paths=paths), SLOW)
        for paths in ("engine", "fastest")
    )
    assert engine.jobs[0].weights == "int4"
    assert fastest.jobs[0].job.wall_s < engine.jobs[0].job.wall_s
    few = bench_roofline("llama-8b-awq", ["L4"], ["single"], Serving(max_num_seqs=1), SLOW)
    assert few.jobs[0].weights == "int4 + 16 bit"  # both copies leave room for one sequence of 2,048
    assert "A bound" not in bench_roofline("tiny-awq", ["l4"], ["single"], reached=BOUND).to_text()
    assert "A bound" in bench_roofline("tiny-awq", ["l4"], ["single"], Serving(paths="fastest"), BOUND).to_text()


def test_fp8_is_for_cards_that_have_it():
    serving = Serving(activation_dtype="fp8", kv_cache_dtype="fp8")
    found = bench_roofline("llama-8b-awq", ["H100", "A100 80"], ["generation"], serving)
    plain = bench_roofline("llama-8b-awq", ["H100", "A100 80"], ["generation"])
    ours, lacking = found.jobs
    assert (ours.weights, lacking.job) == ("fp8", None)
    assert ours.job.wall_s < plain.jobs[0].job.wall_s
    assert ours.kv_tokens > 1.8 * plain.jobs[0].kv_tokens
    assert {bound.card for bound in found.steps} == {"H100 80GB SXM"}
    text = found.to_text()
    assert "A100 80GB SXM generation fp8 has no fp8, which needs compute capability 8.9" in " ".join(text.split())
    with pytest.raises(ConfigError, match="not supported by 16- or 32-bit weights"):
        bench_roofline("llama-8b", serving=serving)


def test_a_shared_prefix_is_read_once_by_default():
    once, each = (
        bench_roofline("llama-8b", ["H100"], ["shared"], Serving(shared_reads=reads), BOUND)
        for reads in ("once", "each")
    )
    assert once.jobs[0].job.wall_s < 0.9 * each.jobs[0].job.wall_s
    assert once.is_bound
    assert not each.is_bound


def test_a_job_that_does_not_fit_is_reported():
    size, weights, _ = model_size("llama-8b")
    small = Ceilings("small", 1e12, 1e14, 8e9)
    bound = roofline._job(find_set("single"), size, weights, small, Serving(8, 512), Crossover(64, 64, 192))
    assert (bound.job, bound.kv_tokens) == (None, 0)
    text = replace(bench_roofline("tiny", ["l4"], ["single"]), jobs=(bound,)).to_text()
    assert "does not fit: the KV cache has room for 0 tokens" in text
    apart = roofline._job(
        find_set("single"), *model_size("llama-8b-awq")[:2], small, Serving(8, 512), Crossover(64, 64, 192)
    )
    assert (apart.weights, apart.job is None) == ("int4", False)  # no room for 16-bit weights next to them


def test_unknown_cards_and_request_sets_are_refused():
    assert find_card("h100") in load_cards()
    with pytest.raises(ConfigError, match="--card tpu: no such card; expected one of H200"):
        bench_roofline(cards=["tpu"])
    with pytest.raises(ConfigError, match="--requests chat: expected one of summaries"):
        bench_roofline(requests=["chat"])


def test_a_shape_is_the_checkpoint_it_writes(tmp_path):
    for name in ("tiny", "tiny-awq"):
        config = read_config(bench_model(name, str(tmp_path)).folder)
        assert model_size(name)[:2] == (config.size, config.weights_on_card())


def test_the_command(pipe):
    small = "bench", "roofline", "--model", "tiny", "--card", "l4", "--requests", "single"
    code, out, _ = pipe(*small, "--shared-reads", "each")
    assert code == 0
    measured = json.loads(out.splitlines()[-1])
    assert measured["reached"] == asdict(MEASURED)
    assert measured["serving"]["shared_reads"] == "each"
    _, out, _ = pipe(*small, "--kernels", "bound")
    bound = json.loads(out.splitlines()[-1])
    assert bound["reached"] == asdict(BOUND)
    assert bound["jobs"][0]["job"]["wall_s"] < measured["jobs"][0]["job"]["wall_s"]
    code, _, err = pipe("bench", "roofline", "--card", "tpu")
    assert (code, "--card tpu" in err) == (2, True)
