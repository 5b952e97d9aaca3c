"""Engines of several cards: what fits, what a division of a machine costs, and what `pipeline plan` shows of it."""

import json
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.shapes import SHAPES
from pipeline.cli.main import cli
from pipeline.demo import demo_model
from pipeline.engine.startup.memory import SLACK_BYTES
from pipeline.estimate.cards import CardServing, limits_on, on_card
from pipeline.estimate.divisions import Division, cheapest, division_of, fitting_engines
from pipeline.estimate.prices import FILE, Price, PriceList, load_prices
from pipeline.estimate.recommend import advice_for_division
from pipeline.model.config import ModelConfig, read_config
from pipeline.roofline.cards import find_card
from pipeline.roofline.job_simulation import RequestTokens

REQUESTS = [RequestTokens(400, 100)] * 64
WEIGHTS = 2 * 70_552_387_584
KV_TOKEN = 2 * 80 * 8 * 128 * 2
L40S, H100 = find_card("l40s"), find_card("h100")


def write_70b(folder: Path, is_awq: bool = False) -> Path:
    """Write config and tokenizer of a 70B model, without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["llama-70b"].config(is_awq)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model("target") / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(write_70b(tmp_path_factory.mktemp("models") / "70b"))


@pytest.mark.parametrize("num_cards", [2, 4, 8, 16])
def test_the_cost_model_divides_as_the_engine_does(model: ModelConfig, num_cards: int) -> None:
    assert model.local(num_cards).size == model.size.local(num_cards)


def test_a_group_holds_what_one_card_cannot(model: ModelConfig) -> None:
    one, four = (on_card(L40S, model, CardServing(tensor_parallel_size=n), REQUESTS) for n in (1, 4))
    assert (one.lacks, one.num_cards) == ("the weights and one request do not fit its memory", 1)
    assert (four.lacks, four.num_cards) == ("", 4)
    left = (0.9 * L40S.memory_bytes - WEIGHTS / 4) // (KV_TOKEN / 4) - SLACK_BYTES // (KV_TOKEN / 4)
    assert four.kv_tokens == pytest.approx(left, abs=1)
    assert four.expected.parts.exchange_s > 0
    two = on_card(L40S, model, CardServing(tensor_parallel_size=2), REQUESTS)
    assert two.lacks == "the weights and one request do not fit the memory of 2 cards"
    odd = on_card(L40S, model, CardServing(tensor_parallel_size=3), REQUESTS)
    assert "engine.tensor_parallel_size = 3: its 64 query heads are not divisible" in odd.lacks


def test_limits_of_a_step_follow_from_the_share_of_the_weights(model: ModelConfig) -> None:
    by_size = {n: limits_on(H100, model, CardServing(tensor_parallel_size=n)).max_num_seqs for n in (2, 4)}
    assert by_size == {2: 512, 4: 1024}, "weights in at most half of the memory of each card"


def test_divisions_are_the_engines_that_fit_at_the_price_of_their_cards(model: ModelConfig) -> None:
    engines = fitting_engines(L40S, model, CardServing(), REQUESTS)
    assert [engine.num_cards for engine in engines] == [4, 8]
    prices = PriceList((Price("L40S", 2.0, None, date(2026, 11, 1), "a list"),), 0.0)
    found = division_of(engines[0], prices)
    assert found.num_engines == 2
    assert found.tokens_per_s == pytest.approx(2 * engines[0].expected.tokens_per_s)
    assert found.usd_per_million == pytest.approx(8 * 2.0 / 3600 / found.tokens_per_s * 1e6)
    assert division_of(engines[0], PriceList((), 0.0)).usd_per_million is None


def a_division(num_cards: int, tokens_per_s: float) -> Division:
    return Division("L40S", num_cards, tokens_per_s, 1000 / tokens_per_s)


def test_the_lowest_cost_decides_and_replicas_where_it_is_equal() -> None:
    even = [a_division(1, 980), a_division(2, 1000), a_division(4, 700)]
    assert cheapest(even).num_cards == 1
    assert advice_for_division(even, 1) == ()
    assert advice_for_division(even, 2) == (), "less than the cost model can resolve"
    assert advice_for_division([a_division(1, 1000), a_division(2, 990)], 2) == ()
    (fewer,) = advice_for_division(even, 4)
    assert (fewer.key, fewer.effect) == ("engine.tensor_parallel_size: 1", pytest.approx(1 - 700 / 980))
    assert "8 cards compute 980 tokens/s instead of 700, 1M tokens for $1.02 instead of $1.43" in fewer.reason
    (more,) = advice_for_division([a_division(1, 500), a_division(2, 1000)], 1)
    assert (more.key, more.effect) == ("engine.tensor_parallel_size: 2", pytest.approx(0.5))
    (needed,) = advice_for_division([a_division(4, 1000), a_division(8, 900)], 1)
    assert (needed.key, needed.effect) == ("engine.tensor_parallel_size: 4", None)
    assert needed.reason == "the model does not fit 1 card"
    assert advice_for_division([], 1) == ()


def plan(tmp_path: Path, *args: str) -> str:
    folder = tmp_path / "70b"
    job = ["jobs/summarize.yaml", "--limit", "8", "--set", "sampling.max_tokens=8"]
    job += ["--set", f"model.path={folder}", "--set", f"output.path={tmp_path}/out"]
    done = CliRunner().invoke(cli, ["plan", *job, *args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_plan_shows_the_cards_that_a_model_needs(tmp_path: Path) -> None:
    write_70b(tmp_path / "70b")
    found = json.loads(plan(tmp_path, "--hardware", "l40s", "--json"))
    (pool,) = found["cards"]
    assert (pool["num_cards"], pool["lacks"]) == (4, "")
    usd_per_hour = 4 * load_prices(FILE).price_of("L40S").on_demand_usd
    assert pool["usd"]["expected"] == pytest.approx(pool["machine_us"]["expected"] / 3.6e9 * usd_per_hour)
    assert [each["num_cards"] for each in found["divisions"]] == [4, 8]
    assert found["advice"][0]["key"] == "engine.tensor_parallel_size: 4"
    text = plan(tmp_path, "--hardware", "l40s", "--set", "engine.tensor_parallel_size=8")
    assert "8 cards as engines of one or several" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["L40S"])
    assert row[row.index("bit") + 2] == "8", "the job's own number"
    assert "engine.tensor_parallel_size: 4 (" in text
    assert "exchanges between cards assumed" in text


def test_a_model_that_fits_every_card_is_not_divided(tmp_path: Path) -> None:
    job = ["jobs/summarize.yaml", "--limit", "8", "--set", f"output.path={tmp_path}/out", "--json"]
    found = json.loads(CliRunner().invoke(cli, ["plan", *job, "--hardware", "l4", "--hardware", "l40s"]).stdout)
    assert {pool["num_cards"] for pool in found["cards"]} == {1}
    assert found["divisions"] == []
