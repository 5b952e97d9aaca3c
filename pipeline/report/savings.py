"""Machine time saved by engine features, each compared with the plain alternative, measured or modelled.

Savings are not part of the job's machine time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.report.features import Speculation
from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import Histogram
from pipeline.report.record.run_record import RunRecord

NAMES = {
    "prefix_sharing": "Prefix sharing",
    "speculation": "Speculative decoding",
    "continuous_batching": "Continuous batching",
}


@dataclass(frozen=True)
class Saving(JsonRecord):
    """Machine time saved by a feature, in microseconds; negative for a loss. usd: None without a price. against: the
    alternative."""

    name: str
    title: str
    saved_us: int
    usd: float | None
    basis: Literal["measured", "modelled"]
    against: str


def prefix_sharing_us(cached_tokens: int, prefill_us: int, computed_prompt_tokens: int) -> int:
    """Return the time that the cached prompt tokens would have taken, at the average time per computed token."""
    return cached_tokens * prefill_us // computed_prompt_tokens if computed_prompt_tokens else 0


def continuous_batching_us(outputs: Iterable[Histogram], batch: int, decode_us: int) -> int:
    """Return the modelled time saved against static batches of `batch` rows in order of arrival.

    A static batch lasts as long as its longest output, and finished rows keep computing. With random batches, the work
    grows by the factor E[longest of `batch`] / mean, which depends on the output lengths only.
    """
    lengths = sum(outputs, Histogram())
    values = sorted(lengths.values())
    count, total = lengths.count, sum(value * num_rows for value, num_rows in values)
    if not total or not decode_us:
        return 0
    batch = max(1, min(batch, count))
    longest = below = 0.0
    for value, num_rows in values:
        share = below + num_rows / count
        longest += value * (share**batch - below**batch)
        below = share
    return round(decode_us * max(0.0, longest * count / total - 1.0))


def find_savings(
    runs: Sequence[RunRecord],
    *,
    outputs: Iterable[Histogram],
    phases_us: Mapping[str, int],
    speculation: Speculation | None,
    usd_per_us: float | None,
) -> tuple[Saving, ...]:
    """Return the nonzero savings. outputs: histograms of completion lengths."""

    def saving(name: str, us: int, basis: Literal["measured", "modelled"], against: str) -> Saving:
        return Saving(name, NAMES[name], us, None if usd_per_us is None else us * usd_per_us, basis, against)

    computed = sum(run.computed.prompt for run in runs)
    shared_us = prefix_sharing_us(sum(run.stat("cached_tokens") for run in runs), phases_us["prefill"], computed)
    drafts_us = speculation.saved_us if speculation is not None else 0
    decode_us = phases_us["decode"] + sum(run.stat("drafts_us") for run in runs)
    batch = int(runs[-1].resolved.get("max_num_seqs", 0)) if runs else 0
    batching_us = continuous_batching_us(outputs, batch, decode_us) if batch else 0
    found = (
        saving("prefix_sharing", shared_us, "measured", "computing those tokens too"),
        saving("speculation", drafts_us, "measured", "plain steps, timed in this job"),
        saving("continuous_batching", batching_us, "modelled", f"static batches of {batch:,} rows"),
    )
    return tuple(each for each in found if each.saved_us)
