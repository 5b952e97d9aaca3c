"""Predict a model over several cards: tensor parallel, pipeline parallel and replicas. Needs no card; nothing was run.

python -m tools.parallel            # print the tables, and write them into docs/parallel.md
python -m tools.parallel --check    # exit with 1 if the page is stale

Times come from the cost model at the shares of `roofline/shares.py`. A machine has 8 cards and a job 512 requests for
each card, whose lengths vary evenly from half to one and a half times the mean. Engines of all sizes share them equally.

Tensor parallel: `step_seconds` of a group. Pipeline parallel: each of n cards is a stage with an n-th of the layers.
The requests that run are divided into n micro-batches, each with an n-th of the KV cache. A micro-batch passes through
the stages in order, and starts its next step when the last stage has sampled. Stages wait for one another where
micro-batches differ and at the end, when some have no requests left. Sending to the next stage overlaps with computing.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.bench.roofline import model_size
from pipeline.engine.startup.batch_limits import gpu_limits
from pipeline.engine.startup.memory import usable_kv_room, weight_layout
from pipeline.errors import ConfigError
from pipeline.estimate.prices import load_prices
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
from pipeline.roofline.shares import MEASURED
from tools.generated import ROOT, check_or_write

PAGE = ROOT / "docs" / "parallel.md"
MODELS = {"llama-70b-awq": "AWQ int4", "llama-70b": "bfloat16"}
CARDS = ("H100 80GB SXM", "A100 80GB SXM", "L40S", "L4")
SIZES = (1, 2, 4, 8)  # cards of an engine
SETS = {"2,048 in, 64 out": (2048, 64), "128 in, 1,024 out": (128, 1024)}
REQUESTS = 512  # for each card
BLOCK_SIZE = 64
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
    packed = replace(weights, cached=False).resident_bytes(size.local(num_cards))
    limits = gpu_limits(card.memory_bytes, card.compute_capability, int(packed))
    borders = crossover_of(card.compute_capability)
    form = weight_layout(weights, size, ceilings, borders, limits.max_num_seqs, DENSE_BYTES)
    room = usable_kv_room(size, form, ceilings, DENSE_BYTES)
    return Served(ceilings, form, Batching(limits.max_num_seqs, limits.max_num_batched_tokens, room, BLOCK_SIZE))


def stage_of(size: DecoderSize, num_stages: int) -> DecoderSize:
    """Return the layers of a stage. The first and the last one also hold the embedding or the head, so half of both."""
    return replace(size, layers=size.layers // num_stages, vocab=size.vocab // 2)


def tensor_parallel_seconds(
    requests: Sequence[RequestTokens], size: DecoderSize, weights: Weights, card: Card, num_cards: int
) -> float:
    """Return the time of a job on one engine over `num_cards` cards. Raises ConfigError if a request does not fit."""
    engine = served(card, size, weights, num_cards)
    return simulate_job(requests, size, engine.weights, engine.ceilings, engine.batching).wall_s


def pipeline_parallel_seconds(
    requests: Sequence[RequestTokens], size: DecoderSize, weights: Weights, card: Card, num_stages: int
) -> float:
    """Return the time of a job on one engine with `num_stages` stages. Raises ConfigError if a request does not fit."""
    stage = stage_of(size, num_stages)
    engine = served(card, stage, weights, 1)
    batching = replace(engine.batching, kv_tokens=engine.batching.kv_tokens // num_stages)
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


def speed_table(model: str) -> list[str]:
    """Return rows of tokens/s of a machine with 8 cards, and US dollars per million tokens."""
    size, weights, _ = model_size(model)
    prices = load_prices()
    heads = [f"{name}: {kind}" for name in SETS for kind in ("tensor", "pipeline")]
    rows = [["card", "cards an engine", *heads], ["---", "---:", *["---:"] * len(heads)]]
    for name in CARDS:
        card, price = find_card(name), prices.price_of(name)
        assert price is not None
        assert price.on_demand_usd is not None
        for num_cards in SIZES:
            cells = []
            for mean in SETS.values():
                requests = requests_of(mean, REQUESTS * num_cards)
                tokens = sum(request.prompt + request.output for request in requests)
                for simulate in (tensor_parallel_seconds, pipeline_parallel_seconds):
                    if simulate is pipeline_parallel_seconds and num_cards == 1:
                        cells.append("")
                        continue
                    try:
                        seconds = simulate(requests, size, weights, card, num_cards)
                    except ConfigError:
                        cells.append("")
                        continue
                    rate = tokens / seconds * max(SIZES) / num_cards
                    usd = price.on_demand_usd * max(SIZES) / 3600 / rate * 1e6
                    cells.append(f"{rate:,.0f} ({usd:.2f})")
            if any(cells):
                rows.append([name, str(num_cards), *cells])
    return lines(rows)


def lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    import time

    t = time.time()
    for model in MODELS:
        print(model)
        print("\n".join(speed_table(model)))
        print(time.time() - t)
