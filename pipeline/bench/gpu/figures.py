"""What the GPU benchmark found of one model, for people and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pipeline.bench.gpu.jobs import OurJobs
from pipeline.bench.gpu.kernels.crossover import borders
from pipeline.bench.gpu.kernels.kernel_times import KernelTimes
from pipeline.bench.gpu.kernels.linear_times import LinearTimes
from pipeline.bench.gpu.kernels.tile_times import TileTimes
from pipeline.bench.gpu.peers import PeerJobs
from pipeline.bench.gpu.rates import Rates
from pipeline.bench.measure import facts_to_text, table
from pipeline.roofline.cost_model import Reached


@dataclass(frozen=True)
class Failure:
    """A section that ended before it was done."""

    section: str
    model: str
    why: str


@dataclass(frozen=True)
class ModelFigures:
    """Everything of one model; None what was not asked for, or failed. name: as it was asked for; model: what it is.
    reached: shares that predictions go by."""

    name: str
    model: str
    dtype: str
    rates: Rates
    kernels: KernelTimes | None = None
    linears: LinearTimes | None = None
    tiles: TileTimes | None = None
    reached: Reached | None = None
    jobs: OurJobs | None = None
    peers: tuple[PeerJobs, ...] = ()

    def to_json(self) -> dict[str, Any]:
        parts = {"kernels": self.kernels, "linears": self.linears, "tiles": self.tiles, "jobs": self.jobs}
        told = {field: getattr(self, field) for field in ("name", "model", "dtype")}
        told |= {name: None if part is None else part.to_json() for name, part in parts.items()}
        return told | {
            "rates": asdict(self.rates),
            "borders": [] if self.linears is None else [asdict(border) for border in borders(self.linears)],
            "reached": None if self.reached is None else asdict(self.reached),
            "peers": [asdict(peer) for peer in self.peers],
        }

    def to_text(self) -> str:
        parts = [f"=== {self.model}; {self.dtype}"]
        parts += [part.to_text() for part in (self.rates, self.kernels, self.linears) if part is not None]
        if self.linears is not None and (found := borders(self.linears)):
            parts.append("\n".join(border.to_text() for border in found))
        if self.tiles is not None:
            parts.append(self.tiles.to_text())
        if self.jobs is not None:
            parts.append("\n".join([*_job_lines(self.jobs), *_peer_lines(self.jobs, self.peers)]))
        return "\n\n".join(parts)


def _job_lines(ours: OurJobs) -> Iterator[str]:
    yield (
        "Whole jobs through the engine. bound and predicted: seconds by the cost model, at the measured rates and at "
        "the shares of them that the kernels above reached; MFU, MBU: of the measured rates."
    )
    yield ", ".join(f"{key} {value}" for key, value in ours.settings.items() if not key.startswith("kernel."))
    rows = []
    for job in ours.jobs:
        wall_s, tokens = median(job.wall_s), job.prompt_tokens - job.cached_tokens + job.output_tokens
        rates = job.output_tokens / wall_s, tokens / wall_s, job.mfu, job.mbu, job.tail_s
        counts = job.num_steps, job.sequences, job.kv_used, job.cached_tokens, job.num_preemptions
        rows.append((job.requests, wall_s, job.predicted_s, job.bound_s, *rates, *counts))
    seconds = "requests <15 | seconds >8.2f | predicted >9.2f | bound >8.2f"
    rates = "out/s >8,.0f | all/s >9,.0f | MFU >5.0% | MBU >5.0% | tail s >7.2f"
    yield from table(f"{seconds} | {rates} | steps >6, | at once >7.0f | KV >4.0% | cached >9, | preempted >9,", rows)
    for gap in ours.gaps:
        yield f"Profiled: {gap.to_text()}."
    if not ours.gaps:
        yield "The card's idle time between steps was not measured: there was nothing to profile."


def _peer_lines(ours: OurJobs, peers: tuple[PeerJobs, ...]) -> Iterator[str]:
    wall_s = {job.requests: median(job.wall_s) for job in ours.jobs}
    for peer in peers:
        yield ""
        yield f"{peer.name} ({facts_to_text(peer.about)}), after this engine and alone on the card:"
        for job in peer.jobs:
            theirs = median(job.wall_s)
            yield (
                f"{job.requests:<15} {theirs:>8.2f} s; this engine is {theirs / wall_s[job.requests]:.2f}x; "
                f"{job.agreement.to_text()}"
            )
        if peer.failure:
            yield f"{peer.name} failed: {peer.failure}"
    if not peers:
        yield "No other engine took part (--peer)."
