"""Models on cards: what fits, how fast, at what price, what `pipeline plan` shows of it, and which changes pay."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.shapes import SHAPES
from pipeline.cli.main import cli
from pipeline.demo import demo_model
from pipeline.engine.config import EngineConfig
from pipeline.engine.startup.memory import SLACK_BYTES, cache_before_dense, weight_bytes
from pipeline.estimate.cards import MIN_GAIN, OnCard, advice_for_card, cheapest, on_card, options_on
from pipeline.estimate.fit import STEP_BYTES, ServedModel
from pipeline.estimate.job_estimate import advice_for_pools
from pipeline.estimate.measured import PoolEstimate
from pipeline.model.config import read_config
from pipeline.report.estimate import Interval
from pipeline.roofline.cards import find_card
from pipeline.roofline.job_simulation import RequestTokens

DEMO = read_config(demo_model("target"))
EIGHT_B = replace(DEMO, hidden_size=4096, intermediate_size=12288, layers=DEMO.layers[:1] * 36, num_heads=32,
                  num_kv_heads=8, head_dim=128, vocab_size=151_936)  # fmt: skip
REQUESTS = [RequestTokens(500, 100)] * 300
FEW = [RequestTokens(400, 100)] * 64
H100, A100, L40S, L4 = (find_card(name) for name in ("h100", "a100", "l40s", "l4"))
WEIGHTS_70B = 2 * 70_552_387_584
KV_TOKEN_70B = 2 * 80 * 8 * 128 * 2


def served(config=EIGHT_B, **engine) -> ServedModel:
    return ServedModel(config, EngineConfig("", **engine))


def write_70b(folder: Path) -> Path:
    """Write config and tokenizer of a 70B model, without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["llama-70b"].config(False)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model("target") / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.read(write_70b(tmp_path_factory.mktemp("models") / "70b"), EngineConfig(""))


def test_the_data_sheet_is_faster_than_the_expectation_and_a_fast_card_than_a_slow_one():
    fast, slow = (on_card(card, served(), 1, REQUESTS) for card in (H100, L40S))
    assert fast.best.wall_s < fast.expected.wall_s < slow.expected.wall_s
    assert fast.load_s == slow.load_s > 10


def test_missing_memory_and_missing_features_are_reported():
    huge = replace(EIGHT_B, layers=DEMO.layers[:1] * 400)
    assert on_card(L4, served(huge), 1, REQUESTS).lacks == "the weights and one request do not fit its memory"
    (fp8,) = (form for form in served().forms() if form.engine.activation_dtype == "fp8")
    assert on_card(A100, fp8, 1, REQUESTS).lacks.startswith("engine.activation_dtype: fp8 needs compute capability 8.9")
    assert on_card(H100, fp8, 1, REQUESTS).lacks == ""
    assert "16 bit only" in on_card(H100, served(dtype="float32"), 1, REQUESTS).lacks


def test_forms_are_those_that_the_model_supports():
    assert [form.form for form in served().forms()] == ["16 bit", "4 bit", "4 bit, fp8"]
    packed = ServedModel.read(demo_model("target-awq"), EngineConfig(""))
    assert [form.form for form in packed.forms()] == ["4 bit", "4 bit, fp8"]
    for engine in ({"deterministic": True}, {"activation_dtype": "fp8"}):
        assert len(replace(packed, engine=EngineConfig("", **engine)).forms()) == 1
    nf4 = ServedModel.read(demo_model("target"), EngineConfig("", quantization="nf4"))
    assert [form.form for form in nf4.forms()] == ["4 bit", "4 bit, fp8"]


def test_weights_in_host_memory_make_room_and_bound_a_step():
    larger = replace(EIGHT_B, layers=DEMO.layers[:1] * 48)  # 20.8 GB in the layers
    assert on_card(L4, served(larger), 1, REQUESTS).lacks == "the weights and one request do not fit its memory"
    found = on_card(L4, served(larger, cpu_offload_gb=9.0), 1, REQUESTS)
    assert (found.lacks, found.fit.kv_tokens > 0) == ("", True)
    assert found.best.wall_s > found.best.num_steps * 9e9 / L4.pcie_bytes_per_s
    assert found.best.parts.copy_s < found.expected.parts.copy_s
    # On a larger card, weights on the card get 16-bit copies, which save time in steps with many tokens.
    packed = served().forms()[1]
    offloading = replace(packed, engine=replace(packed.engine, cpu_offload_gb=2.0))
    kept, copied = (on_card(H100, model, 1, REQUESTS) for model in (packed, offloading))
    assert (kept.fit.keeps_dense, copied.fit.keeps_dense) == (True, False)
    assert copied.best.parts.linears_s > kept.best.parts.linears_s
    assert "engine.cpu_offload_gb = 30" in on_card(H100, served(cpu_offload_gb=30.0), 1, REQUESTS).lacks


def test_a_draft_model_and_its_cache_take_memory():
    speculation = {"method": "draft_model", "model": "demo:draft"}
    engine = EngineConfig("", speculation=speculation)
    alone, drafting = (ServedModel.read(demo_model("target-awq"), each) for each in (EngineConfig(""), engine))
    draft, gpu = read_config(demo_model("draft")), torch.device("cuda")
    (one, two), size = (model.on_card(L4, 1) for model in (alone, drafting)), draft.kv_bytes_per_token(torch.bfloat16)
    assert two.weight_bytes - one.weight_bytes == weight_bytes(draft, gpu, torch.bfloat16, keeps_dense=False)
    assert two.kv_bytes_per_token - one.kv_bytes_per_token == size
    cache = cache_before_dense(256, 1024) * (size + DEMO.kv_bytes_per_token(torch.bfloat16))
    tight = replace(L4, memory_bytes=int((one.weight_bytes + cache + SLACK_BYTES) / 0.9) + 2)
    assert [model.on_card(tight, 1).keeps_dense for model in (alone, drafting)] == [True, False]
    one, two = (model.on_device(torch.device("cpu")) for model in (alone, drafting))
    assert two.weight_bytes > one.weight_bytes


def test_a_group_holds_what_one_card_cannot(large: ServedModel) -> None:
    one, two, four = (on_card(L40S, large, n, FEW) for n in (1, 2, 4))
    assert one.lacks == "the weights and one request do not fit its memory"
    assert two.lacks == "the weights and one request do not fit the memory of 2 cards"
    assert (four.lacks, four.num_cards) == ("", 4)
    left = 0.9 * L40S.memory_bytes - WEIGHTS_70B / 4 - SLACK_BYTES - STEP_BYTES
    assert four.fit.kv_tokens == left // (64 * KV_TOKEN_70B / 4) * 64
    assert four.expected.parts.exchange_s > 0
    assert "engine.tensor_parallel_size = 3: its 64 query heads are not divisible" in on_card(L40S, large, 3, FEW).lacks
    for num_cards in (2, 4, 8, 16):
        assert large.config.local(num_cards).size == large.config.size.local(num_cards), "the cost model divides alike"
    by_size = {n: large.on_card(H100, n).limits.max_num_seqs for n in (2, 4)}
    assert by_size == {2: 512, 4: 1024}, "weights in at most half of the memory of each card"


def test_options_are_the_engines_that_fit_at_the_price_of_their_cards(large: ServedModel) -> None:
    options = options_on(replace(L40S, on_demand_usd=2.0), [large], FEW)
    assert [option.num_cards for option in options] == [4, 8]
    assert options[0].card_tokens_per_s == pytest.approx(options[0].expected.tokens_per_s / 4)
    assert options[0].usd_per_million == pytest.approx(2.0 / 3600 / options[0].card_tokens_per_s * 1e6)
    assert replace(options[0], card=replace(L40S, on_demand_usd=None)).usd_per_million is None


def option(model: ServedModel, num_cards: int, card_tokens_per_s: float) -> OnCard:
    """Return an option whose cards compute this many tokens per second, for a dollar an hour."""
    found = on_card(H100, model, 1, FEW[:1])
    slower = found.card_tokens_per_s / (card_tokens_per_s * num_cards)
    simulated = replace(found.expected, wall_s=found.expected.wall_s * slower)
    option = replace(found, card=replace(H100, on_demand_usd=3.6), fit=replace(found.fit, num_cards=num_cards))
    vars(option)["expected"] = simulated
    return option


def test_the_lowest_cost_decides_and_the_simpler_setting_where_it_is_equal() -> None:
    model = served()
    even = [option(model, 1, 980), option(model, 2, 1000), option(model, 4, 700)]
    assert cheapest(even).num_cards == 1

    def advice(options: list[OnCard], num_cards: int) -> list[tuple[str, str, float | None]]:
        job = replace(model, engine=replace(model.engine, tensor_parallel_size=num_cards))
        own = [option(job, each.num_cards, each.card_tokens_per_s) if each.model is model else each for each in options]
        return [(each.key, each.reason, each.effect) for each in advice_for_card(own, job)]

    assert advice(even, 1) == advice(even, 2) == [], "less than the cost model can resolve"
    reason = "980 tokens/s a card instead of 700, 1M tokens for $1.02 instead of $1.43"
    assert advice(even, 4) == [("engine.tensor_parallel_size: 1", reason, pytest.approx(1 - 700 / 980))]
    ((needed, reason, effect),) = advice(even[2:], 1)
    assert (needed, reason, effect) == ("engine.tensor_parallel_size: 4", "the model does not fit 1 card", None)
    packed = option(model.forms()[1], 1, 2000)
    (_, (form, reason, effect)) = advice([*even[2:], packed], 1)
    assert (form, effect) == ("model.quantization: int4-rtn", pytest.approx(1 - 700 / 2000))
    assert reason.endswith("; `pipeline eval` shows how outputs change")
    assert advice([], 1) == []


def test_advice_follows_the_cost_model_and_is_only_what_pays():
    model = served()
    now = on_card(L4, model, 1, REQUESTS)
    (advice,) = (
        each for each in advice_for_card(options_on(L4, model.forms(), REQUESTS), model) if "quant" in each.key
    )
    assert advice.key == "model.quantization: int4-rtn, engine.activation_dtype: fp8"
    better = on_card(L4, model.forms()[2], 1, REQUESTS)
    assert advice.effect == pytest.approx(1 - now.card_tokens_per_s / better.card_tokens_per_s, abs=0.3)
    assert advice.effect >= MIN_GAIN


def test_advice_limits_units_by_the_engines_that_wait_for_the_last_ones():
    pool = PoolEstimate("this machine", 8, *[Interval(100, 100, 100)] * 2)
    assert advice_for_pools([pool], units=600, unit_rows=512) == ()
    (few,) = advice_for_pools([pool], units=16, unit_rows=512)
    assert few.key == "output.rows_per_file: 128"


def plan(tmp_path: Path, *args: str) -> str:
    job = ["jobs/summarize.yaml", "--limit", "8", "--set", "sampling.max_tokens=8"]
    done = CliRunner().invoke(
        cli, ["plan", *job, "--set", f"output.path={tmp_path}/out", *args], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_plan_shows_the_cards_that_a_model_needs_at_the_given_price(tmp_path: Path) -> None:
    model = ["--set", f"model.path={write_70b(tmp_path / '70b')}"]
    found = json.loads(plan(tmp_path, *model, "--hardware", "l40s=2", "--json"))
    (pool,) = found["cards"]
    assert (pool["num_cards"], pool["lacks"]) == (4, "")
    assert pool["usd"]["expected"] == pytest.approx(pool["machine_us"]["expected"] / 3.6e9 * 4 * 2)
    assert pool["spot_usd"] is None
    options = [(each["weights"], each["num_cards"]) for each in found["options"]]
    assert options == [("16 bit", 4), ("16 bit", 8), ("4 bit", 2), ("4 bit", 4), ("4 bit", 8),
                       ("4 bit, fp8", 2), ("4 bit, fp8", 4), ("4 bit, fp8", 8)]  # fmt: skip
    assert found["advice"][0]["key"] == "engine.tensor_parallel_size: 4"
    text = plan(tmp_path, *model, "--hardware", "l40s", "--set", "engine.tensor_parallel_size=8")
    assert "Engines of one or several cards" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["L40S"])
    assert row[row.index("bit") + 2] == "8", "the job's own number"
    assert "engine.tensor_parallel_size: 4 (" in text
    assert "exchanges between cards assumed" in text


def test_a_model_that_fits_every_card_is_not_divided(tmp_path: Path) -> None:
    found = json.loads(plan(tmp_path, "--hardware", "l4", "--hardware", "l40s", "--json"))
    assert {pool["num_cards"] for pool in found["cards"]} == {1}
    assert found["options"] == []
    assert all(pool["spot_usd"]["expected"] < pool["usd"]["expected"] for pool in found["cards"])
