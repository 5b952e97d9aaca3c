"""Estimate a job's tokens, time and cost on this machine and on each known card.

docs/cost.md has the formulas. Only a sample of prompts is tokenized. An optional probe is a run with --sample; the
job's run reuses its rows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC
from math import ceil
from typing import Any

from pipeline.config import JobConfig
from pipeline.config.sections.server import ServerSection
from pipeline.data.output.parts import PartStore
from pipeline.data.units import UNIT_TOKENS
from pipeline.engine.startup.batch_limits import BLOCK_SIZES, max_default_seqs
from pipeline.errors import ConfigError
from pipeline.estimate.cards import STARTUP_S, Advice, OnCard, advice_for_card, cheapest, on_card, options_on
from pipeline.estimate.fit import ServedModel
from pipeline.estimate.lengths import (
    OutputLengths,
    PromptSample,
    growth_by_steps,
    output_lengths,
    sample_prompts,
    tail,
)
from pipeline.estimate.measured import PoolEstimate, Speed, measured_speed
from pipeline.estimate.server_estimate import ServerEstimate, estimate_on_server
from pipeline.job.planning.actor_specs import resolve_device
from pipeline.job.planning.fingerprint import JOB
from pipeline.job.planning.history import Remembered, recall
from pipeline.job.planning.plan import JobPlan, make_plan
from pipeline.job.planning.step_prompts import max_new_tokens
from pipeline.job.running.run import run_job
from pipeline.job.telemetry.run_log import PLAN, load_runs
from pipeline.machine.host import wall_time, zone_time
from pipeline.prices import Prices
from pipeline.report.estimate import Estimate, Interval
from pipeline.report.record.row_stats import LengthBucket
from pipeline.report.record.run_record import no_phases
from pipeline.roofline.cards import Card, find_card, load_cards
from pipeline.roofline.job_simulation import RequestTokens
from pipeline.stores.filesystem import storage_for
from pipeline.stores.redaction import shown_url
from pipeline.tokenization.tokenizer import Tokenizer

PROBE_STEPS = "--probe 64 measures the steps"
MAX_SIMULATED = 2048  # requests in the simulated schedule of a card
MIN_UNITS = 8  # of each engine; with fewer, engines wait long for the last unit
MIN_BATCHES = 4  # full batches to simulate, so that the ramp-up and the tail have little weight


@dataclass(frozen=True)
class Option:
    """Engine of a number of cards with a form of the weights. card_tokens_per_s: prompt and generated tokens of each
    card. usd_per_million: of these tokens; None without a price."""

    card: str
    weights: str
    num_cards: int
    card_tokens_per_s: float
    usd_per_million: float | None


@dataclass(frozen=True)
class JobEstimate:
    """Estimate of a job. estimate: on this machine; None if its speed is unknown. options: of one card, if one was
    named, and of those that the model needs several of."""

    job: str
    rows: int
    rows_left: int
    sample: PromptSample
    prompts: Interval
    cached_tokens: float
    generated: Interval
    lengths: OutputLengths
    estimate: Estimate | None
    here: tuple[PoolEstimate, ...]
    cards: tuple[PoolEstimate, ...]
    options: tuple[Option, ...]
    advice: tuple[Advice, ...]

    def to_json(self) -> dict[str, Any]:
        raw = asdict(replace(self, sample=replace(self.sample, requests=(), means=()), lengths=self.lengths))
        raw["sample"] = {
            key: getattr(self.sample, key) for key in ("rows", "errors", "dropped", "total_rows", "shared")
        } | {"tokens_each": asdict(self.sample.tokens_each)}
        raw["lengths"] = {"each": asdict(self.lengths.each), "come_from": self.lengths.come_from}
        return raw


def estimate_job(
    config: JobConfig,
    *,
    sample: int = 2000,
    probe: int | None = None,
    hardware: Sequence[str] = (),
    actors: Sequence[int] = (),
    log: Callable[[str], None] = lambda text: None,
) -> JobEstimate | ServerEstimate:
    """Estimate a job. hardware: names of cards, by default all known ones, each perhaps with `=USD`, its price of an
    hour. actors: numbers of engines to compare, by
    default the job's own. probe: number of rows to compute first; the job's run reuses them.

    Raises what planning a run raises, and ConfigError for an unknown card, or for options that a server does not have.
    """
    server = config.server
    if server is not None:
        _check_options(server, hardware, actors)
    cards = [_priced_card(text) for text in hardware] or list(load_cards())
    if probe:
        log(f"computing a probe of {probe:,} rows")
        run_job(config, sample=probe)
    plan = make_plan(config, resolve_device(config), log=log)
    job = plan.job
    store = PartStore(config.output.path, storage_for(config.output.path, config.storage_options))
    history = recall(plan)
    rows_left = plan.num_rows - _rows_done(store, plan)
    counts = tuple(actors) or (plan.job.config.run.pool[1],)
    if not plan.num_rows:
        raise ConfigError(f"input.path {shown_url(config.input.path)}: has no rows, so there is nothing to plan")
    runs_before = len(load_runs(store)) if store.folder.read(JOB) is not None else 0
    if server is not None:
        return estimate_on_server(plan, history, rows_left, runs_before, counts, sample)
    tokenize = job.tokenize(Tokenizer.from_folder(str(job.checkpoint), job.chat_template), wall_time())
    model = ServedModel.read(job.checkpoint, job.engine_config())
    block = BLOCK_SIZES[plan.device.partition(":")[0]]
    log(f"reading a sample of {min(sample, plan.num_rows):,} rows")
    context = config.engine.max_model_len or model.config.max_position
    prompts = sample_prompts(plan, tokenize, sample, block, context)
    if not prompts.requests:
        raise ConfigError(
            f"input.path {shown_url(config.input.path)}: none of the {prompts.rows} sampled rows has a usable prompt"
            f"{' and meets input.when' if prompts.dropped else ''}"
        )
    grown = growth_by_steps(history) if config.steps else 1.0
    growth = grown or 1.0
    lengths = output_lengths(prompts.requests, history, growth, max_new_tokens(config.steps, repeated=True))
    if grown is None:
        lengths = replace(lengths, come_from=f"{lengths.come_from}; the first prompt alone ({PROBE_STEPS})")
    computed_rows = rows_left * len(prompts.requests) / prompts.rows
    prompts = replace(prompts, growth=growth)
    prompt_tokens = prompts.tokens_each.times(computed_rows)
    shared = _shared(prompts, history)
    generated = lengths.each.times(computed_rows)
    speed = measured_speed(history, computed_rows / max(counts), job.task is None, config.quality.sample)
    units = _units(plan, computed_rows, prompts, lengths)
    repeated = prompts.repeated / len(prompts.requests) * computed_rows
    computed = prompt_tokens.times(1 - shared) + Interval(*[repeated] * 3)
    work = _Work(computed, generated, computed_rows, units, computed_rows * prompts.samples_each)
    here: tuple[PoolEstimate, ...] = ()
    estimate: Estimate | None = None
    if speed is not None and computed_rows >= 1:
        here = tuple(_here(speed, work, n, config.cost.hourly_usd) for n in counts)
        estimate = _estimate(plan, runs_before, speed, work, lengths, prompt_tokens.expected * shared)
    elsewhere, options, advice = _on_cards(cards, model, prompts, lengths, work, shared, counts)
    advice += advice_for_pools(here, work.units, config.output.rows_per_file)
    return JobEstimate(
        config.name, plan.num_rows, rows_left, prompts, prompt_tokens, prompt_tokens.expected * shared, generated,
        lengths, estimate, here, elsewhere, options, advice,
    )  # fmt: skip


def save_estimate(config: JobConfig, estimate: Estimate) -> None:
    """Save the estimate in the job's output, for the report of the next run."""
    store = PartStore(config.output.path, storage_for(config.output.path, config.storage_options))
    store.folder.replace(PLAN, json.dumps(estimate.to_json(), indent=1).encode())


def _check_options(server: ServerSection, hardware: Sequence[str], actors: Sequence[int]) -> None:
    """Raise ConfigError for options of our own engine."""
    if hardware:
        raise ConfigError("--hardware: has no effect with a server, whose hardware is the server's; remove it")
    if server.base_url is not None and any(count > 1 for count in actors):
        raise ConfigError("--actors: must be 1 with server.base_url: one engine keeps all servers busy")


def _priced_card(text: str) -> Card:
    """Return the card of `--hardware CARD` or `CARD=USD`."""
    name, sign, price = text.partition("=")
    card = find_card(name, "--hardware")
    if not sign:
        return card
    try:
        usd = float(price)
    except ValueError:
        usd = 0.0
    if not 0 < usd < float("inf"):
        raise ConfigError(f"--hardware {text}: expected CARD=USD, the price of one card for an hour, such as h100=2.10")
    return replace(card, on_demand_usd=usd, spot_usd=None)


@dataclass(frozen=True)
class _Work:
    """Work that is left. prompt: tokens to compute, without cached ones. sequences: all samples of all rows."""

    prompt: Interval
    generated: Interval
    rows: float
    units: float
    sequences: float

    def imbalance(self, actors: int) -> float:
        """Return the time of the last engine over the mean of all engines, for units of equal cost."""
        each = self.units / actors
        return ceil(each) / each if actors > 1 else 1.0


def _rows_done(store: PartStore, plan: JobPlan) -> int:
    if store.folder.read(JOB) is None:
        return 0
    return min(plan.num_rows, store.list(plan.fingerprint.short).num_rows)


def _shared(sample: PromptSample, history: Sequence[Remembered]) -> float:
    """Return the share of prompt tokens that hit the prefix cache: that of earlier runs, else that of the sample. With
    several samples per row only the first one counts, since the others share its blocks."""
    for run in (each.run for each in history if each.same_work):
        lengths = sum((run.row_stats + run.sample_row_stats).lengths.values(), LengthBucket())
        if lengths.input_tokens:
            return lengths.cached_tokens / lengths.input_tokens
    return sample.shared


def _units(plan: JobPlan, rows: float, sample: PromptSample, lengths: OutputLengths) -> float:
    each = sample.reserved / len(sample.requests)
    return max(1.0, rows / plan.job.config.output.rows_per_file, rows * each / UNIT_TOKENS)


def _here(speed: Speed, work: _Work, actors: int, hourly_usd: float | None) -> PoolEstimate:
    def wall_us(prompt: float, generated: float) -> float:
        share = speed.compute_us(prompt, generated) / actors * work.imbalance(actors)
        return speed.startup_us + speed.load_us + share

    expected = wall_us(work.prompt.expected, work.generated.expected)
    low = wall_us(work.prompt.low, work.generated.low) * speed.fastest
    high = wall_us(work.prompt.high, work.generated.high) * speed.slowest
    each = Interval(low, expected, high)
    machine = each.times(actors)
    usd = None if hourly_usd is None else machine.times(Prices(hourly_usd).machine_usd(1))
    driver = Interval(*[speed.driver_us] * 3)
    return PoolEstimate("this machine", actors, each + driver, machine, usd, basis=speed.comes_from)


def _estimate(
    plan: JobPlan, runs_before: int, speed: Speed, work: _Work, lengths: OutputLengths, cached: float
) -> Estimate:
    actors, hourly_usd = plan.job.config.run.pool[1], plan.job.config.cost.hourly_usd
    pool = _here(speed, work, actors, hourly_usd)
    phases: dict[str, int] = no_phases()
    phases["startup"], phases["load"] = round(speed.startup_us * actors), round(speed.load_us * actors)
    phases["prefill"] = round(speed.prompt_token_us * work.prompt.expected)
    phases["decode"] = round(speed.generated_token_us * work.generated.expected)
    computing = phases["prefill"] + phases["decode"]
    phases |= {phase: round(share * computing) for phase, share in speed.overhead.items()}
    # idle: engines that wait for the last one
    phases["idle"] += max(0, round(pool.machine_us.expected) - sum(phases.values()))
    return Estimate(
        made_at=zone_time(UTC).isoformat(timespec="seconds"),
        runs_before=runs_before,
        rows=round(work.rows),
        prompt_tokens=work.prompt,
        cached_tokens=cached,
        generated_tokens=work.generated,
        machine_us=pool.machine_us,
        wall_us=pool.wall_us,
        phases_us=phases,
        hourly_usd=hourly_usd,
        speeds_from=speed.comes_from,
        lengths_from=lengths.come_from,
        actors=actors,
        job=plan.fingerprint.undated,
    )


def _on_cards(
    cards: Sequence[Card],
    model: ServedModel,
    sample: PromptSample,
    lengths: OutputLengths,
    work: _Work,
    shared: float,
    counts: Sequence[int],
) -> tuple[tuple[PoolEstimate, ...], tuple[Option, ...], tuple[Advice, ...]]:
    """Estimate each card with each number of engines. Of one card, compare the forms of the model and numbers of cards
    of an engine, and advise. shared: share of prompt tokens in prefixes of other rows. The steps of a
    row count as one request."""
    if work.rows < 1:
        return (), (), ()
    pairs = [
        RequestTokens(
            max(1, round(sample.growth * len(r.prompt_token_ids) * (1 - shared) if i == 0 else again)), output
        )
        for r, output in zip(sample.requests, lengths.drawn, strict=True)
        for again in [tail(len(r.prompt_token_ids), BLOCK_SIZES["cuda"])]
        for i in range(r.params.n)
    ]
    min_requests = MIN_BATCHES * (model.engine.max_num_seqs or max_default_seqs(on_gpu=True))
    pairs = (pairs * max(1, ceil(min_requests / len(pairs))))[:MAX_SIMULATED]
    pools: list[PoolEstimate] = []
    options: list[OnCard] = []
    advice: list[Advice] = []
    for card in cards:
        found, of_card = on_card(card, model, model.engine.tensor_parallel_size, pairs), []
        if len(cards) == 1:
            of_card = options_on(card, model.forms(), pairs)
            advice = advice_for_card(of_card, model)
        elif found.lacks or found.num_cards > 1:
            of_card = options_on(card, [model], pairs)
        options += of_card
        if found.lacks and (own := [option for option in of_card if option.model is model]):
            found = cheapest(own)
        pools += [_card_pool(found, work, len(pairs), actors) for actors in counts]
    compared = (Option(o.card.name, o.model.form, o.num_cards, o.card_tokens_per_s, o.usd_per_million) for o in options)
    return tuple(pools), tuple(compared), tuple(advice)


def _card_pool(found: OnCard, work: _Work, requests: int, actors: int) -> PoolEstimate:
    card, num_cards, nothing = found.card, found.num_cards, Interval(0, 0, 0)
    pool = PoolEstimate(card.name, actors, nothing, nothing, weights=found.model.form, num_cards=num_cards)
    if found.lacks:
        return replace(pool, lacks=found.lacks)
    scale = work.sequences / requests / actors * work.imbalance(actors)
    start_s = STARTUP_S + found.load_s
    # The low end assumes the data sheet's speed, an upper bound. The high end is slower than expected by the same
    # ratio.
    tokens = work.prompt.expected + work.generated.expected
    low, high = (work.prompt.low + work.generated.low) / tokens, (work.prompt.high + work.generated.high) / tokens
    slow_s = found.expected.wall_s * found.expected.wall_s / found.best.wall_s
    each = Interval(
        (start_s + scale * found.best.wall_s * low) * 1e6,
        (start_s + scale * found.expected.wall_s) * 1e6,
        (start_s + scale * slow_s * high) * 1e6,
    )
    machine = each.times(actors)
    usd, spot_usd = (
        None if price is None else machine.times(Prices(price * num_cards).machine_usd(1))
        for price in (card.on_demand_usd, card.spot_usd)
    )
    return replace(
        pool, wall_us=each, machine_us=machine, usd=usd, spot_usd=spot_usd, basis="the cost model, not measured"
    )


def advice_for_pools(pools: Sequence[PoolEstimate], units: float, unit_rows: int) -> tuple[Advice, ...]:
    """Advise on the size of units where a pool has too few of them."""
    return tuple(
        Advice(
            f"output.rows_per_file: {max(1, int(unit_rows * units / (MIN_UNITS * pool.actors)))}",
            f"{units:.0f} units are too few for {pool.actors} engines: some would wait for the last units",
        )
        for pool in pools
        if pool.actors > 1 and units < MIN_UNITS * pool.actors
    )
