"""Simulate jobs with the engine's own scheduler: scheduling choices, and pools of machines.

    python -m benchmarks.simulate schedule --card h100 --requests generation
    python -m benchmarks.simulate pools --actors 1,8 --in-flight 4,16

No model runs and no card is needed. Scheduler, admission, pacing, block pool and the sizes of captured steps are the
engine's. The cost model gives the time of the device. The host launches a step while the device computes the previous
one, so an iteration takes the longer of the two. The scheduler does not know the length at which a row ends.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np

from benchmarks.measure import table
from benchmarks.request_sets import REQUEST_SETS, Lengths, RequestSet, find_set
from benchmarks.script import SETTINGS, clean_errors, help_text, json_flag, parse_sizes, progress, report
from benchmarks.shape_costs import kv_room, weight_layout
from benchmarks.shapes import model_size
from pipeline.data.bucket import BYTES_PER_TOKEN, cut_units
from pipeline.engine.forward.graphs import graph_sizes, mixed_sizes
from pipeline.engine.request import Request
from pipeline.engine.sampling_params import SamplingParams
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence as Row
from pipeline.engine.schedule.slot_table import SlotTable
from pipeline.engine.schedule.step_plan import StepPlan, StepTokens
from pipeline.engine.startup.mixed_tokens import LAUNCH_S, host_bound_tokens
from pipeline.engine.stats import EngineStats
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings, DecoderSize, StepLoad, Weights, step_seconds
from pipeline.roofline.kv_pages import KVPages
from pipeline.roofline.shares import MEASURED

# Host time of an iteration, measured by `benchmarks.scheduler`. REPLAY_S is an assumption.
STEP_S, ROW_S, REPLAY_S = 350e-6, 1.2e-6, 60e-6
EMPTY_S = 4e-6  # idle kernels in each layer of a captured step with prompts
UNIT_TOKENS, UNIT_ROWS = 100_000, 512  # a job's defaults
MAX_NUM_BATCHED_TOKENS = 8192
BLOCK_SIZE = 64  # of the KV cache on a card
COLD_START_S = 60.0  # from a machine's arrival to its first step
VOCAB = 30_000
DIGITS = {"tokens_per_s": 0, "num_steps": 0, "running": 0, "preemptions": 0, "repeated_tokens": 0, "imbalance": 4}


@dataclass(frozen=True)
class SimulatedRow:
    """Row that generates `output` tokens out of the allowed `max_tokens`."""

    prompt: np.ndarray  # int32
    output: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Model on a card, and its engine's limits. mixed_tokens: max tokens of captured steps with prompts; 0: none."""

    size: DecoderSize
    weights: Weights
    ceilings: Ceilings
    max_num_seqs: int
    mixed_tokens: int
    launch_s: float = LAUNCH_S
    is_paced: bool = True

    @classmethod
    def on_card(
        cls, model: str, card: str, *, max_num_seqs: int = 512, captures_mixed: bool = True, **settings: Any
    ) -> "Machine":
        """Return a machine for a shape or checkpoint, with the engine's settings and measured utilization."""
        (size, weights), found = model_size(model), find_card(card)
        ceilings, borders = Ceilings.of_card(found, MEASURED), crossover_of(found.compute_capability)
        form = weight_layout(weights, size, ceilings, borders, max_num_seqs)
        mixed_tokens = host_bound_tokens(size, form, ceilings, MAX_NUM_BATCHED_TOKENS) if captures_mixed else 0
        return cls(
            size=size,
            weights=form,
            ceilings=ceilings,
            max_num_seqs=max_num_seqs,
            mixed_tokens=mixed_tokens,
            **settings,
        )

    @property
    def num_blocks(self) -> int:
        return kv_room(self.size, self.weights, self.ceilings) // BLOCK_SIZE

    def is_replayed(self, plan: StepPlan) -> bool:
        return int(plan.count_S.max()) == 1 or plan.num_tokens <= self.mixed_tokens

    def host_s(self, plan: StepPlan) -> float:
        launches_s = REPLAY_S if self.is_replayed(plan) else self.size.layers * self.launch_s
        return STEP_S + len(plan.slot_S) * ROW_S + launches_s

    def device_s(self, plan: StepPlan, spared_tokens: int) -> float:
        """Return the device's time of a step. Replayed steps are padded. spared_tokens: see `StepTokens`."""
        tokens = StepLoad(plan.count_S, plan.start_S + plan.count_S, int(plan.samples_S.sum()), spared_tokens)
        seconds = step_seconds(tokens, self.size, self.weights, self.ceilings)
        if not self.is_replayed(plan):
            return seconds.total_s
        is_mixed = int(plan.count_S.max()) > 1
        sizes = np.array(mixed_sizes(self.mixed_tokens) if is_mixed else graph_sizes(self.max_num_seqs))
        ones = np.ones(int(sizes[np.searchsorted(sizes, plan.num_tokens)]), dtype=np.int64)
        padded = step_seconds(StepLoad(ones, ones, 0), self.size, self.weights, self.ceilings)
        return replace(seconds, linears_s=padded.linears_s).total_s + is_mixed * self.size.layers * EMPTY_S


class SimulatedEngine:
    """Engine without a model. now: its clock in seconds."""

    def __init__(
        self,
        machine: Machine,
        max_model_len: int,
        *,
        num_blocks: int | None = None,
        now: float = 0.0,
    ) -> None:
        self.machine, self.now = machine, now
        self.stats, self.pool = EngineStats(), BlockPool(num_blocks or machine.num_blocks, BLOCK_SIZE)
        self.table = SlotTable(machine.max_num_seqs, max_model_len, KVPages(BLOCK_SIZE, 0))
        self.scheduler = Scheduler(self.table, self.pool, self.stats, MAX_NUM_BATCHED_TOKENS, True)
        self.scheduler.pacing = AdmissionPacing() if machine.is_paced else None
        self.rows: dict[int, SimulatedRow] = {}  # unfinished rows by order
        self.num_added = self.num_mixed = 0
        self.waited_s = self._before_s = 0.0  # device waiting for the host; device time of the previous step
        self.repeated_s = 0.0  # share of the steps' times, by tokens, for those computed before a preemption

    def add(self, row: SimulatedRow) -> int:
        """Queue a row and return its order."""
        order, self.num_added = self.num_added, self.num_added + 1
        params = SamplingParams(max_tokens=row.max_tokens)
        self.rows[order] = row
        self.scheduler.add(Row(Request(order, row.prompt.tolist(), params), row.prompt, order))
        return order

    def step(self) -> list[int]:
        """Run an iteration and return the orders of finished rows."""
        plan = self.scheduler.plan()
        assert plan is not None, "rows wait and none runs"
        slot_S, is_mixed, host_s = plan.slot_S, int(plan.count_S.max()) > 1, self.machine.host_s(plan)
        seconds = max(host_s, self._before_s)
        self.now, self.num_mixed = self.now + seconds, self.num_mixed + is_mixed
        self.waited_s += seconds - self._before_s
        num_shared = max(int(self.table.num_pages[slot_S].sum()) - self.pool.num_held, 0)
        self._before_s = self.machine.device_s(plan, num_shared * BLOCK_SIZE)
        tokens = StepTokens.from_plan(plan, self.table.num_prompt[slot_S], self.table.recompute_until[slot_S])
        self.repeated_s += self._before_s * tokens.repeated / plan.num_tokens
        self.scheduler.commit(plan)
        if self.scheduler.pacing is not None:
            self.scheduler.pacing.observe(round(seconds * 1e6), is_mixed)
        slot_S = plan.sampling_slot_S
        self.scheduler.append(slot_S, self.table.num_known[slot_S])  # distinct tokens at all positions
        orders = self.table.order[slot_S].tolist()
        outputs = (self.table.num_known[slot_S] - self.table.num_prompt[slot_S]).tolist()
        ended = [at for at, order in enumerate(orders) if outputs[at] >= self.rows[order].output]
        if ended:
            self.scheduler.finish(slot_S[ended].tolist())
        for at in ended:
            del self.rows[orders[at]]
        return [orders[at] for at in ended]

    def run(self, rows: Sequence[SimulatedRow]) -> dict[str, Any]:
        """Run all rows in order, with up to two batches in the engine, and return the figures."""
        waiting = deque(rows)
        while waiting or self.rows:
            while waiting and len(self.rows) < 2 * self.machine.max_num_seqs:
                self.add(waiting.popleft())
            self.step()
        steps, seconds = self.stats.num_steps, self.now + self._before_s
        return {
            "seconds": seconds,
            "tokens_per_s": sum(len(row.prompt) + row.output for row in rows) / seconds,
            "num_steps": steps,
            "waiting_share": self.waited_s / seconds,
            "mixed_share": self.num_mixed / steps,
            "running": self.stats.batch_sum / steps,
            "kv_used": self.stats.kv_used_ppm_sum / steps / 1e6,
            "preemptions": self.stats.num_preemptions,
            "repeated_tokens": self.stats.recomputed_tokens,
            "repeated_share": self.repeated_s / seconds,
        }


# Outputs are skewed, and max_tokens is far above most lengths. A job of several sets has the same number of rows of
# each, one set after the other: the lengths of the first are a wrong forecast for the second.
JOBS = {
    "summaries": [RequestSet("summaries", 1, Lengths(64, 6000, median=1000), Lengths(8, 1024, median=150))],
    "generation": [RequestSet("generation", 1, Lengths(32, 128), Lengths(16, 2048, median=250))],
    "reasoning": [RequestSet("reasoning", 1, Lengths(64, 512), Lengths(32, 4096, median=600))],
    "shifting": [
        RequestSet("short", 1, Lengths(64, 512), Lengths(16, 100, median=40)),
        RequestSet("long", 1, Lengths(64, 512), Lengths(400, 4096, median=1200)),
    ],
}


def job_units(job: str, count: int) -> list[list[SimulatedRow]]:
    """Return the rows of a job in units, cut and ordered as in a job. Every call returns the same."""
    sets, units = JOBS[job], list[list[SimulatedRow]]()
    max_tokens = max(each.output.high for each in sets)
    for each in sets:
        requests = replace(each, count=count // len(sets)).round("1", VOCAB)
        texts = [np.array(request.prompt_token_ids, dtype=np.int32) for request in requests]
        assert texts[0].itemsize == BYTES_PER_TOKEN
        limits = np.full(len(texts), max_tokens)
        for unit in cut_units([text.tobytes() for text in texts], limits, UNIT_TOKENS, UNIT_ROWS):
            units.append([SimulatedRow(texts[row], requests[row].max_tokens, max_tokens) for row in unit.tolist()])
    return units


CHOICES: dict[str, dict[str, Any]] = {
    "512 rows": {},
    "prompts kernel by kernel": {"captures_mixed": False},
    "and admission in each step": {"captures_mixed": False, "is_paced": False},
    "64 rows": {"max_num_seqs": 64},
    "64 rows, prompts by kernel": {"max_num_seqs": 64, "captures_mixed": False},
    "64 rows, admission each step": {"max_num_seqs": 64, "captures_mixed": False, "is_paced": False},
}


def schedule_runs(model: str, card: str, name: str, smaller: int) -> Iterator[dict[str, Any]]:
    """Yield a run for each choice, without figures if the model and a request do not fit the card."""
    requests = find_set(name).smaller(smaller, 1).round("1", VOCAB)
    rows = [SimulatedRow(np.array(r.prompt_token_ids, np.int32), r.max_tokens, r.max_tokens) for r in requests]
    rows.sort(key=lambda row: -len(row.prompt))  # as in a job
    longest = max(len(row.prompt) + row.output for row in rows)
    for choice, settings in CHOICES.items():
        progress(f"{name}, {choice}")
        machine = Machine.on_card(model, card, **settings)
        fits = machine.num_blocks * BLOCK_SIZE > longest
        yield {"job": name, "choice": choice, **(SimulatedEngine(machine, longest + 1).run(rows) if fits else {})}


class Worker:
    """Machine with its units in progress: the orders of each unit's unfinished rows. Times in seconds."""

    def __init__(self, machine: Machine, max_model_len: int, arrived_s: float, cold_start_s: float) -> None:
        self.engine = SimulatedEngine(machine, max_model_len, now=arrived_s + cold_start_s)
        self.arrived_s, self.ended_s = arrived_s, arrived_s
        self.units: list[set[int]] = []

    def add_unit(self, rows: list[SimulatedRow]) -> None:
        self.units.append({self.engine.add(row) for row in rows})

    def step(self) -> None:
        ended = self.engine.step()
        for unit in self.units:
            unit.difference_update(ended)
        if not all(self.units):
            self.units = [unit for unit in self.units if unit]
            self.ended_s = self.engine.now


def run_pool(
    machine: Machine, units: Sequence[list[SimulatedRow]], *, actors: int, in_flight: int, join_s: float
) -> dict[str, Any]:
    """Run a job on machines that arrive within `join_s`, load the model and pull units.

    imbalance: end of the last machine relative to the mean end, minus 1. machine_h: paid hours with each machine up to
    its last unit, as in an elastic pool. static_machine_h: with all machines up to the end of the job. idle_share: of
    static_machine_h.
    """
    queue = deque(units)
    max_model_len = max(len(row.prompt) + row.max_tokens for unit in units for row in unit)
    arrivals_s = np.linspace(0.0, join_s, actors)
    workers = [Worker(machine, max_model_len, arrived_s, COLD_START_S) for arrived_s in arrivals_s]
    events = [(worker.engine.now, at) for at, worker in enumerate(workers)]
    heapq.heapify(events)
    while events:
        at = heapq.heappop(events)[1]
        worker = workers[at]
        while queue and len(worker.units) < in_flight:
            worker.add_unit(queue.popleft())
        if worker.units:
            worker.step()
            heapq.heappush(events, (worker.engine.now, at))
    wall_s = max(worker.ended_s for worker in workers)
    used = [worker for worker in workers if worker.arrived_s < wall_s]
    static_s = sum(wall_s - worker.arrived_s for worker in used)
    idle_s = sum(wall_s - worker.ended_s for worker in used)
    return {
        "wall_s": wall_s,
        "imbalance": wall_s * len(used) / sum(worker.ended_s for worker in used) - 1,
        "idle_share": idle_s / static_s,
        "machine_h": (static_s - idle_s) / 3600,
        "static_machine_h": static_s / 3600,
    }


def show(bench: str, settings: dict[str, Any], runs: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print all runs. ratio: time relative to the first choice for the same job."""
    figures = list(dict.fromkeys(key for run in runs for key in run if key not in ("job", "choice")))
    first: dict[str, float | None] = {}
    rows = []
    for run in runs:
        seconds = run.get(figures[0])
        base = first.setdefault(run["job"], seconds)
        ratio = seconds / base if seconds and base else None
        rows.append((run["job"], run["choice"], ratio, *(run.get(key) for key in figures)))
    formats = [f"{key.replace('_', ' ')} >6,.{DIGITS.get(key, 2)}f" for key in figures]
    lines = [f"Simulated: {', '.join(f'{key} {value}' for key, value in settings.items())}.", ""]
    lines += table(f"job <20 | choice <28 | ratio >6.3f | {' | '.join(formats)}", rows)
    report(bench, {"settings": settings, "machine": {"cpu": "none: simulated"}, "runs": list(runs)}, lines, as_json)


@click.group(help=help_text(__doc__), context_settings=SETTINGS)
def main() -> None: ...


MODEL = click.option("--model", default="llama-8b-awq", show_default=True, metavar="SHAPE|PATH")
CARD = click.option("--card", default="h100", show_default=True, metavar="NAME", help="Prefix of the card's name.")
JOB = click.option("--job", type=click.Choice(list(JOBS)), default="generation", show_default=True)


@main.command("schedule")
@MODEL
@CARD
@click.option("sets", "--requests", multiple=True, metavar="SET", help="Sets of request_sets.py; default: all.")
@click.option("--smaller", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Keep every Nth request.")  # fmt: skip
@json_flag
@clean_errors
def compare_schedules(model: str, card: str, sets: Sequence[str], smaller: int, as_json: bool) -> None:
    """Compare scheduling choices on the fixed request sets."""
    settings = {"model": model, "card": card, "smaller": smaller}
    runs = [run for name in sets or REQUEST_SETS for run in schedule_runs(model, card, name, smaller)]
    show("schedule", settings, runs, as_json)


@main.command("pools")
@MODEL
@CARD
@JOB
@click.option("--actors", metavar="N,N", default="1,4", show_default=True, callback=parse_sizes, help="Machines.")
@click.option("--in-flight", metavar="N,N", default="4,16,43", show_default=True, callback=parse_sizes,
              help="Units in progress per engine.")  # fmt: skip
@click.option("--join-s", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="Seconds within which machines arrive, one after the other.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), default=2000, show_default=True, help="Rows per machine.")
@json_flag
@clean_errors
def compare_pools(
    model: str, card: str, job: str, actors: Sequence[int], in_flight: Sequence[int], join_s: float, rows: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Compare numbers of machines and of units in progress per machine."""
    machine = Machine.on_card(model, card)
    settings = {"model": model, "card": card, "job": job, "rows": rows, "join_s": join_s}
    runs = []
    for count in actors:
        units = job_units(job, count * rows)
        for each in in_flight:
            progress(f"{count} machines, {each} units in flight")
            found = run_pool(machine, units, actors=count, in_flight=each, join_s=join_s)
            runs.append({"job": f"{count} machines", "choice": f"{each} in flight", **found})
    show("pools", settings, runs, as_json)


if __name__ == "__main__":
    main()
