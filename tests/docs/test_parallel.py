"""`tools/parallel.py`: simulated pipelines against sums done by hand, and the tables of the page that take no time."""

from dataclasses import replace

import pytest

from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import DENSE, Ceilings, DecoderSize, StepLoad, step_seconds
from pipeline.roofline.job_simulation import Batching, RequestTokens, simulate_job
from pipeline.roofline.kv_pages import KVPages
from tools import parallel
from tools.parallel import Served, fastest_seconds, pipeline_parallel_seconds, requests_of, stage_of, stage_seconds

SIZE = DecoderSize(256, 512, layers=4, heads=4, kv_heads=2, head_dim=64, vocab=1000)
CARD = Ceilings("a card", 1e9, 1e12, 1e9, pcie_bytes_per_s=1e18)
MANY = requests_of((60, 20), 64)


def served(num_stages: int, kv_tokens: int = 4096, **card: float) -> Served:
    return Served(replace(CARD, **card), DENSE, Batching(16, 256, kv_tokens // num_stages // 16, KVPages(16, 0)))


def test_a_pipeline_of_one_stage_is_one_card() -> None:
    engine = served(1)
    alone = simulate_job(MANY, SIZE, DENSE, engine.ceilings, engine.batching).wall_s
    assert pipeline_parallel_seconds(MANY, SIZE, 1, engine) == pytest.approx(alone)


def test_a_request_alone_passes_all_stages_in_each_step() -> None:
    one = [RequestTokens(100, 3)]
    whole = pipeline_parallel_seconds(one, SIZE, 1, served(1))
    assert pipeline_parallel_seconds(one, SIZE, 4, served(4)) == pytest.approx(whole)
    sending = pipeline_parallel_seconds(one, SIZE, 4, served(4, pcie_bytes_per_s=1e6))
    assert sending == pytest.approx(whole + 3 * 102 * 256 * 2 / 1e6), "from each stage but the last, for each token"


def test_stages_compute_at_the_same_time() -> None:
    engine = served(2, kv_tokens=1 << 20)
    requests = [RequestTokens(100, 50)] * 32  # two equal micro-batches
    stage = stage_of(SIZE, 2)
    assert (stage.layers, 2 * stage.head_parameters) == (2, SIZE.head_parameters)
    steps_s = pipeline_parallel_seconds(requests, SIZE, 2, engine)
    micro_batch = simulate_job(requests[:16], SIZE, DENSE, engine.ceilings, engine.batching).wall_s
    assert 1.05 * micro_batch < steps_s < 1.2 * micro_batch, "the last stage has the head, and the other waits for it"


def test_a_step_of_a_pipeline_is_a_step_of_the_model() -> None:
    load = StepLoad(*(parallel.np.array(each) for each in ([1, 40], [90, 40])), num_rows=2)
    layers_s, head_s = stage_seconds(load, SIZE, stage_of(SIZE, 4), served(4))
    assert 4 * layers_s + head_s == pytest.approx(step_seconds(load, SIZE, DENSE, CARD).total_s)


@pytest.mark.parametrize("kind", parallel.KINDS)
def test_engines_whose_cache_is_too_small_have_no_figure(kind: str) -> None:
    card, size = find_card("l40s"), DecoderSize(8192, 28_672, 80, 64, 8, 128, 128_256)
    requests = requests_of((128, 32), 16)
    assert fastest_seconds(requests, size, DENSE, card, 2, kind) is None
    assert fastest_seconds(requests, size, DENSE, card, 8, kind) is not None
    long = requests_of((2048, 64), 16)  # a micro-batch has a fourth of the cache
    assert (fastest_seconds(long, size, DENSE, card, 4, kind) is None) == (kind == "pipeline")


@pytest.mark.parametrize("make", [parallel.exchange_table, parallel.all_reduce_table], ids=["exchanges", "all-reduce"])
def test_tables_of_exchanges_are_up_to_date(make) -> None:
    table = "\n".join(make())
    assert f"\n{table}\n" in parallel.PAGE.read_text(encoding="utf-8"), "run `python -m tools.parallel`"


def test_the_page_has_every_table() -> None:
    text = parallel.PAGE.read_text(encoding="utf-8")
    for name in (*parallel.MODELS, "change"):
        rows = text.partition(f"<!-- table: {name} -->")[2].partition("<!-- end")[0].strip().splitlines()
        assert len(rows) > 6
