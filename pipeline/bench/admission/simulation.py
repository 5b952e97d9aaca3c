"""What `pipeline bench admission` shows: the engine's scheduler on jobs whose KV cache is tight, with its own rule of
admission and with others.

The scheduler, its rule and its block pool are the engine's; no model computes. Each row ends at a length that the rule
does not know. A step takes what the cost model says, on a card and on two cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pipeline.bench.admission.rows import JOBS, JobRow, job_rows
from pipeline.bench.admission.rules import RULES, Rule
from pipeline.bench.measure import table
from pipeline.bench.roofline import BLOCK_SIZE, model_size
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence as Row
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.schedule.step_plan import StepPlan
from pipeline.engine.stats import EngineStats
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings, DecoderSize, Reached, StepTokens, Weights, step_seconds
from pipeline.roofline.shares import MEASURED

MAX_NUM_BATCHED_TOKENS = 8192
CARD_MODEL, CARD = "llama-8b", "h100"
CORES_MODEL = "qwen3-0.6b"
# Two cores with bfloat16 as docs/performance.md measured them: products, memory, and the part of it that KV reads get.
CORES = Ceilings("two cores", 60e9, 975e9, 16e9, Reached(kv=0.45, gemm=0.85, attention=0.85))


@dataclass(frozen=True)
class Machine:
    size: DecoderSize
    weights: Weights
    ceilings: Ceilings

    def step_s(self, plan: StepPlan) -> float:
        tokens = StepTokens(plan.count_S, plan.start_S + plan.count_S, int(plan.samples_S.sum()))
        return step_seconds(tokens, self.size, self.weights, self.ceilings).total_s


@dataclass(frozen=True)
class AdmissionRun:
    """A job by one rule. kv_share: of the blocks that a full batch of mean rows holds in the end, those that there are.
    running, kv_used: means over steps. card_s, cores_s: by the cost model."""

    job: str
    kv_share: float
    rule: str
    num_steps: int
    running: float
    kv_used: float
    preemptions: int
    repeated_tokens: int
    card_s: float
    cores_s: float


@dataclass(frozen=True)
class AdmissionBench:
    about: str
    runs: tuple[AdmissionRun, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "admission", "machine": {"cpu": "none: simulated"}, **asdict(self)}

    def to_text(self) -> str:
        first = {(run.job, run.kv_share): run for run in reversed(self.runs)}
        rows = []
        for r in self.runs:
            base = first[r.job, r.kv_share]
            seconds = (r.card_s, r.card_s / base.card_s, r.cores_s / base.cores_s)
            rows.append(
                (
                    r.job,
                    r.kv_share,
                    r.rule,
                    r.num_steps,
                    r.running,
                    r.kv_used,
                    r.preemptions,
                    r.repeated_tokens,
                    *seconds,
                )
            )
        columns = (
            "job <14 | KV >5.2f | rule <26 | steps >8, | running >7.1f | KV used >7.0% | preempted >9, | "
            "repeated >10, | card, s >8.1f | ratio >6.3f | cores >6.3f"
        )
        return "\n".join(
            [
                f"Simulated, nothing was run: {self.about}",
                "KV: the cache, as a share of what a full batch of mean rows holds in the end. repeated: tokens",
                "computed again after a preemption. ratio: the job's time on the card by that of the first rule;",
                "cores: the same on the cores.",
                "",
                *table(columns, rows),
            ]
        )


def bench_admission(
    jobs: Sequence[str] = tuple(JOBS),
    kv_shares: Sequence[float] = (0.25, 0.5, 1.0),
    max_num_seqs: int = 256,
    rows: int = 2000,
    seed: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> AdmissionBench:
    """Each job at each size of the cache, by each rule. Raises ConfigError for a job that is not there."""
    card_size, card_weights, _ = model_size(CARD_MODEL)
    cores_size, cores_weights, _ = model_size(CORES_MODEL)
    ceilings = Ceilings.of_card(find_card(CARD), MEASURED)
    machines = Machine(card_size, card_weights, ceilings), Machine(cores_size, cores_weights, CORES)
    runs = []
    for job in jobs or JOBS:
        of_job = job_rows(job, rows, seed)
        for kv_share in kv_shares:
            say(f"{job}, KV {kv_share:g}")
            num_blocks = cache_blocks(of_job, max_num_seqs, kv_share)
            for name, rule in RULES.items():
                found = simulate(of_job, rule, num_blocks, max_num_seqs, machines)
                runs.append(AdmissionRun(job, kv_share, name, **found))
    about = (
        f"{rows:,} rows a job, seed {seed}, at most {max_num_seqs} at once. Card: {CARD_MODEL} on {ceilings.name}; "
        f"cores: {CORES_MODEL} on two cores with bfloat16."
    )
    return AdmissionBench(about, tuple(runs))


def cache_blocks(rows: Sequence[JobRow], max_num_seqs: int, kv_share: float) -> int:
    """Blocks of `kv_share` of what a full batch of mean rows holds in the end; at least what the longest row needs."""
    lengths = [len(row.prompt) + row.output for row in rows]
    batch = max_num_seqs * sum(lengths) / len(lengths)
    return max(round(kv_share * batch / BLOCK_SIZE), -(-max(lengths) // BLOCK_SIZE))


def simulate(
    rows: Sequence[JobRow], rule: Rule, num_blocks: int, max_num_seqs: int, machines: Sequence[Machine]
) -> dict[str, Any]:
    """Run all rows, in their order, at most twice a batch of them inside; what an `AdmissionRun` says of it."""
    stats, pool = EngineStats(), BlockPool(num_blocks, BLOCK_SIZE)
    max_model_len = max(len(row.prompt) + row.max_tokens for row in rows)
    slots = SlotTable(max_num_seqs, max_model_len, BLOCK_SIZE)
    scheduler = Scheduler(slots, pool, stats, MAX_NUM_BATCHED_TOKENS, enable_prefix_caching=True)
    scheduler.admission = rule.admission(slots, pool, stats, True)
    end_N = np.array([len(row.prompt) + row.output for row in rows])
    num_added = num_inside = num_ended = 0
    seconds = [0.0] * len(machines)
    while num_ended < len(rows):
        while num_added < len(rows) and num_inside < 2 * max_num_seqs:
            row = rows[num_added]
            params = SamplingParams(max_tokens=row.output if rule.knows_lengths else row.max_tokens)
            scheduler.add(Row(Request(num_added, row.prompt.tolist(), params), row.prompt, num_added))
            num_added, num_inside = num_added + 1, num_inside + 1
        plan = scheduler.plan()
        assert plan is not None, "rows wait and none runs"
        seconds = [total + machine.step_s(plan) for total, machine in zip(seconds, machines)]
        scheduler.commit(plan)
        slot_S = plan.sampling_slot_S
        scheduler.append(slot_S, slots.num_known[slot_S])  # tokens that no two positions share
        ended = slot_S[slots.num_known[slot_S] >= end_N[slots.order[slot_S]]].tolist()
        if ended:
            scheduler.finish(ended)
            num_ended, num_inside = num_ended + len(ended), num_inside - len(ended)
    return {
        "num_steps": stats.num_steps,
        "running": stats.batch_sum / stats.num_steps,
        "kv_used": stats.kv_used_ppm_sum / stats.num_steps / 1e6,
        "preemptions": stats.num_preemptions,
        "repeated_tokens": stats.recomputed_tokens,
        "card_s": seconds[0],
        "cores_s": seconds[1],
    }
