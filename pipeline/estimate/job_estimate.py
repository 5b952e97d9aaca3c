"""Estimate a job's tokens, time and cost on this machine and on each known card.

docs/cost.md has the formulas. Only a sample of prompts is tokenized. An optional probe is a run with --sample; the
job's run reuses its rows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date
from math import ceil
from typing import Any

from pipeline.config import JobConfig
from pipeline.config.sections.server import ServerSection
from pipeline.data.output.parts import PartStore
from pipeline.data.units import UNIT_TOKENS
from pipeline.engine.startup.batch_limits import max_default_seqs
from pipeline.errors import ConfigError
from pipeline.estimate.cards import BLOCK_SIZE, STARTUP_S, CardServing, OnCard, on_card
from pipeline.estimate.divisions import Division, cheapest, division_of, fitting_engines
from pipeline.estimate.lengths import OutputLengths, PromptSample, output_lengths, sample_prompts, tail
from pipeline.estimate.measured import Speed, measured_speed
from pipeline.estimate.pool import PoolEstimate
from pipeline.estimate.prices import FILE, PriceList, load_prices
from pipeline.estimate.recommend import Advice, advice_for_card, advice_for_division, advice_for_pool
from pipeline.estimate.server_estimate import ServerEstimate, estimate_on_server
from pipeline.job.planning.actor_specs import resolve_device
from pipeline.job.planning.fingerprint import JOB
from pipeline.job.planning.history import Remembered, recall
from pipeline.job.planning.plan import JobPlan, make_plan
from pipeline.job.running.run import run_job
from pipeline.job.telemetry.run_log import PLAN, load_runs
from pipeline.machine.host import wall_time, zone_time
from pipeline.model.config import read_config
from pipeline.report.estimate import Estimate, Interval
from pipeline.report.record.row_stats import LengthBucket
from pipeline.report.record.run_record import no_phases
from pipeline.roofline.cards import Card, find_card, load_cards
from pipeline.roofline.job_simulation import RequestTokens
from pipeline.stores.filesystem import storage_for
from pipeline.stores.redaction import shown_url
from pipeline.tokenization.tokenizer import Tokenizer

CPU_BLOCK_SIZE = 16
MAX_SIMULATED = 2048  # requests in the simulated schedule of a card
MIN_BATCHES = 4  # full batches to simulate, so that the ramp-up and the tail have little weight


@dataclass(frozen=True)
class JobEstimate:
    """Estimate of a job. estimate: on this machine; None if its speed is unknown."""

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
    divisions: tuple[Division, ...]
    advice: tuple[Advice, ...]
    doubts: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        raw = asdict(replace(self, sample=replace(self.sample, requests=(), means=()), lengths=self.lengths))
        raw["sample"] = {key: getattr(self.sample, key) for key in ("rows", "errors", "total_rows", "shared")} | {
            "tokens_each": asdict(self.sample.tokens_each)
        }
        raw["lengths"] = {"each": asdict(self.lengths.each), "come_from": self.lengths.come_from}
        return raw


def estimate_job(
    config: JobConfig,
    *,
    sample: int = 2000,
    probe: int | None = None,
    hardware: Sequence[str] = (),
    actors: Sequence[int] = (),
    prices: PriceList | None = None,
    today: date | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> JobEstimate | ServerEstimate:
    """Estimate a job. hardware: names of cards, by default all known ones. actors: numbers of engines to compare, by
    default the job's own. probe: number of rows to compute first; the job's run reuses them.

    Raises what planning a run raises, and ConfigError for an unknown card, or for options that a server does not have.
    """
    server = config.server
    if server is not None:
        _check_options(server, hardware, actors, prices)
    cards = [find_card(name, "--hardware") for name in hardware] or list(load_cards())
    price_list = prices or load_prices(FILE)
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
    block = BLOCK_SIZE if plan.device.startswith("cuda") else CPU_BLOCK_SIZE
    log(f"reading a sample of {min(sample, plan.num_rows):,} rows")
    context = config.engine.max_model_len or read_config(job.checkpoint).max_position
    prompts = sample_prompts(job, plan.source, tokenize, sample, block, context)
    if not prompts.requests:
        raise ConfigError(
            f"input.path {shown_url(config.input.path)}: none of the {prompts.rows} sampled rows has a usable prompt"
        )
    lengths = output_lengths(prompts.requests, history)
    computed_rows = rows_left * (1 - prompts.errors / prompts.rows)
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
    elsewhere, divided, advice = _on_cards(cards, plan, prompts, lengths, work, shared, counts, price_list)
    advice += advice_for_pool(here, work.units, config.output.rows_per_file) if here else ()
    compared_prices = PriceList(tuple(p for p in price_list.prices if any(p.card == c.name for c in cards)), 0.0)
    doubts = tuple(compared_prices.doubts(today or wall_time().date()))
    return JobEstimate(
        config.name, plan.num_rows, rows_left, prompts, prompt_tokens, prompt_tokens.expected * shared, generated,
        lengths, estimate, here, elsewhere, divided, advice, doubts,
    )  # fmt: skip


def save_estimate(config: JobConfig, estimate: Estimate) -> None:
    """Save the estimate in the job's output, for the report of the next run."""
    store = PartStore(config.output.path, storage_for(config.output.path, config.storage_options))
    store.folder.replace(PLAN, json.dumps(estimate.to_json(), indent=1).encode())


def _check_options(
    server: ServerSection, hardware: Sequence[str], actors: Sequence[int], prices: PriceList | None
) -> None:
    """Raise ConfigError for options of our own engine."""
    for flag, value in (("--hardware", hardware), ("--prices", prices)):
        if value:
            raise ConfigError(f"{flag}: has no effect with a server, whose hardware is the server's; remove it")
    if server.base_url is not None and any(count > 1 for count in actors):
        raise ConfigError("--actors: must be 1 with server.base_url: one engine keeps all servers busy")


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
    usd = None if hourly_usd is None else machine.times(hourly_usd / 3.6e9)
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
    plan: JobPlan,
    sample: PromptSample,
    lengths: OutputLengths,
    work: _Work,
    shared: float,
    counts: Sequence[int],
    prices: PriceList,
) -> tuple[tuple[PoolEstimate, ...], tuple[Division, ...], tuple[Advice, ...]]:
    """Estimate each card with each number of engines, compare numbers of cards of an engine, and advise on settings.
    shared: share of prompt tokens in prefixes of other rows."""
    if work.rows < 1:
        return (), (), ()
    model, config = read_config(plan.job.checkpoint), plan.job.config
    pairs = [
        RequestTokens(max(1, round(len(r.prompt_token_ids) * (1 - shared) if i == 0 else again)), output)
        for r, output in zip(sample.requests, lengths.drawn, strict=True)
        for again in [tail(len(r.prompt_token_ids), BLOCK_SIZE)]
        for i in range(r.params.n)
    ]
    min_requests = MIN_BATCHES * (config.engine.max_num_seqs or max_default_seqs(on_gpu=True))
    pairs = (pairs * max(1, ceil(min_requests / len(pairs))))[:MAX_SIMULATED]
    serving = CardServing.from_job(config)
    pools: list[PoolEstimate] = []
    divided: tuple[Division, ...] = ()
    advice: tuple[Advice, ...] = ()
    for card in cards:
        found = on_card(card, model, serving, pairs)
        if found.lacks or found.num_cards > 1 or len(cards) == 1:
            engines = {each.num_cards: each for each in fitting_engines(card, model, serving, pairs)}
            here = [division_of(each, prices) for each in engines.values()]
            if found.lacks and here:
                found = engines[cheapest(here).num_cards]
            divided += tuple(here)
        pools += [_card_pool(found, work, len(pairs), actors, prices) for actors in counts]
        if len(cards) == 1 and not found.lacks:
            advice = advice_for_division(divided, serving.tensor_parallel_size)
            advice += advice_for_card(card, model, replace(serving, tensor_parallel_size=found.num_cards), pairs)
    return tuple(pools), divided, advice


def _card_pool(found: OnCard, work: _Work, requests: int, actors: int, prices: PriceList) -> PoolEstimate:
    nothing = Interval(0, 0, 0)
    if found.best is None or found.expected is None:
        return PoolEstimate(
            found.card, actors, nothing, nothing, weights=found.weights, lacks=found.lacks, num_cards=found.num_cards
        )
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
    machine, price = each.times(actors), prices.price_of(found.card)
    usd = spot = None
    interruptions = prices.spot_interruptions_per_hour * machine.expected / 3.6e9
    if price is not None and price.on_demand_usd is not None:
        usd = machine.times(price.on_demand_usd * found.num_cards / 3.6e9)
    if price is not None and price.spot_usd is not None:
        lost = prices.spot_interruptions_per_hour * start_s / 3600  # a new machine starts and loads again
        spot = machine.times(price.spot_usd * found.num_cards / 3.6e9 * (1 + lost))
    basis = "the cost model, not measured"
    return PoolEstimate(
        found.card, actors, each, machine, usd, spot, interruptions, found.weights, basis, num_cards=found.num_cards
    )
