"""Accounting of a job's machine time by phase, and of its cost by tokens. Every microsecond belongs to one phase.

Prices are declared by the job, never looked up. A job without a price is unpriced (None), not free.

Actors record their time by phase. Lost work (rows of a killed run, of a unit whose part already existed, of rows that
failed in the engine) is known only later (`faults.py`): the account then moves its time from `prefill` and `decode` to
`wasted`.

A server's tokens may have prices of their own, which count as prefill and decode.

Prefill is charged to prompt tokens and decode to generated tokens. All other machine time is charged to both in
proportion, because both depend on it. The divisors are the delivered tokens that were computed: prompt tokens of
completed rows without cached ones, and generated tokens without those of copied rows. Lost work thus raises the cost of
delivered tokens; refused, cached or copied ones do not lower it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.faults import LostWork
from pipeline.report.record.row_stats import LengthBucket, StepStats
from pipeline.report.record.run_record import PHASES, RunRecord, split_exactly


@dataclass(frozen=True)
class Tokens:
    """Tokens of completed rows. `cached` of the `input` tokens came from shared KV blocks or belong to copied rows, as
    do `copied` of the `generated` tokens; the others were computed.

    `error_input` counts the prompt tokens of error rows, which are never delivered. Tokens computed for rows that
    failed in an engine are lost work (`faults.py`).
    """

    input: int
    cached: int
    generated: int
    error_input: int = 0
    copied: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.input - self.cached

    @property
    def decoded(self) -> int:
        """Generated tokens that were computed."""
        return max(0, self.generated - self.copied)


@dataclass(frozen=True)
class Cost:
    """Cost in US dollars; None without a price or without a divisor. phases_usd: None without a price."""

    total_usd: float | None
    prompt_usd: float | None
    generated_usd: float | None
    per_1m_prompt_usd: float | None
    per_1m_generated_usd: float | None
    per_1m_blended_usd: float | None
    per_row_usd: float | None
    per_1m_with_cached_usd: float | None  # prompt tokens, including cached ones
    unpriced_runs: int
    phases_usd: Mapping[str, float] | None = None
    per_1k_images_usd: float | None = None  # total_usd, also for the texts of their rows
    unmetered_usd: float = 0.0  # the most that requests of unknown usage cost, not part of the total


def accounted(runs: Sequence[RunRecord], lost: Sequence[LostWork]) -> list[dict[str, int]]:
    """Return the machine time of each run by phase, in whole microseconds with the exact sum. lost: by run."""
    accounts = []
    for run, lost_work in zip(runs, lost, strict=True):
        phases = {phase: run.phase_us(phase) for phase in PHASES}
        for phase, us in (("prefill", lost_work.prefill_us), ("decode", lost_work.decode_us)):
            moved = min(us, phases[phase])
            phases[phase] -= moved
            phases["wasted"] += moved
        assert sum(phases.values()) == run.machine_us, f"{phases} do not sum to {run.machine_us} us"
        accounts.append(phases)
    return accounts


def allocate(
    runs: Sequence[RunRecord], accounts: Sequence[Mapping[str, int]], tokens: Tokens, rows: int, images: float = 0.0
) -> Cost:
    """Return the cost of all machine time and its division among prompt and generated tokens (see the module
    docstring). accounts: of each run, from `accounted`.

    A single run without a price makes the whole job unpriced, since the cost of its machine time is unknown.
    """
    # A run without actors used no machine time and needs no price.
    unpriced = sum(not run.prices.are_declared and run.machine_us > 0 for run in runs)
    if unpriced or not any(run.prices.are_declared for run in runs):
        return Cost(None, None, None, None, None, None, None, None, unpriced_runs=unpriced)
    usd: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for run, account in zip(runs, accounts, strict=True):
        for phase in PHASES:
            usd[phase] += run.prices.machine_usd(account[phase])
        prompt_usd, generated_usd = run.token_usd()
        usd["prefill"] += prompt_usd
        usd["decode"] += generated_usd
    total = sum(usd.values())
    direct = usd["prefill"] + usd["decode"]
    prompt = total * usd["prefill"] / direct if direct else None
    generated = total * usd["decode"] / direct if direct else None
    return Cost(
        total_usd=total,
        prompt_usd=prompt,
        generated_usd=generated,
        per_1m_prompt_usd=_each(prompt, tokens.computed, 1_000_000),
        per_1m_generated_usd=_each(generated, tokens.decoded, 1_000_000),
        per_1m_blended_usd=_each(total, tokens.computed + tokens.decoded, 1_000_000),
        per_row_usd=_each(total, rows, 1),
        per_1m_with_cached_usd=_each(prompt, tokens.input, 1_000_000),
        unpriced_runs=0,
        phases_usd=usd,
        per_1k_images_usd=_each(total, images, 1000),
        unmetered_usd=sum(run.prices.unmetered_usd(run.unmetered) for run in runs),
    )


def shares_us(groups: Sequence[LengthBucket | StepStats], machine_us: int, phases_us: Mapping[str, int]) -> list[int]:
    """Divide all machine time among groups of completed rows, with an exact sum: the prompts' share by computed prompt
    tokens, the rest by generated tokens."""
    if not groups:
        return []
    for_prompts, for_generated = split_exactly(machine_us, [phases_us["prefill"], phases_us["decode"]])
    prompt_us = split_exactly(for_prompts, [n.input_tokens - n.cached_tokens for n in groups])
    generated_us = split_exactly(for_generated, [n.generated_tokens for n in groups])
    return [p + g for p, g in zip(prompt_us, generated_us, strict=True)]


def _each(usd: float | None, count: float, times: int) -> float | None:
    return usd * times / count if usd is not None and count > 0 else None
