"""What a job cost over all its runs: machine time, its price, and which tokens it is charged to.

Owns the allocation and the report's numbers; `report.py` writes them out for people. Prices are declared by
the job, never looked up. A job without a price is unpriced (null), not free.

Allocation: reading prompts (prefill) is charged to prompt tokens and writing (decode) to generated tokens.
All other machine time (start-up, load, repeated work, waiting, the tail) is charged to both in the
proportion of those two, because it was spent to make them possible. The divisor is what was delivered in the
output, so that work lost to a killed run makes the delivered tokens dearer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.metrics import PHASES, RunRecord, per_second

METHOD = (
    "prefill time is charged to prompt tokens, decode time to generated tokens, all other machine time to"
    " both in proportion to those two; divided by the tokens and rows delivered in the output"
)
MICROSECONDS_PER_HOUR = 3_600_000_000


@dataclass(frozen=True)
class Rows:
    """Of the whole job: rows of the input, and rows in the output so far (completed + errors)."""

    input: int
    written: int
    errors: int
    errors_by_code: dict[str, int]

    @property
    def completed(self) -> int:
        return self.written - self.errors


@dataclass(frozen=True)
class Tokens:
    """Delivered in the output. `cached` is the share of `input` that was served from shared KV blocks."""

    input: int
    cached: int
    generated: int


@dataclass(frozen=True)
class Work:
    """What the engines did over all runs, lost work included.

    `wasted_generated_tokens` is what engines generated and the output does not hold. A run that was killed
    may not have recorded its last seconds, so it is a lower bound when `wasted_is_lower_bound`.
    """

    generated_tokens: int
    wasted_generated_tokens: int
    wasted_is_lower_bound: bool
    recomputed_tokens: int
    preemptions: int
    units_lost: int
    restarts: int
    steps: int
    mean_batch: float
    mean_kv_used: float


@dataclass(frozen=True)
class Cost:
    """US dollars; None where there is no price, or nothing to divide by."""

    total_usd: float | None
    prompt_usd: float | None
    generated_usd: float | None
    per_1m_prompt_usd: float | None
    per_1m_generated_usd: float | None
    per_1m_blended_usd: float | None
    per_row_usd: float | None
    unpriced_runs: int
    method: str = METHOD


@dataclass(frozen=True)
class RunReport:
    """The job so far. Times are whole microseconds; `phases_us` sums to `machine_us` exactly."""

    job: str
    fingerprint: str
    outcome: str
    rows: Rows
    tokens: Tokens
    work: Work
    cost: Cost
    machine_us: int
    wall_us: int
    write_us: int
    phases_us: dict[str, int]
    driver_us: dict[str, int]
    runs: tuple[RunRecord, ...]

    @property
    def input_tokens_per_s(self) -> float:
        """Delivered prompt tokens per second of machine time, everything included."""
        return per_second(self.tokens.input, self.machine_us)

    @property
    def generated_tokens_per_s(self) -> float:
        """Delivered generated tokens per second of machine time, everything included."""
        return per_second(self.tokens.generated, self.machine_us)

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for json.dumps."""
        raw = asdict(self)
        raw["rows"]["completed"] = self.rows.completed
        raw["input_tokens_per_s"] = self.input_tokens_per_s
        raw["generated_tokens_per_s"] = self.generated_tokens_per_s
        raw["runs"] = [run.to_json() | {"machine_us": run.machine_us} for run in self.runs]
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RunReport":
        """The report that `to_json` gave."""
        rows = {key: value for key, value in raw["rows"].items() if key != "completed"}
        return cls(
            **{
                key: raw[key]
                for key in ("job", "fingerprint", "outcome", "machine_us", "wall_us", "write_us")
            },
            rows=Rows(**rows),
            tokens=Tokens(**raw["tokens"]),
            work=Work(**raw["work"]),
            cost=Cost(**raw["cost"]),
            phases_us=dict(raw["phases_us"]),
            driver_us=dict(raw["driver_us"]),
            runs=tuple(RunRecord.from_json(run) for run in raw["runs"]),
        )

    def to_text(self) -> str:
        """For a terminal."""
        from pipeline.report import text

        return text(self)

    def to_markdown(self) -> str:
        """For `report.md`."""
        from pipeline.report import markdown

        return markdown(self)


def build_report(
    job_name: str, fingerprint: str, runs: Sequence[RunRecord], totals: Mapping[str, Any], input_rows: int
) -> RunReport:
    """The report over all runs of a job, killed ones included, in the order they ran.

    `totals` is what the output holds: `rows`, `error_rows` (code to rows), `num_input_tokens`,
    `num_cached_tokens`, `num_generated_tokens`.
    """
    phases_us = {phase: sum(run.phase_us(phase) for run in runs) for phase in PHASES}
    machine_us = sum(run.machine_us for run in runs)
    assert sum(phases_us.values()) == machine_us, f"phases {phases_us} do not sum to {machine_us} us"
    errors = {code: count for code, count in sorted(totals["error_rows"].items()) if count}
    rows = Rows(input_rows, totals["rows"], sum(errors.values()), errors)
    tokens = Tokens(totals["num_input_tokens"], totals["num_cached_tokens"], totals["num_generated_tokens"])
    return RunReport(
        job=job_name,
        fingerprint=fingerprint,
        outcome=runs[-1].outcome if runs else "running",
        rows=rows,
        tokens=tokens,
        work=_work(runs, tokens),
        cost=allocate(runs, tokens, rows.written),
        machine_us=machine_us,
        wall_us=sum(run.wall_us for run in runs),
        write_us=sum(run.write_us for run in runs),
        phases_us=phases_us,
        driver_us=_summed([run.driver_us for run in runs]),
        runs=tuple(runs),
    )


def allocate(runs: Sequence[RunRecord], tokens: Tokens, rows: int) -> Cost:
    """The price of all machine time, and its share of prompt and generated tokens (see the head of this
    file).

    One run without a price leaves the whole job unpriced, as a part of its machine time has no known cost.
    """
    # A run that never got as far as an actor used no machine time, so that its price is not missed.
    unpriced = sum(run.hourly_usd is None and run.machine_us > 0 for run in runs)
    if unpriced or not any(run.hourly_usd is not None for run in runs):
        return Cost(None, None, None, None, None, None, None, unpriced_runs=unpriced)
    usd = dict.fromkeys(PHASES, 0.0)
    for run in runs:
        for phase in PHASES:
            usd[phase] += (run.hourly_usd or 0.0) * run.phase_us(phase) / MICROSECONDS_PER_HOUR
    total = sum(usd.values())
    direct = usd["prefill"] + usd["decode"]
    prompt = total * usd["prefill"] / direct if direct else None
    generated = total * usd["decode"] / direct if direct else None
    return Cost(
        total_usd=total,
        prompt_usd=prompt,
        generated_usd=generated,
        per_1m_prompt_usd=_each(prompt, tokens.input, 1_000_000),
        per_1m_generated_usd=_each(generated, tokens.generated, 1_000_000),
        per_1m_blended_usd=_each(total, tokens.input + tokens.generated, 1_000_000),
        per_row_usd=_each(total, rows, 1),
        unpriced_runs=0,
    )


def _each(usd: float | None, count: int, times: int) -> float | None:
    return usd * times / count if usd is not None and count > 0 else None


def _work(runs: Sequence[RunRecord], tokens: Tokens) -> Work:
    generated = sum(run.stat("generated_tokens") for run in runs)
    steps = sum(run.stat("num_steps") for run in runs)
    unseen = any(run.outcome in ("killed", "running") for run in runs) or generated < tokens.generated
    return Work(
        generated_tokens=generated,
        wasted_generated_tokens=max(0, generated - tokens.generated),
        wasted_is_lower_bound=unseen,
        recomputed_tokens=sum(run.stat("recomputed_tokens") for run in runs),
        preemptions=sum(run.stat("num_preemptions") for run in runs),
        units_lost=sum(run.units_lost for run in runs),
        restarts=sum(actor.restarts for run in runs for actor in run.actors),
        steps=steps,
        mean_batch=sum(run.stat("batch_sum") for run in runs) / steps if steps else 0.0,
        mean_kv_used=sum(run.stat("kv_used_ppm_sum") for run in runs) / steps / 1e6 if steps else 0.0,
    )


def _summed(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: sum(part.get(name, 0) for part in parts) for name in names}
