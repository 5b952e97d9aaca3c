"""A running job as Prometheus sees it: counters, gauges and histograms of what the driver knows.

Names end as vLLM's do where the meaning is the same; all follow Prometheus' rules: base units, `_total` for counters
alone. Counters never fall while a run continues: what an engine's process counted before it ended stays counted. All
are of this run; `run` is in the labels, so another one is another series.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.progress import HEALTH, Progress
from pipeline.job.telemetry.status import Status
from pipeline.report.record.row_stats import Histogram, RowStats

# Upper bounds of buckets in seconds: of whole rows and first tokens, and between two tokens.
LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

# name, what it says, the engine's count, and by how much it is divided
_ENGINE = (
    ("prompt_tokens", "Tokens of prompts, those found in the prefix cache too.", "prompt_tokens", 1),
    ("prefix_cache_hits", "Tokens of prompts that were found in the prefix cache.", "cached_tokens", 1),
    ("generation_tokens", "Generated tokens.", "generated_tokens", 1),
    ("num_preemptions", "Sequences that had to give up their KV cache.", "num_preemptions", 1),
    ("engine_steps", "Steps of the engine.", "num_steps", 1),
    ("engine_sequences", "Sequences of all steps; by steps, the batch.", "batch_sum", 1),
    (
        "engine_kv_cache_usage_ratio",
        "Used shares of the KV cache of all steps; by steps, the mean.",
        "kv_used_ppm_sum",
        1e6,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment of a run. `health`: of each actor, as `Progress` has it."""

    job: str
    status: Status
    actors: Sequence[ActorState]
    rows: RowStats
    error_rows: Mapping[str, int]
    health: Sequence[str]
    progress: Progress
    hourly_usd: float | None = None

    def families(self) -> Iterator[Metric]:
        status, run = self.status, {"job_name": self.job, "run": self.status.run_id}
        gauges = (
            ("rows", "Rows of the job.", status.rows_total),
            ("rows_done", "Rows that are computed, also those whose part is not written yet.", status.rows_done),
            ("rows_written", "Rows in parts, of earlier runs too.", status.rows_written),
            ("units_written", "Units in parts, of earlier runs too.", status.units),
            ("run_start_timestamp_seconds", "Unix time at which the run began.", self.progress.began_at),
            (
                "last_progress_timestamp_seconds",
                "Unix time at which rows, tokens or a model's load last moved.",
                self.progress.moved_at,
            ),
        )
        for name, about, value in gauges:
            yield _family(GaugeMetricFamily, name, about, run, [({}, value)])
        codes = [({"code": code}, float(count)) for code, count in sorted(self.error_rows.items())]
        yield _family(CounterMetricFamily, "error_rows", "Rows that became errors, in parts.", run, codes, ("code",))
        yield from self._of_actors(run)
        if (quality := self.rows.quality).rows:
            for name, about, total in (
                ("quality_rows", "Rows that were compared with the reference model.", quality.rows),
                ("quality_tokens", "Tokens of these rows.", quality.tokens),
                ("quality_agreed_tokens", "Tokens that are the reference model's own choice.", quality.agreed),
                ("quality_kl_nats", "Divergence from the reference model; by tokens, the mean.",
                 quality.kl_nanonats / 1e9),
            ):  # fmt: skip
                yield _family(CounterMetricFamily, name, about, run, [({}, total)])
        latency = self.rows.latency
        for name, about, found, bounds in (
            ("time_to_first_token_seconds", "Of a written row, its time in the engine's queue included.",
             latency.first_token_us, LONG_S),
            ("inter_token_latency_seconds", "Of a written row, the mean between two tokens.",
             latency.per_token_us, SHORT_S),
            ("e2e_request_latency_seconds", "Of a written row, its time in the engine's queue included.",
             latency.row_us, LONG_S),
        ):  # fmt: skip
            family = HistogramMetricFamily(f"pipeline_{name}", about, labels=list(run))
            buckets, total_s = cumulative(found, bounds)
            family.add_metric(list(run.values()), buckets, total_s)
            yield family

    def _of_actors(self, run: dict[str, str]) -> Iterator[Metric]:
        actors = [state.record for state in self.actors]

        def each(name: str, about: str, values: Sequence[float]) -> Metric:
            samples = [({"actor": str(record.actor)}, value) for record, value in zip(actors, values)]
            return _family(CounterMetricFamily, name, about, run, samples, ("actor",))

        for name, about, key, by in _ENGINE:
            yield each(name, about, [record.stats.get(key, 0) / by for record in actors])
        yield each("engine_restarts", "Engine processes that ended on their own.", [r.restarts for r in actors])
        phases = [
            ({"actor": str(r.actor), "phase": phase}, us / 1e6) for r in actors for phase, us in r.phases_us.items()
        ]
        about = "Machine time by what it went to."
        yield _family(CounterMetricFamily, "phase_seconds", about, run, phases, ("actor", "phase"))
        retries: dict[str, int] = {}
        for record in actors:
            for kind, count in record.storage_retries.items():
                retries[kind] = retries.get(kind, 0) + count
        tried = [({"kind": kind}, float(count)) for kind, count in sorted(retries.items())]
        yield _family(CounterMetricFamily, "storage_retries", "Requests to stores tried again.", run, tried, ("kind",))
        if self.hourly_usd is not None:
            usd = sum(record.machine_us for record in actors) / 3.6e9 * self.hourly_usd
            yield _family(CounterMetricFamily, "cost_usd", "Machine time by cost.hourly_usd.", run, [({}, usd)])
        open_units = [({"actor": str(r.actor)}, float(r.units_in_progress)) for r in actors]
        yield _family(
            GaugeMetricFamily, "units_in_progress", "Units that an engine works on.", run, open_units, ("actor",)
        )
        health = [
            ({"actor": str(record.actor), "host": record.host, "health": name}, float(name == now))
            for record, now in zip(actors, self.health)
            for name in HEALTH
        ]
        about = "1 for how an engine actor is, 0 for the others."
        yield _family(GaugeMetricFamily, "actor_health", about, run, health, ("actor", "host", "health"))

    def to_json(self) -> dict[str, object]:
        """For whoever asks for health: is it well, and how is each actor?"""
        return {
            "job": self.job,
            "run": self.status.run_id,
            "phase": self.status.phase,
            "seconds_without_progress": round(self.progress.still_s, 1),
            "actors": [
                {"actor": state.record.actor, "host": state.record.host, "health": health}
                for state, health in zip(self.actors, self.health)
            ],
        }


def cumulative(found: Histogram, bounds_s: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """A histogram of microseconds in Prometheus' form: how many values up to each bound, and their sum in seconds."""
    values = [(us / 1e6, count) for us, count in found.values()]
    buckets = [(str(bound), float(sum(n for value, n in values if value <= bound))) for bound in bounds_s]
    return [*buckets, ("+Inf", float(found.count))], sum(value * n for value, n in values)


def _family(
    kind: type,
    name: str,
    about: str,
    run: dict[str, str],
    samples: Sequence[tuple[dict[str, str], float]],
    more: Sequence[str] = (),
) -> Metric:
    family = kind(f"pipeline_{name}", about, labels=[*run, *more])
    for labels, value in samples:
        family.add_metric([*run.values(), *(labels[label] for label in more)], value)
    return family
