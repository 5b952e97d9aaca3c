"""Render a job's estimate as text for a terminal."""

from pipeline.estimate.job_estimate import JobEstimate, Option
from pipeline.estimate.measured import PoolEstimate
from pipeline.estimate.server_estimate import ServerEstimate
from pipeline.formatting import counted, duration, money, percent, printable, table
from pipeline.report.estimate import Interval
from pipeline.report.record.run_record import PHASES
from pipeline.roofline.cards import price_source
from pipeline.roofline.shares import source

NOTHING_KNOWN = (
    "The speed of this model on this machine is unknown. `--probe 64` measures it on 64 rows, which the run of the job "
    "reuses."
)
NOTHING_KNOWN_OF_SERVER = (
    "The server's speed and the tokens that it generates are unknown. `--probe 64` measures them on 64 rows, which the "
    "run of the job reuses."
)


def text(found: JobEstimate | ServerEstimate, width: int | None = None) -> str:
    if isinstance(found, ServerEstimate):
        return _on_server(found, width)
    sample = found.sample
    whole = "all rows" if sample.rows >= sample.total_rows else f"a sample of {sample.rows:,} rows"
    errors = f"; {percent(sample.errors / sample.rows)} have no usable prompt" if sample.errors else ""
    errors += f"; {percent(sample.dropped / sample.rows)} do not meet input.when" if sample.dropped else ""
    lines = [
        _head(found),
        "",
        f"  Prompts     {_tokens(found.prompts)} tokens, {_tokens(sample.tokens_each)} each, from {whole}{errors}",
        f"              {percent(found.cached_tokens / max(1.0, found.prompts.expected))} of them in prefixes that are "
        "computed once",
        f"  Generated   {_tokens(found.generated)} tokens, {_tokens(found.lengths.each)} each, from "
        f"{found.lengths.come_from}",
    ]
    if found.here:
        lines += ["", f"  On this machine, by {found.here[0].basis}"]
        lines.append(_table(_here_rows(found.here), width))
    else:
        lines += ["", f"  {'Nothing is left to compute.' if not found.rows_left else NOTHING_KNOWN}"]
    if found.estimate is not None:
        phases = [f"{name} {duration(us / 1e6)}" for name in PHASES if (us := found.estimate.phases_us[name])]
        lines.append(f"    {', '.join(phases)}")
    if found.cards:
        lines += ["", "  On cards, by the cost model; low, expected and high"]
        lines.append(_table(_card_rows(found.cards), width))
        lines += [f"    {pool.machine}: {pool.lacks}" for pool in found.cards if pool.lacks]
        if found.options:
            lines += ["", "  Engines of one or several cards, and forms of the model, expected"]
            lines.append(_table(_option_rows(found.options), width))
            lines.append(
                "    `cards each` is engine.tensor_parallel_size. Engines of one card are replicas: run.actors."
            )
        has_groups = any(each.num_cards > 1 for each in (*found.cards, *found.options))
        lines.append(f"    Expected: {source([pool.machine for pool in found.cards], has_groups)}.")
        lines.append(f"    Prices: {price_source()}, or those of --hardware.")
    if found.advice:
        lines += ["", "  Suggestions"]
        for each in found.advice:
            effect = "" if each.effect is None else f" ({percent(each.effect)} less time, by the cost model)"
            lines.append(f"    {each.key}{effect}: {each.reason}")
    return "\n".join(lines)


def _on_server(found: ServerEstimate, width: int | None) -> str:
    lines, made = [_head(found), ""], found.estimate
    if not found.rows_left:
        return "\n".join([*lines, "  Nothing is left to compute."])
    if made is None:
        prompts = (
            "unknown" if found.prompts is None else f"{_tokens(found.prompts)} tokens, by the tokenizer of model.path"
        )
        return "\n".join([*lines, f"  Prompts     {prompts}", "", f"  {NOTHING_KNOWN_OF_SERVER}"])
    assert found.prompts is not None
    each = [_tokens(total.times(1 / made.rows)) for total in (found.prompts, made.generated_tokens)]
    lines += [
        f"  Prompts     {_tokens(found.prompts)} tokens, {each[0]} each, from {made.lengths_from}",
        f"              {percent(made.cached_tokens / max(1.0, found.prompts.expected))} of them from the cache",
        f"  Generated   {_tokens(made.generated_tokens)} tokens, {each[1]} each",
        "",
        f"  On the server, by {printable(made.speeds_from)}",
        _table(_here_rows(found.here), width),
    ]
    return "\n".join(lines + [f"    {doubt[0].upper()}{doubt[1:]}." for doubt in found.doubts])


def _head(found: JobEstimate | ServerEstimate) -> str:
    left = "" if found.rows_left == found.rows else f", {found.rows_left:,} of them left"
    return f"{printable(found.job)}: {counted(found.rows, 'row')}{left}"


def _tokens(count: Interval) -> str:
    shown = f"{count.expected:,.0f}"
    low, high = f"{count.low:,.0f}", f"{count.high:,.0f}"
    return shown if low == shown == high else f"{shown} ({low} to {high})"


def _table(rows: list[list[str]], width: int | None) -> str:
    return table(rows[1:], head=rows[0], sides="<>", width=width, indent=4)


def _here_rows(pools: tuple[PoolEstimate, ...]) -> list[list[str]]:
    priced = any(p.usd is not None for p in pools)
    rows = [["engines", "time", "low", "high", "machine time", "USD", *["low", "high"] * priced]]
    for p in pools:
        times = (duration(us / 1e6) for us in (p.wall_us.expected, p.wall_us.low, p.wall_us.high))
        usd = ["unpriced"] if p.usd is None else [money(v) for v in (p.usd.expected, p.usd.low, p.usd.high)]
        rows.append([f"{p.actors:,}", *times, duration(p.machine_us.expected / 1e6), *usd])
    return rows


def _card_rows(pools: tuple[PoolEstimate, ...]) -> list[list[str]]:
    rows = [
        [
            "card",
            "weights",
            "engines",
            "cards each",
            "time",
            "low",
            "high",
            "spot",
            "on demand",
            "low",
            "high",
        ]
    ]
    for p in pools:
        if p.lacks:
            continue
        times = (duration(us / 1e6) for us in (p.wall_us.expected, p.wall_us.low, p.wall_us.high))
        usd = ["", "", ""] if p.usd is None else [money(v) for v in (p.usd.expected, p.usd.low, p.usd.high)]
        spot = "" if p.spot_usd is None else money(p.spot_usd.expected)
        rows.append([p.machine, p.weights, f"{p.actors:,}", f"{p.num_cards}", *times, spot, *usd])
    return rows


def _option_rows(options: tuple[Option, ...]) -> list[list[str]]:
    rows = [["card", "weights", "cards each", "tokens/s a card", "1M tokens"]]
    for o in options:
        rows.append([o.card, o.weights, f"{o.num_cards}", f"{o.card_tokens_per_s:,.0f}", money(o.usd_per_million)])
    return rows
