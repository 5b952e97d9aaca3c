"""What to change before a job runs, each with its reason and what it is expected to bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pipeline.estimate.cards import CardServing, OnCard, kinds_of_weights, limits_on, on_card
from pipeline.estimate.pool import PoolEstimate
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.job_simulation import RequestTokens

K = TypeVar("K", int, str)
WORTH = 0.03  # of the time: less is within what a model of it can tell
ROWS = (64, 128, 256, 512, 1024)
TOKENS = (2048, 4096, 8192, 16384)
MAX_START_SHARE = 0.2  # of an engine's time
UNITS_EACH = 8  # of an engine, below which the last unit weighs


@dataclass(frozen=True)
class Advice:
    """key: what to set, with its value; why, and the effect on the machine time (0.2: a fifth less), None where it is
    none of time."""

    key: str
    why: str
    effect: float | None = None


def advice_for_card(
    card: Card, model: ModelConfig, serving: CardServing, requests: Sequence[RequestTokens]
) -> tuple[Advice, ...]:
    """Rows and tokens of a step and the form of the weights, by the cost model."""
    now = on_card(card, model, serving, requests)
    if now.expected is None:
        return ()
    used = limits_on(card, model, serving)
    by_rows = {seqs: on_card(card, model, replace(serving, max_num_seqs=seqs), requests) for seqs in ROWS}
    advice = [
        Advice(f"engine.max_num_seqs: {seqs}", _why_rows(now, better), gain)
        for seqs, better, gain in _best(now, by_rows, used.max_num_seqs)
    ]
    by_tokens = {n: on_card(card, model, replace(serving, max_num_batched_tokens=n), requests) for n in TOKENS}
    for tokens, _, gain in _best(now, by_tokens, used.max_num_batched_tokens):
        fuller = tokens > used.max_num_batched_tokens
        why = "prompts are computed in fewer, fuller steps" if fuller else "steps are shorter"
        advice.append(Advice(f"engine.max_num_batched_tokens: {tokens}", why, gain))
    forms = {name: on_card(card, model, serving, requests, name) for name in kinds_of_weights(model)}
    for name, _, gain in _best(now, forms, now.weights):
        why = "a checkpoint of that form, or model.quantization, computes the same requests sooner on this card"
        advice.append(Advice(f"weights: {name}", why, gain))
    return tuple(advice)


def _best(now: OnCard, tried: Mapping[K, OnCard], used: K) -> list[tuple[K, OnCard, float]]:
    """The fastest of those tried, where it is worth a change."""
    assert now.expected is not None
    fits = {key: found for key, found in tried.items() if found.expected is not None}
    if not fits:
        return []
    key, best = min(fits.items(), key=lambda item: item[1].expected.wall_s)  # pyright: ignore
    gain = 1 - best.expected.wall_s / now.expected.wall_s  # pyright: ignore
    return [(key, best, gain)] if key != used and gain >= WORTH else []


def _why_rows(now: OnCard, better: OnCard) -> str:
    assert now.expected is not None
    assert better.expected is not None
    return (
        f"the KV cache has room for {better.kv_tokens:,} tokens; {better.expected.sequences:.0f} rows at once on "
        f"average instead of {now.expected.sequences:.0f}, so that a reading of the weights serves more of them"
    )


def advice_for_pool(pools: Sequence[PoolEstimate], units: float, unit_rows: int) -> tuple[Advice, ...]:
    """How many engines, and how large a unit, by the time that starting takes and the units there are."""
    advice: list[Advice] = []
    for pool in pools:
        if pool.actors > 1 and units < UNITS_EACH * pool.actors:
            rows = max(1, int(unit_rows * units / (UNITS_EACH * pool.actors)))
            why = f"{units:.0f} units are few for {pool.actors} engines: some would wait for the last ones"
            advice.append(Advice(f"output.rows_per_file: {rows}", why))
    if len(pools) > 1:
        cheapest = min(pools, key=lambda pool: pool.machine_us.expected)
        fits = [
            pool for pool in pools if pool.machine_us.expected <= cheapest.machine_us.expected / (1 - MAX_START_SHARE)
        ]
        most = max(fits, key=lambda pool: pool.actors)
        if most.actors != 1:
            why = f"start-up and the tail are at most {MAX_START_SHARE:.0%} of what is paid for; more engines cost more"
            advice.append(Advice(f"run.actors: {most.actors}", why))
    return tuple(advice)
