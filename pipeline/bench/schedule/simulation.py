"""What `pipeline bench schedule` shows: the fixed request sets on cards, and what each choice of the schedule is worth.

The scheduler, its admission and pacing, the block pool and the sizes of graphs are the engine's; no model computes. The
host launches a step while the device computes the one before, so an iteration takes the longer of the two.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipeline.bench.measure import table
from pipeline.bench.request_sets import REQUEST_SETS, RequestSet, find_set
from pipeline.bench.roofline import BLOCK_SIZE, model_size
from pipeline.bench.schedule.host import Device, HostTimes
from pipeline.engine.params import Request, SamplingParams
from pipeline.engine.schedule.block_pool import BlockPool
from pipeline.engine.schedule.pacing import AdmissionPacing
from pipeline.engine.schedule.scheduler import Scheduler
from pipeline.engine.schedule.sequence import Sequence as Row
from pipeline.engine.schedule.sequence import SlotTable
from pipeline.engine.startup.memory import served_form
from pipeline.engine.startup.mixed_tokens import host_bound_tokens
from pipeline.engine.stats import EngineStats
from pipeline.errors import ConfigError
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.roofline.cards import find_card, load_cards
from pipeline.roofline.cost_model import DENSE_BYTES, Ceilings, DecoderSize, Weights
from pipeline.roofline.job_simulation import kv_room
from pipeline.roofline.shares import MEASURED, source

CARDS = ("H100 80GB SXM", "H200", "A100 80GB SXM", "L4", "RTX 4090")
VOCAB = 30_000
ALWAYS = 1 << 30  # tokens of a step


@dataclass(frozen=True)
class Choice:
    """How an engine goes about it. is_paced: admission as by `AdmissionPacing`. captures_mixed: steps with prompts are
    replayed up to the number of tokens that the engine takes. replays_prompts: all are, by graphs that leave attention
    out, as nothing here can. always_int4: the fused int4 product for any number of tokens, at this share of
    the card's products; None: up to the card's crossover, at the share that is assumed of ours. reads_shared_once: of
    a prefix, for all the rows of a step."""

    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    is_paced: bool = True
    captures_mixed: bool = True
    replays_prompts: bool = False
    always_int4: float | None = None
    reads_shared_once: bool = True


CHOICES = {
    "512 rows, 8,192 tokens": Choice(),
    "prompts kernel by kernel": Choice(captures_mixed=False),
    "and admission in each step": Choice(captures_mixed=False, is_paced=False),
    "1,024 rows, 16,384 tokens": Choice(max_num_seqs=1024, max_num_batched_tokens=16_384),
    "64 rows": Choice(max_num_seqs=64),
    "64 rows, prompts by kernel": Choice(max_num_seqs=64, captures_mixed=False),
    "64 rows, and admission each step": Choice(max_num_seqs=64, captures_mixed=False, is_paced=False),
}

# What sets vLLM apart, everything else being as here: Machete's int4 product for prompts too (at 520 of an H100's 989
# TFLOP/s, an estimate), piecewise graphs for steps with prompts, and no cascade unless it is asked for (PR 36318).
_VLLM = Choice(is_paced=False, captures_mixed=False, replays_prompts=True, always_int4=0.525, reads_shared_once=False)
PEERS = {"vLLM's ways, 512 rows": _VLLM, "vLLM's ways, 64 rows": replace(_VLLM, max_num_seqs=64)}


@dataclass(frozen=True)
class ScheduleRun:
    """A request set on a card by one choice; seconds None where it does not fit. waiting_share: of the time, in which
    the device waited for the host; mixed_share: of the steps, those with prompts."""

    card: str
    requests: str
    choice: str
    seconds: float | None
    tokens_per_s: float = 0.0
    waiting_share: float = 0.0
    mixed_share: float = 0.0
    running: float = 0.0
    kv_used: float = 0.0
    num_steps: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class ScheduleBench:
    about: str
    runs: tuple[ScheduleRun, ...]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "schedule", "machine": {"cpu": "none: simulated"}, **asdict(self)}

    def to_text(self) -> str:
        first = {(run.card, run.requests): run.seconds for run in reversed(self.runs)}
        rows = []
        for r in self.runs:
            base = first[r.card, r.requests]
            ratio = None if r.seconds is None or base is None else r.seconds / base
            shares = r.waiting_share, r.mixed_share, r.running, r.kv_used
            rows.append((r.card, r.requests, r.choice, r.seconds, ratio, r.tokens_per_s, *shares, r.preemptions))
        columns = (
            "card <15 | requests <15 | choice <32 | seconds >8.2f | ratio >6.3f | tokens/s >9,.0f | host >6.1%"
            " | mixed >6.0% | running >8.0f | KV used >8.0% | preempted >9,"
        )
        notes = [
            f"Simulated, nothing was run: {self.about}",
            "ratio: the time by that of the first choice. host: the share of the time in which the device waits for",
            "the host. mixed: the share of the steps that have prompts.",
            "",
        ]
        return "\n".join([*notes, *table(columns, rows)])


def bench_schedule(
    model: str = "llama-8b-awq",
    cards: Sequence[str] = (),
    requests: Sequence[str] = (),
    host: HostTimes = HostTimes(),  # noqa: B008 (frozen)
    smaller: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> ScheduleBench:
    """Each request set on each card by each of `CHOICES`. smaller: every so manyth request only. Raises ConfigError for
    a card or request set that is not there."""
    size, weights, about = model_size(model)
    sets = [find_set(name) for name in requests] or list(REQUEST_SETS.values())
    known = {card.name for card in load_cards()}
    names = [find_card(name).name for name in cards] or [name for name in CARDS if name in known]
    runs = []
    for card in dict.fromkeys(names):
        for each in sets:
            say(f"{each.name} on {card}")
            rows = each.smaller(smaller, 1)
            for name, choice in (CHOICES | PEERS).items():
                runs.append(simulate(rows, card, name, choice, size, weights, host))
    told = (
        f"{about}; {source(names)}; {host.launch_s * 1e6:.0f} us to launch a layer. vLLM's ways: the same shares and "
        "scheduler, but its int4 product for prompts too, their steps replayed, no prefix read once."
    )
    return ScheduleBench(told, tuple(runs))


def simulate(
    requests: RequestSet, card: str, name: str, choice: Choice, size: DecoderSize, weights: Weights, host: HostTimes
) -> ScheduleRun:
    """All requests, given at once, longest prompts first as in a job."""
    reached = MEASURED
    if weights.int4 and choice.always_int4 is not None:
        weights = replace(weights, cached=False, fused_tokens=ALWAYS)
        reached = replace(MEASURED, int4=choice.always_int4)
    else:
        borders, ceilings = crossover_of(find_card(card).compute_capability), Ceilings.of_card(find_card(card), reached)
        weights = served_form(weights, size, ceilings, borders, choice.max_num_seqs, DENSE_BYTES)
    mixed_tokens = 0
    if choice.captures_mixed:
        ceilings = Ceilings.of_card(find_card(card), reached)
        mixed_tokens = host_bound_tokens(size, weights, ceilings, choice.max_num_batched_tokens)
    device = Device.of(size, weights, card, choice.max_num_seqs, mixed_tokens, reached)
    rows = sorted(requests.round("1", VOCAB), key=lambda row: -len(row.prompt_token_ids))
    longest = max(len(row.prompt_token_ids) + row.max_tokens for row in rows)
    num_blocks = kv_room(size, weights, device.ceilings) // BLOCK_SIZE
    if num_blocks * BLOCK_SIZE < longest + BLOCK_SIZE:
        return ScheduleRun(card, requests.name, name, None)
    stats, pool = EngineStats(), BlockPool(num_blocks, BLOCK_SIZE)
    slots = SlotTable(choice.max_num_seqs, longest + 1, BLOCK_SIZE)
    scheduler = Scheduler(slots, pool, stats, choice.max_num_batched_tokens, enable_prefix_caching=True)
    scheduler.pacing = AdmissionPacing() if choice.is_paced else None
    for number, row in enumerate(rows):
        params = SamplingParams(max_tokens=row.max_tokens)
        prompt = np.array(row.prompt_token_ids, dtype=np.int32)
        scheduler.add(Row(Request(number, row.prompt_token_ids, params), prompt, number))
    end_N = np.array([len(row.prompt_token_ids) + row.max_tokens for row in rows])
    wall_s = waited_s = before_s = 0.0
    num_mixed = num_ended = 0
    while num_ended < len(rows):
        plan = scheduler.plan()
        if plan is None:
            raise ConfigError(f"{requests.name} on {card}: rows wait and none runs")
        is_mixed = int(plan.count_S.max()) > 1
        is_replayed = device.is_replayed(plan) or choice.replays_prompts
        host_s = host.of_step(len(plan.slot_S), size.layers, is_replayed)
        iteration_s = max(host_s, before_s)
        wall_s, waited_s, num_mixed = wall_s + iteration_s, waited_s + max(host_s - before_s, 0.0), num_mixed + is_mixed
        again = int(slots.num_blocks[plan.slot_S].sum()) - pool.num_held  # blocks, by rows that share them
        before_s = device.step_s(plan, max(again, 0) * BLOCK_SIZE if choice.reads_shared_once else 0)
        scheduler.commit(plan)
        if scheduler.pacing is not None:
            scheduler.pacing.observe(round(iteration_s * 1e6), is_mixed)
        slot_S = plan.sampling_slot_S
        scheduler.append(slot_S, slots.num_known[slot_S])  # tokens that no two positions share
        ended = slot_S[slots.num_known[slot_S] >= end_N[slots.order[slot_S]]].tolist()
        if ended:
            scheduler.finish(ended)
            num_ended += len(ended)
    wall_s += before_s
    tokens = int(end_N.sum())
    return ScheduleRun(
        card,
        requests.name,
        name,
        wall_s,
        tokens / wall_s,
        waited_s / wall_s,
        num_mixed / stats.num_steps,
        stats.batch_sum / stats.num_steps,
        stats.kv_used_ppm_sum / stats.num_steps / 1e6,
        stats.num_steps,
        stats.num_preemptions,
    )
