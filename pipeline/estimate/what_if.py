"""Estimate a finished job on other hardware, or with another number of engines, form of weights or price.

Phases are measured by the run; the cost model scales the computing time from its own card to another. If the run was
on no known card, the time is the cost model's own, at the engine's share of the card's data sheet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from pipeline.checkpoints.locate import locate_model
from pipeline.errors import ConfigError, PipelineError
from pipeline.estimate.cards import STARTUP_S, CardServing, OnCard, on_card
from pipeline.estimate.prices import PriceList
from pipeline.formatting import duration, money, table
from pipeline.model.config import ModelConfig, read_config
from pipeline.report.run_report import RunReport
from pipeline.report.savings import NAMES, Saving
from pipeline.roofline.cards import Card, card_of_device, find_card
from pipeline.roofline.job_simulation import RequestTokens

KEYS = ("hardware", "actors", "quantization", "price")
QUANTIZATIONS = {"awq": "AWQ int4", "none": "16 bit", "fp8": "fp8"}
REQUESTS = 1024  # in the simulated schedule


@dataclass(frozen=True)
class Case:
    """Times in microseconds; usd is None without a price."""

    name: str
    wall_us: float
    machine_us: float
    usd: float | None
    basis: str


@dataclass(frozen=True)
class WhatIf:
    changes: Mapping[str, str]
    now: Case
    then: Case

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self, width: int | None = None) -> str:
        cases = (self.now, self.then)
        rows = [(c.name, duration(c.wall_us / 1e6), duration(c.machine_us / 1e6), money(c.usd)) for c in cases]
        head = ("", "time", "machine time", "US dollars")
        notes = "\n".join(f"{case.name}: {case.basis}" for case in cases)
        return f"{table(rows, head=head, sides='<>', width=width)}\n\n{notes}"


def what_if(report: RunReport, changes: Mapping[str, str], prices: PriceList) -> WhatIf:
    """Estimate the job with `changes` (keys: KEYS). Raises ConfigError for an unknown key or an impossible change."""
    for key in changes:
        if key not in KEYS:
            raise ConfigError(f"--what-if {key}: expected one of {', '.join(KEYS)}")
    run = next((run for run in reversed(report.runs) if run.stat("num_steps")), None)
    if run is None or not report.rows.completed:
        raise ConfigError("--what-if: no run of this job has delivered any rows")
    phases = report.phases_us
    engines = max(1, len([actor for actor in run.actors if actor.machine_us]))
    tail_us = sum(actor.tail_us for each in report.runs for actor in each.actors)
    computing = report.machine_us - phases["startup"] - phases["load"] - tail_us
    started = [actor for each in report.runs for actor in each.actors if actor.stats.get("num_steps")]
    start_us = sum(actor.phases_us["startup"] + actor.phases_us["load"] for actor in started) / len(started)
    now = Case("now", report.wall_us, report.machine_us, report.cost.total_usd, "measured")

    actors = _whole("actors", changes.get("actors", str(engines)))
    hourly_usd = run.hourly_usd if "price" not in changes else _number("price", changes["price"])
    basis = ["computing as measured"]
    if "hardware" in changes or "quantization" in changes:
        scaled = _on_hardware(report, changes, computing, run.resolved)
        computing, basis = scaled.computing_us, [scaled.basis]
        start_us = scaled.start_us if scaled.start_us is not None else start_us
        price = prices.price_of(scaled.card.name)
        if "price" not in changes and "hardware" in changes:
            known = price is not None and price.on_demand_usd is not None
            hourly_usd = price.on_demand_usd * _num_cards(run.resolved) if known else None
            basis.append(f"priced as of {price.listed}, {price.source}" if price else "no price is known")
    units = max(1, sum(each.units_written for each in report.runs))
    share = units / actors
    imbalance = ceil(share) / share if actors > 1 else 1.0
    each_us = start_us + computing / actors * imbalance
    machine_us = each_us * actors
    usd = None if hourly_usd is None else machine_us * hourly_usd / 3.6e9
    name = ", ".join(f"{key} {value}" for key, value in changes.items()) or "again"
    if "actors" in changes:
        basis.append(f"{units:,} units over {actors:,} engines, each with its start")
    return WhatIf(dict(changes), now, Case(name, each_us, machine_us, usd, "; ".join(basis)))


def with_quantization(report: RunReport) -> RunReport:
    """Return the report with the saving by quantization, if the job ran on a known card: the cost model only knows
    cards."""
    resolved = report.runs[-1].resolved if report.runs else {}
    own = _own_card(resolved)
    if own is None or not report.lengths or any(saving.name == "quantization" for saving in report.savings):
        return report
    try:
        model = _model(report)
        here, dense = (_on_card(own, report, model, resolved, name) for name in (None, "16 bit"))
    except PipelineError:  # the model is missing, or its 16-bit weights do not fit the card
        return report
    if here.weights == dense.weights:
        return report
    ratio = dense.expected.wall_s / here.expected.wall_s  # pyright: ignore[reportOptionalMemberAccess]
    us = round((report.phases_us["prefill"] + report.phases_us["decode"]) * (ratio - 1))
    usd = report.cost.total_usd and us * report.cost.total_usd / report.machine_us
    saving = Saving("quantization", NAMES["quantization"], us, usd, "modelled", f"16-bit weights on {own.name}")
    return replace(report, savings=(*report.savings, saving))


@dataclass(frozen=True)
class _Scaled:
    card: Card
    computing_us: float
    start_us: float | None
    basis: str


def _on_hardware(
    report: RunReport, changes: Mapping[str, str], computing_us: float, resolved: Mapping[str, Any]
) -> _Scaled:
    """Return the computing time on a card, with a form of the weights."""
    own = _own_card(resolved)
    card = find_card(changes["hardware"], "--what-if hardware") if "hardware" in changes else own
    if card is None:
        raise ConfigError(
            "--what-if quantization: the cost model only covers GPUs, and this job ran on none; add hardware=CARD"
        )
    model = _model(report)
    wanted = changes.get("quantization")
    if wanted is not None and wanted not in QUANTIZATIONS:
        raise ConfigError(f"--what-if quantization={wanted}: expected one of {', '.join(QUANTIZATIONS)}")
    name = QUANTIZATIONS[wanted] if wanted is not None else None
    changed = _on_card(card, report, model, resolved, name)
    if own is not None:
        here = _on_card(own, report, model, resolved, None)
        ratio = changed.expected.wall_s / here.expected.wall_s  # pyright: ignore[reportOptionalMemberAccess]
        basis = f"computing takes {ratio:.2f} times the measured time on {own.name}, by the cost model"
        return _Scaled(card, computing_us * ratio, None, basis)
    rows = sum(bucket.completed.rows for bucket in report.lengths)
    us = changed.expected.wall_s / len(_requests(report)) * rows * 1e6  # pyright: ignore[reportOptionalMemberAccess]
    basis = f"{card.name} with {changed.weights} by the cost model alone, without a measurement on a card"
    return _Scaled(card, us, (STARTUP_S + changed.load_s) * 1e6, basis)


def _on_card(
    card: Card, report: RunReport, model: ModelConfig, resolved: Mapping[str, Any], weights: str | None
) -> OnCard:
    """Simulate requests as long as the job's. Raises ConfigError if they do not fit the card."""
    serving = CardServing(
        kv_cache_dtype="fp8" if "fp8" in str(resolved.get("kv_cache_dtype", "")) else "auto",
        tensor_parallel_size=_num_cards(resolved),
    )
    found = on_card(card, model, serving, _requests(report), weights)
    if found.expected is None:
        raise ConfigError(f"--what-if: {found.card} with {found.weights}: {found.lacks}")
    return found


def _own_card(resolved: Mapping[str, Any]) -> Card | None:
    return card_of_device(str(resolved.get("device_name", resolved.get("device", ""))))


def _num_cards(resolved: Mapping[str, Any]) -> int:
    """Return the number of cards of an engine: the run's on GPUs, else one. Runs of earlier versions record none."""
    return 1 if resolved.get("device") == "cpu" else int(resolved.get("tensor_parallel_size", 1))


def _model(report: RunReport) -> ModelConfig:
    path = str(report.runs[-1].settings.get("model", {}).get("path", ""))
    return read_config(Path(locate_model(path)))


def _requests(report: RunReport) -> list[RequestTokens]:
    """Return requests in proportion to the rows of each bucket of prompt lengths, each as long as the bucket's mean."""
    rows = sum(bucket.completed.rows for bucket in report.lengths)
    requests: list[RequestTokens] = []
    for bucket in report.lengths:
        rows_of_bucket, count = bucket.completed, max(1, round(REQUESTS * bucket.completed.rows / rows))
        prompt = max(1, (rows_of_bucket.input_tokens - rows_of_bucket.cached_tokens) // rows_of_bucket.rows)
        requests += [RequestTokens(prompt, max(1, rows_of_bucket.generated_tokens // rows_of_bucket.rows))] * count
    return requests


def _whole(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--what-if {key}={text}: expected a whole number of at least 1")
    return int(text)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--what-if {key}={text}: expected US dollars per hour of one engine's machine")
    return value


def parse_changes(texts: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE from the command line; one text may hold several, separated by spaces or commas. Raises
    ConfigError."""
    changes: dict[str, str] = {}
    for text in (each for whole in texts for each in whole.replace(",", " ").split()):
        key, sign, value = text.partition("=")
        if not sign or not value:
            raise ConfigError(f"--what-if {text}: expected KEY=VALUE, such as hardware=h100")
        changes[key] = value
    return changes
