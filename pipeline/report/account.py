"""Where the machine time of a job went and what it was charged to: every microsecond in one phase, money after time.

`faults.py` says which work was lost. Prices are declared by the job, never looked up. A job without a price is unpriced
(None), not free.

An actor's phases say what it did. Lost work (rows of a run that was killed, of a unit whose part already existed, of
rows that failed in the engine) is known later: the account moves its time from `prefill` and `decode` to `wasted`.

Prefill is charged to prompt tokens and decode to generated tokens. All other machine time is charged to both in the
proportion of those two, because it was spent to make them possible. The divisor is what was delivered in the output and
had to be computed for it: prompt tokens of completed rows without those from cache, and generated ones. So lost work
raises the cost of the delivered tokens, and a prompt that was refused or found in the cache lowers none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.report.faults import LostTime
from pipeline.report.record.row_stats import LengthBucket
from pipeline.report.record.run_record import PHASES, RunRecord, split_exactly


@dataclass(frozen=True)
class Tokens:
    """Tokens of completed rows: `cached` is the share of `input` that was served from shared KV blocks, the rest was
    computed. `error_input` are prompt tokens of error rows: delivered in no case, whether an engine had begun them or
    not. What engines computed for rows that failed in them is lost work (`row_failed` in `faults.py`).
    """

    input: int
    cached: int
    generated: int
    error_input: int = 0

    @property
    def computed(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.input - self.cached


@dataclass(frozen=True)
class Cost:
    """US dollars; None where there is no price, or nothing to divide by. phases_usd: empty without a price."""

    total_usd: float | None
    prompt_usd: float | None
    generated_usd: float | None
    per_1m_prompt_usd: float | None
    per_1m_generated_usd: float | None
    per_1m_blended_usd: float | None
    per_row_usd: float | None
    per_1m_with_cached_usd: float | None  # prompt tokens, those from cache among them
    unpriced_runs: int
    phases_usd: Mapping[str, float] | None = None


def accounted(runs: Sequence[RunRecord], lost: Sequence[LostTime]) -> list[dict[str, int]]:
    """Return the machine time of each run by phase, whole microseconds that sum to it exactly. lost: of each run."""
    accounts = []
    for run, gone in zip(runs, lost, strict=True):
        phases = {phase: run.phase_us(phase) for phase in PHASES}
        for phase, us in (("prefill", gone.prefill_us), ("decode", gone.decode_us)):
            moved = min(us, phases[phase])
            phases[phase] -= moved
            phases["wasted"] += moved
        assert sum(phases.values()) == run.machine_us, f"{phases} do not sum to {run.machine_us} us"
        accounts.append(phases)
    return accounts


def allocate(runs: Sequence[RunRecord], accounts: Sequence[Mapping[str, int]], tokens: Tokens, rows: int) -> Cost:
    """The price of all machine time, and its share of prompt and generated tokens (see the head of this file).
    accounts: of each run, as from `accounted`.

    One run without a price leaves the whole job unpriced, as a part of its machine time has no known cost.
    """
    # A run that never got as far as an actor used no machine time, so that its price is not missed.
    unpriced = sum(run.hourly_usd is None and run.machine_us > 0 for run in runs)
    if unpriced or not any(run.hourly_usd is not None for run in runs):
        return Cost(None, None, None, None, None, None, None, None, unpriced_runs=unpriced)
    usd: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for run, account in zip(runs, accounts, strict=True):
        for phase in PHASES:
            usd[phase] += run.usd(account[phase])
    total = sum(usd.values())
    direct = usd["prefill"] + usd["decode"]
    prompt = total * usd["prefill"] / direct if direct else None
    generated = total * usd["decode"] / direct if direct else None
    return Cost(
        total_usd=total,
        prompt_usd=prompt,
        generated_usd=generated,
        per_1m_prompt_usd=_each(prompt, tokens.computed, 1_000_000),
        per_1m_generated_usd=_each(generated, tokens.generated, 1_000_000),
        per_1m_blended_usd=_each(total, tokens.computed + tokens.generated, 1_000_000),
        per_row_usd=_each(total, rows, 1),
        per_1m_with_cached_usd=_each(prompt, tokens.input, 1_000_000),
        unpriced_runs=0,
        phases_usd=usd,
    )


def shares_us(groups: Sequence[LengthBucket], machine_us: int, phases_us: Mapping[str, int]) -> list[int]:
    """All machine time divided among groups of completed rows as the cost is among tokens, exactly: what prompts are
    charged by the prompt tokens that were computed, the rest by the generated ones."""
    if not groups:
        return []
    for_prompts, for_generated = split_exactly(machine_us, [phases_us["prefill"], phases_us["decode"]])
    prompt_us = split_exactly(for_prompts, [n.input_tokens - n.cached_tokens for n in groups])
    generated_us = split_exactly(for_generated, [n.generated_tokens for n in groups])
    return [p + g for p, g in zip(prompt_us, generated_us, strict=True)]


def _each(usd: float | None, count: int, times: int) -> float | None:
    return usd * times / count if usd is not None and count > 0 else None
