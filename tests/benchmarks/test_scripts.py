"""The scripts of `benchmarks/` at tiny sizes: each runs, prints a table and a line of JSON, and has a help text."""

import importlib
import json
import shlex

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import plan, simulate
from benchmarks.request_sets import REQUEST_SETS
from benchmarks.simulate import BLOCK_SIZE, Machine, SimulatedEngine, SimulatedRow, job_units
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings
from pipeline.roofline.job_simulation import Batching, simulate_job
from pipeline.roofline.kv_pages import KVPages
from pipeline.roofline.shares import MEASURED

TINY = {
    "engine": "--model tiny --requests 2 --rounds 1 --prompt-tokens 8 --output-tokens 2-4 --batch-sizes 2",
    "speculation": "--text extractive --batch-sizes 1 --rows 1 --rounds 1",
    "floor": "--model tiny --requests 4 --output-tokens 2-4",
    "grammar": "--rows 2 --rounds 1 --dtype float32",
    "plan": "--scale 1 --files 2 --rows-per-file 1000 --parts-per-window 2",
    "scheduler": "--sequences 8 --steps 2 --rounds 1",
    "simulate schedule": "--model qwen3-0.6b --card l4 --requests shared --smaller 64",
    "simulate pools": "--actors 1,2 --in-flight 1 --rows 20",
}


def run(name: str, options: str) -> dict:
    module, *command = name.split()
    main = importlib.import_module(f"benchmarks.{module}").main
    done = CliRunner().invoke(main, [*command, *shlex.split(options)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    *text, line = done.stdout.splitlines()
    assert len(text) > 3
    return json.loads(line)


@pytest.mark.parametrize("name", TINY)
def test_each_script_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Measure in this process: importing Ray and torch takes seconds.
    monkeypatch.setattr(plan, "last_line", lambda command, environment: plan.measure_stage(command[4], command[5], 2))
    found = run(name, TINY[name])
    assert {"bench", "command", "date", "machine"} <= set(found)
    module = importlib.import_module(f"benchmarks.{name.split()[0]}")
    shown = CliRunner().invoke(module.main, ["--help"]).stdout
    assert f"python -m benchmarks.{name.split()[0]}" in shown
    match name:
        case "floor":
            assert [phase["name"].strip() for phase in found["phases"][:2]] == ["prompts", "decoding"]
            assert all(min(phase["wall_s"], phase["gemm_s"]) > 0 for phase in found["phases"])
        case "grammar":
            free, _, in_json, _ = found["ways"]
            assert len({way["tokens"] for way in found["ways"]}) == 1, "equal work"
            assert in_json["steps"] < free["steps"], "forced tokens take no step"
        case "plan":
            assert [(c["files"], c["rows"], c["parts"]) for c in found["costs"]] == [(2, 2000, 2)]


def test_an_unknown_card_is_an_error_message() -> None:
    done = CliRunner().invoke(simulate.main, ["pools", "--card", "tpu"])
    assert done.exit_code == 1
    assert "--card tpu: no such card" in done.stderr


def test_a_simulated_engine_computes_every_token_and_waits_for_a_slow_host() -> None:
    rows = [row for unit in job_units("generation", 16) for row in unit]
    fast, slow = (
        Machine.on_card("qwen3-0.6b", "h100", max_num_seqs=8, captures_mixed=False, launch_s=s) for s in (0, 1)
    )
    found = [SimulatedEngine(each, 4096).run(rows) for each in (fast, slow)]
    tokens = sum(len(row.prompt) + row.output for row in rows)
    assert all(run["tokens_per_s"] * run["seconds"] == pytest.approx(tokens) for run in found)
    assert found[0]["waiting_share"] < 0.5 < found[1]["waiting_share"]
    assert found[0]["preemptions"] == 0 < found[0]["running"] <= 8
    tight = SimulatedEngine(fast, 4096, num_blocks=20).run(rows)
    assert tight["kv_used"] > found[0]["kv_used"]
    assert tight["num_steps"] > found[0]["num_steps"]


def test_the_estimate_of_a_job_equals_the_schedulers_when_memory_is_tight() -> None:
    """`pipeline plan` has no scheduler. If it reserved all output at once, it would estimate 1.2 times the duration."""
    machine = Machine.on_card("llama-8b", "L4", launch_s=0.0, is_paced=False)
    requests = sorted(REQUEST_SETS["generation"].smaller(4, 1).round("1", 1000), key=lambda r: -len(r.prompt_token_ids))
    rows = [SimulatedRow(np.array(r.prompt_token_ids, np.int32), r.max_tokens, r.max_tokens) for r in requests]
    by_scheduler = SimulatedEngine(machine, 1024).run(rows)
    lengths = sorted(REQUEST_SETS["generation"].smaller(4, 1).lengths(), key=lambda row: -row.prompt)
    ceilings = Ceilings.of_card(find_card("L4"), MEASURED)
    batching = Batching(machine.max_num_seqs, 8192, machine.num_blocks, KVPages(BLOCK_SIZE, 0))
    found = simulate_job(lengths, machine.size, machine.weights, ceilings, batching)
    assert by_scheduler["kv_used"] > 0.7
    assert found.wall_s == pytest.approx(by_scheduler["seconds"], rel=0.06)
