"""Advise on settings before a job runs, with the reason and the expected effect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pipeline.estimate.cards import CardServing, OnCard, kinds_of_weights, limits_on, on_card
from pipeline.estimate.divisions import MACHINE, WORTH, Division, cheapest
from pipeline.estimate.pool import PoolEstimate
from pipeline.formatting import money
from pipeline.model.config import ModelConfig
from pipeline.roofline.cards import Card
from pipeline.roofline.job_simulation import RequestTokens

K = TypeVar("K", int, str)
ROWS = (64, 128, 256, 512, 1024)
TOKENS = (2048, 4096, 8192, 16384)
MAX_START_SHARE = 0.2  # share of an engine's time
MIN_UNITS_PER_ENGINE = 8  # with fewer, engines wait long for the last unit


@dataclass(frozen=True)
class Advice:
    """A setting to change. key: the setting with its value. effect: saved share of the machine time (0.2: a fifth);
    None if the advice is not about time."""

    key: str
    reason: str
    effect: float | None = None


def advice_for_card(
    card: Card, model: ModelConfig, serving: CardServing, requests: Sequence[RequestTokens]
) -> tuple[Advice, ...]:
    """Advise on rows and tokens per step and on the form of the weights, by the cost model."""
    now = on_card(card, model, serving, requests)
    if now.expected is None:
        return ()
    current = limits_on(card, model, serving)
    by_rows = {seqs: on_card(card, model, replace(serving, max_num_seqs=seqs), requests) for seqs in ROWS}
    advice = [
        Advice(f"engine.max_num_seqs: {seqs}", _reason_for_rows(now, better), gain)
        for seqs, better, gain in _best(now, by_rows, current.max_num_seqs)
    ]
    by_tokens = {n: on_card(card, model, replace(serving, max_num_batched_tokens=n), requests) for n in TOKENS}
    for tokens, _, gain in _best(now, by_tokens, current.max_num_batched_tokens):
        fuller = tokens > current.max_num_batched_tokens
        reason = "prompts are computed in fewer, fuller steps" if fuller else "steps are shorter"
        advice.append(Advice(f"engine.max_num_batched_tokens: {tokens}", reason, gain))
    forms = {name: on_card(card, model, serving, requests, name) for name in kinds_of_weights(model)}
    for name, _, gain in _best(now, forms, now.weights):
        reason = "a checkpoint in that form, or model.quantization, computes the same requests faster on this card"
        advice.append(Advice(f"weights: {name}", reason, gain))
    return tuple(advice)


def _best(now: OnCard, tried: Mapping[K, OnCard], current: K) -> list[tuple[K, OnCard, float]]:
    """Return the fastest setting if it gains enough over the current one."""
    assert now.expected is not None
    fits = {key: found for key, found in tried.items() if found.expected is not None}
    if not fits:
        return []
    key, best = min(fits.items(), key=lambda item: item[1].expected.wall_s)  # pyright: ignore
    gain = 1 - best.expected.wall_s / now.expected.wall_s  # pyright: ignore
    return [(key, best, gain)] if key != current and gain >= WORTH else []


def _reason_for_rows(now: OnCard, better: OnCard) -> str:
    assert now.expected is not None
    assert better.expected is not None
    return (
        f"the KV cache holds {better.kv_tokens:,} tokens, so {better.expected.sequences:.0f} rows run at once on "
        f"average instead of {now.expected.sequences:.0f}, and each read of the weights serves more of them"
    )


def advice_for_division(found: Sequence[Division], tensor_parallel_size: int) -> tuple[Advice, ...]:
    """Advise on the number of cards of an engine, by the cost per token. found: divisions that the model fits."""
    if not found or (best := cheapest(found)).num_cards == tensor_parallel_size:
        return ()
    key = f"engine.tensor_parallel_size: {best.num_cards}"
    now = next((each for each in found if each.num_cards == tensor_parallel_size), None)
    if now is None:
        reason = f"the model does not fit {tensor_parallel_size} card{'s' * (tensor_parallel_size > 1)}"
        return (Advice(key, reason),)
    if (gain := 1 - now.tokens_per_s / best.tokens_per_s) < WORTH:
        return ()
    reason = f"{MACHINE} cards compute {best.tokens_per_s:,.0f} tokens/s instead of {now.tokens_per_s:,.0f}"
    if best.usd_per_million is not None:
        reason += f", 1M tokens for {money(best.usd_per_million)} instead of {money(now.usd_per_million)}"
    return (Advice(key, reason, gain),)


def advice_for_pool(pools: Sequence[PoolEstimate], units: float, unit_rows: int) -> tuple[Advice, ...]:
    """Advise on the number of engines, by their start-up time, and on the size of units, by their number."""
    advice: list[Advice] = []
    for pool in pools:
        if pool.actors > 1 and units < MIN_UNITS_PER_ENGINE * pool.actors:
            rows = max(1, int(unit_rows * units / (MIN_UNITS_PER_ENGINE * pool.actors)))
            reason = f"{units:.0f} units are too few for {pool.actors} engines: some would wait for the last units"
            advice.append(Advice(f"output.rows_per_file: {rows}", reason))
    if len(pools) > 1:
        cheapest = min(pools, key=lambda pool: pool.machine_us.expected)
        fits = [
            pool for pool in pools if pool.machine_us.expected <= cheapest.machine_us.expected / (1 - MAX_START_SHARE)
        ]
        largest = max(fits, key=lambda pool: pool.actors)
        if largest.actors != 1:
            reason = f"start-up and tail stay within {MAX_START_SHARE:.0%} of the machine time; more engines cost more"
            advice.append(Advice(f"run.actors: {largest.actors}", reason))
    return tuple(advice)
