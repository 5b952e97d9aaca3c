"""The bench of a step's host time at a small size: its parts add up, its rows finish, its figures are told."""

import json

from pipeline.bench import scheduler as bench
from pipeline.checkpoints.locate import locate_model
from pipeline.tokenization.tokenizer import Tokenizer


def test_it_measures_what_it_says():
    said = []
    found = bench.bench_scheduler((8, 3), steps=4, rounds=2, rows=30, say=said.append)
    assert [cost.sequences for cost in found.costs] == [3, 8]
    for cost in found.costs:
        parts = [cost.plan_us, cost.build_us, cost.sample_us, cost.handle_us]
        assert min(*parts, cost.cpu_us) > 0
        assert cost.step_p95_us >= cost.step_us > max(parts)
    assert [cost.rows for cost in found.sampling] == [3, 8]
    assert all(set(cost.kinds_ms) == set(bench.KINDS) for cost in found.sampling)
    assert min(cost.read_ms for cost in found.sampling) > 0
    assert (found.long_run.sequences, found.long_run.rows) == (8, 30)
    assert min(found.long_run.fresh_cpu_us, found.long_run.old_cpu_us) > 0
    text = found.to_text()
    assert "in one after 30 finished rows" in text
    assert "       8 " in text
    assert json.loads(json.dumps(found.to_json()))["costs"][1]["sequences"] == 8
    assert "round 2 of 2" in said


def test_its_engine_is_full_while_rows_finish_and_begin():
    load = bench._Load(8, bench.HOST_VOCAB, Tokenizer.from_folder(str(locate_model("demo:target"))))
    load.fill()
    finished, computed = load.num_finished, load.num_prompt_tokens
    for _ in range(150):
        assert len(load.step()) == len(bench.TIMES)
        assert load.engine.num_unfinished >= 8
        assert (load.engine.table.num_known < bench.MAX_MODEL_LEN).all()
    assert load.num_finished > finished
    assert load.num_prompt_tokens > computed
    assert load.engine.stats.cached_tokens > 0
    assert load.engine.stats.num_preemptions == 0
