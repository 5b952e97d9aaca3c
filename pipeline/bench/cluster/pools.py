"""What `pipeline bench cluster` shows: pools of growing size, and one pool in several kinds of trouble.

Nothing is run: time is simulated, by the cost model of a card, with the rule that jobs cut their units by. Kernels
reach the shares of `roofline/shares.py`; shares of time depend little on them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.bench.cluster.engine import EngineSpeed
from pipeline.bench.cluster.simulation import PoolRun, PoolSpec, simulate
from pipeline.bench.cluster.workload import Skewed, Workload
from pipeline.bench.measure import table
from pipeline.bench.roofline import model_size
from pipeline.engine.startup.batch_limits import gpu_limits
from pipeline.errors import ConfigError
from pipeline.job.dataflow.spec import FEWEST_IN_FLIGHT, units_in_flight
from pipeline.job.running.reporter import STORE_TICK_S
from pipeline.roofline.cards import find_card
from pipeline.roofline.cost_model import Ceilings
from pipeline.roofline.job_simulation import kv_room
from pipeline.roofline.shares import MEASURED

# US dollars a request, S3 Standard in us-east-1, as aws.amazon.com/s3/pricing said on 2026-11-24.
PUT_USD, GET_USD = 0.005 / 1000, 0.0004 / 1000
LISTED = 1000  # names in an answer; a listing is priced as a PUT
LISTINGS = 2  # of all parts: what is there, and whether all are


@dataclass(frozen=True)
class StoreRequests:
    """What a job asks of a store beside reading its input: each part is written once and its footer read once; all are
    listed before and after; status and the run's record are written while it runs."""

    puts: int
    gets: int
    lists: int

    @classmethod
    def of(cls, run: PoolRun) -> "StoreRequests":
        ticks = int(run.wall_s / STORE_TICK_S)
        return cls(run.units + 2 * ticks, run.units, LISTINGS * -(-run.units // LISTED))

    @property
    def usd(self) -> float:
        return (self.puts + self.lists) * PUT_USD + self.gets * GET_USD


@dataclass(frozen=True)
class ClusterBench:
    about: str
    hourly_usd: float
    runs: tuple[tuple[str, PoolRun], ...]

    def to_json(self) -> dict[str, Any]:
        return {"bench": "cluster", "about": self.about, "hourly_usd": self.hourly_usd, "runs": [*self._runs()]}

    def _runs(self) -> Iterator[dict[str, Any]]:
        for what, run in self.runs:
            shares = {name: getattr(run, name) for name in ("idle_share", "thin_share", "useful_share")}
            asked = StoreRequests.of(run)
            yield {"what": what, **asdict(run), **shares, "store": asdict(asked) | {"usd": asked.usd}} | {
                f"{kind}_usd": seconds / 3600 * self.hourly_usd
                for kind, seconds in (("elastic", run.elastic_s), ("static", run.static_s))
            }

    def to_text(self) -> str:
        rows = [
            (
                run["what"], run["actors"], run["rows"], run["wall_s"] / 60, run["imbalance"], run["idle_share"],
                run["thin_share"], run["useful_share"], run["repeated_tokens"], run["elastic_usd"], run["static_usd"],
                run["store"]["usd"],
            )
            for run in self._runs()
        ]  # fmt: skip
        columns = (
            "pool <34 | actors >6, | rows >11, | minutes >7.1f | imbalance >9.2% | idle >6.2% | thin >6.2% | "
            "useful >6.0% | repeated >9, | elastic $ >9,.2f | static $ >9,.2f | store $ >7,.2f"
        )
        return "\n".join(
            [
                f"Simulated, nothing was run: {self.about}",
                "imbalance: by how much the last machine ends later than their mean. idle: paid time after a machine's",
                "last unit. thin: with less than half a batch and nothing left to pull. useful: what all rows would",
                "take in full batches, by the paid time; loading the model is not useful. repeated: generated tokens",
                "of lost machines. elastic: each machine is given back after its last unit; static: at the end.",
                "store: parts, footers, listings, records; the input is not in it. The driver: pipeline bench plan.",
                "",
                *table(columns, rows),
            ]
        )


def bench_cluster(
    actors: Sequence[int] = (1, 8, 64, 256),
    rows_per_actor: int = 8192,
    model: str = "llama-8b",
    card: str = "h100",
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    max_tokens: int = 1024,
    cold_start_s: float = 60.0,
    hourly_usd: float = 2.5,
    seed: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> ClusterBench:
    """Pools of `actors`, and the 64 of them (or the most below) with machines that come late, are slow or are lost.

    prompt_tokens, output_tokens: medians; prompts go up to eight contexts of them, completions up to max_tokens. Raises
    ConfigError for a card that is not there or is too small, ModelError for the checkpoint.
    """
    prompt, output = Skewed(prompt_tokens, 16 * prompt_tokens), Skewed(output_tokens, max_tokens)
    size, weights, about = model_size(model)
    its_card = find_card(card)
    ceilings = Ceilings.of_card(its_card, MEASURED)
    limits = gpu_limits(its_card.memory_bytes, its_card.compute_capability, int(weights.resident_bytes(size)))
    at_once = min(limits.max_num_seqs, kv_room(size, weights, ceilings) // (prompt.mean + output.mean))
    if at_once < 1:
        raise ConfigError(f"--card {card}: {about} and a row do not fit its memory")
    speed = EngineSpeed.of(size, weights, ceilings, at_once, prompt.mean, prompt.mean + output.mean // 2)
    work = Workload(0, prompt, output, seed=seed)
    in_flight = units_in_flight(limits.max_num_seqs, work.unit_rows, work.unit_tokens, max_tokens)

    def pool(count: int, **trouble: Any) -> PoolRun:
        spec = PoolSpec(count, in_flight, cold_start_s, seed=seed)
        return simulate(replace(work, rows=count * rows_per_actor), replace(spec, **trouble), speed)

    runs = []
    for count in actors:
        say(f"{count:,} actors")
        runs.append((f"{in_flight} units in flight", pool(count)))
    middle = max((count for count in actors if count <= 64), default=min(actors))
    for what, trouble in (
        (f"{FEWEST_IN_FLIGHT} units in flight", {"units_in_flight": FEWEST_IN_FLIGHT}),
        ("machines come over 5 minutes", {"join_s": 300.0}),
        ("a quarter takes twice as long", {"slow_share": 0.25}),
        ("each lost twice an hour, noticed", {"losses_per_hour": 2.0}),
        ("each lost twice an hour, killed", {"losses_per_hour": 2.0, "notice": False}),
    ):
        say(f"{middle:,} actors, {what}")
        runs.append((what, pool(middle, **trouble)))
    told = (
        f"{about} on {ceilings.name}, {at_once} rows at once, {rows_per_actor:,} rows an actor, prompts around "
        f"{prompt_tokens} tokens (mean {prompt.mean}), completions around {output_tokens} (mean {output.mean}) of at "
        f"most {max_tokens}, {cold_start_s:g} s to load, ${hourly_usd:g} an hour, seed {seed}."
    )
    return ClusterBench(told, hourly_usd, tuple(runs))
