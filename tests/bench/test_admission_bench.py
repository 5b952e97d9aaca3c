"""Simulated jobs at a small size: rows are as said, each rule runs them all, the figures add up."""

import json

import numpy as np
import pytest

from pipeline.bench.admission.rows import GROUP, JOBS, JobRow, job_rows
from pipeline.bench.admission.rules import RULES
from pipeline.bench.admission.simulation import bench_admission, cache_blocks, simulate
from pipeline.bench.roofline import BLOCK_SIZE
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.errors import ConfigError


class TokensAndSteps:
    """A machine on which a step takes a second and each token a thousandth more."""

    def step_s(self, plan: StepPlan) -> float:
        return 1.0 + plan.num_tokens / 1000


def run(rows: list[JobRow], rule: str, num_blocks: int, max_num_seqs: int = 32):
    return simulate(rows, RULES[rule], num_blocks, max_num_seqs, [TokensAndSteps(), TokensAndSteps()])  # type: ignore[list-item]


@pytest.mark.parametrize("job", JOBS)
def test_rows_are_the_same_at_every_call_and_come_in_the_order_of_a_job(job: str) -> None:
    rows, again = job_rows(job, 64, seed=3), job_rows(job, 64, seed=3)
    assert len(rows) == 64
    assert all((a.prompt == b.prompt).all() and a.output == b.output for a, b in zip(rows, again))
    assert all(1 <= row.output <= row.max_tokens for row in rows)
    heads = {row.prompt[:16].tobytes() for row in rows}
    assert len(heads) == (64 / GROUP if job == "shared" else 64)
    if job == "summaries":
        assert min(len(row.prompt) for row in rows[:16]) > max(len(row.prompt) for row in rows[-16:])
    other = job_rows(job, 64, seed=4)
    assert [row.output for row in other] != [row.output for row in rows]


def test_a_job_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--job sums: expected one of summaries, "):
        bench_admission(["sums"], rows=8)


def ragged(count: int) -> list[JobRow]:
    rng = np.random.default_rng(2)
    outputs = rng.lognormal(np.log(50), 0.8, count).astype(int).clip(2, 400)
    return [JobRow(rng.integers(0, 900, int(rng.integers(20, 60))).astype(np.int32), int(n), 400) for n in outputs]


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_computes_every_token_and_counts_what_it_repeats(rule: str) -> None:
    rows = ragged(60)
    found = run(rows, rule, 20)
    tokens = sum(len(row.prompt) + row.output - 1 for row in rows)
    seconds = found["num_steps"] + (tokens + found["repeated_tokens"]) / 1000
    assert found["card_s"] == found["cores_s"] == pytest.approx(seconds)
    assert (found["repeated_tokens"] > 0) <= (found["preemptions"] > 0)
    assert 0 < found["kv_used"] <= 1
    assert found["running"] * found["num_steps"] >= sum(row.output for row in rows)


def test_rules_differ_as_they_should() -> None:
    rows = ragged(200)
    found = {name: run(rows, name, 24) for name in RULES}
    steps = {name: each["num_steps"] for name, each in found.items()}
    assert steps["free blocks"] < steps["engine"] < steps["sum of ends"]
    assert steps["known lengths"] < steps["engine"]
    assert steps["sum, by prompt length 50%"] < steps["sum, by prompt length 90%"]
    assert found["free blocks"]["preemptions"] > found["engine"]["preemptions"]
    ample = {run(rows[:60], name, 32 * 8)["num_steps"] for name in RULES}
    assert len(ample) == 1, "where all fit, no rule matters"


def test_lengths_by_prompt_length_tell_a_proportional_job_apart() -> None:
    """Long texts first, as in a job; of the short ones after them a tenth is to be expected."""
    rows = [JobRow(np.arange(n, dtype=np.int32) + i, n // 2, 512) for i, n in enumerate([400] * 70 + [40] * 150)]
    by_prompt, of_all = (run(rows, name, 50)["num_steps"] for name in ("sum, by prompt length 75%", "sum of ends"))
    assert by_prompt < of_all


def test_what_it_says() -> None:
    said: list[str] = []
    found = bench_admission(["classification"], (0.25,), max_num_seqs=16, rows=64, say=said.append)
    assert said == ["classification, KV 0.25"]
    assert [run.rule for run in found.runs] == list(RULES)
    text = found.to_text()
    assert "64 rows a job, seed 1, at most 16 at once. Card: llama-8b on H100 80GB SXM" in text
    assert "classification 0.25 engine " in " ".join(text.split())
    told = json.loads(json.dumps(found.to_json()))
    assert told["bench"] == "admission"
    assert told["runs"][0]["card_s"] > 0


def test_the_cache_holds_the_longest_row() -> None:
    rows = [JobRow(np.zeros(BLOCK_SIZE * 10, dtype=np.int32), BLOCK_SIZE, 256)]
    assert cache_blocks(rows, 1, 0.01) == 11
    assert cache_blocks(rows, 4, 0.5) == 22
