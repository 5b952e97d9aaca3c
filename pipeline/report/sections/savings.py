"""What the engine's ways of working saved a job, each against the way that it stands in for.

Owns the estimates of the alternatives, and says of each whether it was measured or modelled. None of it is in the
job's machine time: it is time that was not spent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipeline.report.record.json_record import JsonRecord
from pipeline.report.record.row_stats import Histogram
from pipeline.report.sections.drafts import Speculated

NAMES = {
    "prefix_sharing": "Prefix sharing",
    "speculation": "Speculative decoding",
    "continuous_batching": "Continuous batching",
    "quantization": "Quantization",
}


@dataclass(frozen=True)
class Saving(JsonRecord):
    """Machine time in microseconds, below 0 where it cost; usd: None without a price. against: what would have been
    done instead."""

    name: str
    saved_us: int
    usd: float | None
    basis: Literal["measured", "modelled"]
    against: str

    @property
    def title(self) -> str:
        return NAMES[self.name]


def prefix_sharing_us(cached_tokens: int, prefill_us: int, computed_prompt_tokens: int) -> int:
    """Prompt tokens from cache, each at the time that a computed one took."""
    return cached_tokens * prefill_us // computed_prompt_tokens if computed_prompt_tokens else 0


def continuous_batching_us(outputs: Iterable[Histogram], batch: int, decode_us: int) -> int:
    """Against static batches of as many rows, in the order in which they came: each lasts as long as its longest
    output, and a row that has ended computes on beside it. By the lengths of the outputs alone: with random batches the
    work grows by the factor E[longest of `batch`] / mean."""
    lengths = sum(outputs, Histogram())
    values = sorted(lengths.values())
    count, total = lengths.count, sum(value * many for value, many in values)
    if not total or not decode_us:
        return 0
    batch = max(1, min(batch, count))
    longest = below = 0.0
    for value, many in values:
        share = below + many / count
        longest += value * (share**batch - below**batch)
        below = share
    return round(decode_us * max(0.0, longest * count / total - 1.0))


def savings(
    cached_tokens: int,
    computed_prompt_tokens: int,
    outputs: Mapping[int, Histogram],
    batch: int,
    phases_us: Mapping[str, int],
    speculated: Speculated | None,
    usd_per_us: float | None,
) -> tuple[Saving, ...]:
    """Those that made a difference. batch: sequences that may run at once, 0 where it is not known."""

    def saving(name: str, us: int, basis: Literal["measured", "modelled"], against: str) -> Saving:
        return Saving(name, us, None if usd_per_us is None else us * usd_per_us, basis, against)

    shared_us = prefix_sharing_us(cached_tokens, phases_us["prefill"], computed_prompt_tokens)
    drafts_us = speculated.saved_us if speculated is not None else 0
    decode_us = phases_us["decode"] + phases_us["drafts"]
    batching_us = continuous_batching_us(outputs.values(), batch, decode_us) if batch else 0
    found = (
        saving("prefix_sharing", shared_us, "measured", "computing those tokens too"),
        saving("speculation", drafts_us, "measured", "plain steps, timed in this job"),
        saving("continuous_batching", batching_us, "modelled", f"static batches of {batch:,} rows"),
    )
    return tuple(each for each in found if each.saved_us)
