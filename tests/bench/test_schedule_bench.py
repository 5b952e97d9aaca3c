"""The schedule simulated on cards: every choice runs all requests, and figures follow from the times that are given."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pipeline.bench.request_sets import REQUEST_SETS
from pipeline.bench.roofline import BLOCK_SIZE, model_size
from pipeline.bench.schedule.host import HostTimes
from pipeline.bench.schedule.simulation import CHOICES, PEERS, Choice, ScheduleRun, simulate
from pipeline.cli.main import cli
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings
from pipeline.roofline.job_simulation import Batching, kv_room, simulate_job
from pipeline.roofline.shares import MEASURED

SIZE, WEIGHTS, _ = model_size("qwen3-0.6b")
SET = REQUEST_SETS["generation"].smaller(8, 2)
FAST_HOST = HostTimes(0.0, 0.0, 0.0, 0.0)
BY_KERNEL = "prompts kernel by kernel", "and admission in each step"


def run(choice: Choice, host: HostTimes = HostTimes(), card: str = "H100 80GB SXM") -> ScheduleRun:  # noqa: B008
    return simulate(SET, card, "x", choice, SIZE, WEIGHTS, host)


def test_a_host_that_takes_no_time_makes_nobody_wait_and_pacing_changes_nothing() -> None:
    free = run(CHOICES["512 rows, 8,192 tokens"], FAST_HOST)
    assert free.waiting_share == 0
    by_kernel, at_once = (run(CHOICES[name], FAST_HOST) for name in BY_KERNEL)
    assert by_kernel.seconds == at_once.seconds <= free.seconds
    assert free.tokens_per_s == pytest.approx(sum(n.prompt + n.output for n in SET.lengths()) / free.seconds)


def test_a_slow_host_is_all_that_counts_and_pacing_has_fewer_steps_with_prompts() -> None:
    slow = HostTimes(launch_s=3e-3)
    by_kernel = Choice(max_num_seqs=16, captures_mixed=False)
    paced, each = (run(replace(by_kernel, is_paced=is_paced), slow) for is_paced in (True, False))
    replayed = run(replace(by_kernel, is_paced=False, replays_prompts=True), slow)
    captured = run(replace(by_kernel, captures_mixed=True), slow)
    assert each.waiting_share > 0.5
    assert paced.mixed_share < 0.6 * each.mixed_share
    assert replayed.seconds < captured.seconds < 0.7 * paced.seconds
    assert paced.seconds < 0.7 * each.seconds


def test_a_step_is_padded_to_its_graph() -> None:
    """Rows beyond the largest graph are launched kernel by kernel."""
    one = replace(SET, count=1)
    host = HostTimes(0.0, 0.0, 0.0, launch_s=1.0)
    (prompt_and_tokens,) = one.lengths()
    choice = Choice(max_num_seqs=1, captures_mixed=False)
    found = simulate(one, "L4", "x", choice, SIZE, WEIGHTS, host)
    assert found.num_steps == prompt_and_tokens.output
    assert found.seconds == pytest.approx(SIZE.layers, rel=0.1)  # the prompt alone is launched by layers


def test_the_estimate_of_a_job_is_that_of_the_engines_scheduler_where_memory_is_tight() -> None:
    """`pipeline plan` simulates jobs without the scheduler; with all output reserved at once it would be 1.2 times."""
    size, weights, _ = model_size("llama-8b")
    ceilings = Ceilings.of_card(find_card("L4"), MEASURED)
    rows = REQUEST_SETS["generation"].smaller(4, 1)
    by_scheduler = simulate(rows, "L4", "x", Choice(reads_shared_once=False), size, weights, FAST_HOST)
    lengths = sorted(rows.lengths(), key=lambda row: -row.prompt)
    room = kv_room(size, weights, ceilings) // BLOCK_SIZE * BLOCK_SIZE
    found = simulate_job(lengths, size, weights, ceilings, Batching(512, 8192, room))
    assert by_scheduler.kv_used > 0.7
    assert found.wall_s == pytest.approx(by_scheduler.seconds, rel=0.05)


def test_the_command_tells_all_choices() -> None:
    args = ["bench", "schedule", "--model", "qwen3-0.6b", "--card", "l4", "--requests", "shared", "--smaller", "32"]
    shown = CliRunner().invoke(cli, args)
    assert shown.exit_code == 0, shown.output
    assert all(f"shared {name}" in " ".join(shown.stdout.split()) for name in CHOICES | PEERS)
    told = json.loads(CliRunner().invoke(cli, [*args, "--json"]).stdout)
    assert [run["choice"] for run in told["runs"]] == list(CHOICES | PEERS)
    refused = CliRunner().invoke(cli, [*args[:-4], "--requests", "none"])
    assert refused.exit_code == 2
