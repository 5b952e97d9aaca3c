"""Predict a model over several cards: tensor parallel, pipeline parallel and replicas. Needs no card; nothing was run.

python -m tools.parallel            # print the tables and write them into docs/parallel.md; takes two minutes
python -m tools.parallel --check    # exit with 1 if the page is stale

Times come from the cost model at the shares of `roofline/shares.py`. A machine has 8 cards and a job 256 requests for
each card, whose lengths vary evenly from half to one and a half times the mean. Engines share them equally.

Tensor parallel: `step_seconds` of a group. Pipeline parallel: each of n cards is a stage with an n-th of the layers.
The requests that run are divided into n micro-batches, each with an n-th of the KV cache. A micro-batch passes through
the stages in order, and starts its next step when the last stage has sampled. Stages wait for one another where
micro-batches differ and at the end, when some have no requests left. Sending to the next stage overlaps with computing.
"""

import heapq
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np

from benchmarks.shape_costs import kv_room, resident_bytes, weight_layout
from benchmarks.shapes import model_size
from pipeline.engine.startup.batch_limits import BLOCK_SIZES, gpu_limits
from pipeline.engine.startup.memory import SLACK_BYTES
from pipeline.estimate.fit import GROUP_SIZES
from pipeline.formatting import counted
from pipeline.kernels.triton.linear.crossover import crossover_of
from pipeline.roofline.cards import Card, find_card
from pipeline.roofline.cost_model import (
    DENSE,
    DENSE_BYTES,
    Ceilings,
    DecoderSize,
    StepLoad,
    Weights,
    linear_seconds,
    step_seconds,
)
from pipeline.roofline.exchanges import all_reduce_seconds, step_exchanges
from pipeline.roofline.job_simulation import Batching, RequestTokens, RunningRequests, simulate_job
from pipeline.roofline.kv_pages import KVPages
from pipeline.roofline.shares import MEASURED
from tools.generated import ROOT, check_or_write

PAGE = ROOT / "docs" / "parallel.md"
MODELS = {"llama-70b-awq": "AWQ int4", "llama-70b": "bfloat16"}
KINDS = ("tensor", "pipeline")
CARDS = ("H100 80GB SXM", "A100 80GB SXM", "L40S", "L4")
SETS = {"2,048 in, 64 out": (2048, 64), "128 in, 1,024 out": (128, 1024)}
REQUESTS = 256  # for each card
STEP_TOKENS = (1024, 8192)  # limits of a step to choose from; long prompts of one micro-batch keep the others waiting
MIN_AT_ONCE = 8  # requests of a micro-batch; with fewer, the KV cache counts as too small
SEED = 7
VLLM_PADDING = 64  # of the vocabulary, `DEFAULT_VOCAB_PADDING_SIZE`


@dataclass(frozen=True)
class Served:
    """Form of the weights, and limits of a step, of an engine over `num_cards` cards."""

    ceilings: Ceilings
    weights: Weights
    batching: Batching


def requests_of(mean: tuple[int, int], count: int) -> list[RequestTokens]:
    """Return `count` requests around a mean prompt and output."""
    random = np.random.default_rng(SEED)
    lengths = (random.integers(tokens // 2, tokens + tokens // 2, count, endpoint=True) for tokens in mean)
    return [RequestTokens(int(prompt), int(output)) for prompt, output in zip(*lengths, strict=True)]


def served(card: Card, size: DecoderSize, weights: Weights, num_cards: int) -> Served:
    """Return the engine's settings for a group of cards. size: of what the group holds."""
    ceilings = Ceilings.of_card(card, MEASURED, num_cards)
    packed = resident_bytes(replace(weights, cached=False), size.local(num_cards))
    limits = gpu_limits(card.memory_bytes, card.compute_capability, int(packed))
    borders = crossover_of(card.compute_capability)
    form = weight_layout(weights, size, ceilings, borders, limits.max_num_seqs)
    room, pages = kv_room(size, form, ceilings, SLACK_BYTES), KVPages(BLOCK_SIZES["cuda"], 0)
    return Served(
        ceilings, form, Batching(limits.max_num_seqs, limits.max_num_batched_tokens, room // pages.page_size, pages)
    )


def stage_of(size: DecoderSize, num_stages: int) -> DecoderSize:
    """Return the layers of a stage. The first and the last one also hold the embedding or the head, so half of both."""
    return replace(size, layers=size.layers // num_stages, vocab=size.vocab // 2)


def tensor_parallel_seconds(requests: Sequence[RequestTokens], size: DecoderSize, engine: Served) -> float:
    """Return the time of a job on an engine whose cards compute each layer together."""
    return simulate_job(requests, size, engine.weights, engine.ceilings, engine.batching).wall_s


def pipeline_parallel_seconds(
    requests: Sequence[RequestTokens], size: DecoderSize, num_stages: int, engine: Served
) -> float:
    """Return the time of a job on an engine with `num_stages` stages. engine: settings of a stage and a micro-batch."""
    stage, batching = stage_of(size, num_stages), engine.batching
    waiting, link = deque(requests), engine.ceilings.link
    batches = [RunningRequests(waiting, batching) for _ in range(num_stages)]
    free_at = [0.0] * num_stages  # of each stage
    ready = [(0.0, index) for index in range(num_stages)]  # micro-batches by the time of their next step
    while ready:
        at, index = heapq.heappop(ready)
        batches[index].admit()
        if not len(batches[index].computed):
            continue
        load = batches[index].step()
        stage_s, head_s = stage_seconds(load, size, stage, engine)
        send_s = link.start_s + link.hop_s + load.num_tokens * size.hidden * DENSE_BYTES / link.bytes_per_s
        for position in range(num_stages):
            is_last = position == num_stages - 1
            at = max(at, free_at[position]) + stage_s + is_last * head_s
            free_at[position] = at
            at += 0.0 if is_last else send_s
        heapq.heappush(ready, (at + link.start_s + link.hop_s, index))  # the sampled tokens reach the first stage
    return free_at[-1]


def stage_seconds(load: StepLoad, size: DecoderSize, stage: DecoderSize, engine: Served) -> tuple[float, float]:
    """Return the time of a micro-batch on each stage, and that of the head on the last one."""
    layers = step_seconds(replace(load, num_rows=0), stage, engine.weights, engine.ceilings)
    head_s = 0.0
    if load.num_rows:
        head_s = linear_seconds(load.num_rows, size.hidden, size.vocab, DENSE, engine.ceilings)["dense"]
    return layers.total_s, head_s


def fastest_seconds(
    requests: Sequence[RequestTokens], size: DecoderSize, weights: Weights, card: Card, num_cards: int, kind: str
) -> float | None:
    """Return the time of a job on one engine at the best of `STEP_TOKENS`; None if the KV cache is too small."""
    if kind == "tensor":
        engine, num_batches = served(card, size, weights, num_cards), 1
    else:
        engine, num_batches = served(card, stage_of(size, num_cards), weights, 1), num_cards
    num_pages = engine.batching.num_pages // num_batches
    longest = max(request.prompt + request.output for request in requests)
    if engine.batching.pages.max_tokens(num_pages) < MIN_AT_ONCE * longest:
        return None
    times = []
    for tokens in STEP_TOKENS:
        limits = replace(engine.batching, num_pages=num_pages, max_num_batched_tokens=tokens)
        each = replace(engine, batching=replace(limits, max_num_seqs=min(limits.max_num_seqs, tokens)))
        if kind == "tensor":
            times.append(tensor_parallel_seconds(requests, size, each))
        else:
            times.append(pipeline_parallel_seconds(requests, size, num_cards, each))
    return min(times)


@cache
def rates(model: str) -> dict[tuple[str, int], list[float | None]]:
    """Return tokens/s of each card, by kind of card and cards of an engine: tensor and pipeline parallel for each of
    `SETS`. None: does not fit, or one stage."""
    size, weights = model_size(model)
    found: dict[tuple[str, int], list[float | None]] = {}
    for name, num_cards in product(CARDS, GROUP_SIZES):
        cells = found[name, num_cards] = []
        for mean in SETS.values():
            requests = requests_of(mean, REQUESTS * num_cards)
            tokens = sum(request.prompt + request.output for request in requests)
            for kind in KINDS:
                seconds = None
                if kind == "tensor" or num_cards > 1:
                    seconds = fastest_seconds(requests, size, weights, find_card(name), num_cards, kind)
                cells.append(None if seconds is None else tokens / seconds / num_cards)
    return found


def speed_table(model: str) -> list[str]:
    """Return rows of tokens/s of a machine with 8 cards, and US dollars per million tokens."""
    heads = [f"{name}: {kind}" for name in SETS for kind in KINDS]
    rows = [["card", "cards an engine", *heads], ["---", "---:", *["---:"] * len(heads)]]
    for (name, num_cards), cells in rates(model).items():
        usd = find_card(name).on_demand_usd
        assert usd is not None
        shown = [
            "" if rate is None else f"{rate * max(GROUP_SIZES):,.0f} ({usd / 3600 / rate * 1e6:.2f})" for rate in cells
        ]
        if any(shown):
            rows.append([name, str(num_cards), *shown])
    return lines(rows)


def change_table() -> list[str]:
    """Return rows of the change of the cost of a token, from tensor parallel (or replicas) to pipeline parallel, each
    with its best number of cards."""
    rows = [["card", "weights", *SETS], ["---", "---", *["---:"] * len(SETS)]]
    for (model, weights), name in product(MODELS.items(), CARDS):
        best = [
            max(
                (rate for (card, _), cells in rates(model).items() if card == name and (rate := cells[column])),
                default=0.0,
            )
            for column in range(len(SETS) * len(KINDS))
        ]
        changes = [
            f"{tensor / pipeline - 1:+.0%}" if pipeline else ""
            for tensor, pipeline in zip(best[::2], best[1::2], strict=True)
        ]
        if any(changes):
            rows.append([name, weights, *changes])
    return lines(rows)


def exchange_table(model: str = "llama-70b", num_cards: int = 4) -> list[str]:
    """Return rows of the exchanges of a step, here and in vLLM. vLLM's were counted in the source of 0.32.0: files and
    lines are on the page."""
    size, _ = model_size(model)
    rows = [
        ["tokens of a step", "logits", "all-reduces", "MB", "gather, MB", "vLLM: all-reduces", "MB", "all-gather, MB"],
        ["---:"] * 8,
    ]
    padded = -(-size.vocab // VLLM_PADDING) * VLLM_PADDING
    for tokens, logits in ((1, 1), (256, 256), (8192, 4)):
        found = step_exchanges(size.layers, size.hidden, size.vocab, num_cards, tokens, logits)
        sums, (gather,) = found[:-1], found[-1:]
        theirs = 2 * size.layers + 1
        figures = (
            sum(each.num_bytes * each.count for each in sums),
            gather.num_bytes,
            theirs * tokens * size.hidden * DENSE_BYTES,
            logits * padded * DENSE_BYTES,
        )
        ours_mb, gather_mb, vllm_mb, all_gather_mb = (f"{num_bytes / 1e6:,.1f}" for num_bytes in figures)
        count = sum(each.count for each in sums)
        rows.append([f"{tokens:,}", f"{logits:,}", f"{count}", ours_mb, gather_mb, f"{theirs}", vllm_mb, all_gather_mb])
    return lines(rows)


def all_reduce_table(hidden: int = 8192) -> list[str]:
    """Return rows of microseconds of an all-reduce of hidden states."""
    tokens = (1, 64, 512, 8192)
    rows = [["link", "cards", *(counted(each, "token") for each in tokens)], ["---", *["---:"] * (1 + len(tokens))]]
    for name, kind in (("H100 80GB SXM", "NVLink of an H100"), ("L40S", "PCIe 4")):
        for num_cards in GROUP_SIZES[1:]:
            link = Ceilings.of_card(find_card(name), MEASURED, num_cards).link
            times = (all_reduce_seconds(each * hidden * DENSE_BYTES, num_cards, link) for each in tokens)
            rows.append([kind, str(num_cards), *(f"{seconds * 1e6:,.0f}" for seconds in times)])
    return lines(rows)


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def page() -> str:
    """Return the page with its current tables."""
    tables = {model: partial(speed_table, model) for model in MODELS}
    text = PAGE.read_text(encoding="utf-8")
    for name, make in {
        **tables,
        "change": change_table,
        "exchanges": exchange_table,
        "all-reduce": all_reduce_table,
    }.items():
        head, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        assert mark, f"{PAGE} has no table {name}"
        tail = rest.partition("<!-- end of table -->")[2]
        table = "\n".join(make())
        text = f"{head}{mark}\n{table}\n\n<!-- end of table -->{tail}"
        if "--check" not in sys.argv[1:]:
            print(f"{name}\n\n{table}\n", flush=True)
    return text


if __name__ == "__main__":
    check_or_write({PAGE: page()}, "tools.parallel")
