"""Prometheus metrics of a running job: counters, gauges and histograms of the driver's state, and their server.

Names end as vLLM's do if the meaning is the same. All follow Prometheus' rules: base units, and `_total` for counters
only. Counters never decrease during a run: counts of ended engine processes remain. All metrics belong to this run; the
label `run` makes each run its own series.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pipeline.job.telemetry.actor_state import ActorState
from pipeline.job.telemetry.progress import HEALTH, Progress
from pipeline.job.telemetry.status import Status
from pipeline.prices import Prices
from pipeline.report.record.row_stats import Histogram, RowStats

# Upper bounds of buckets in seconds: LONG_S for whole rows and first tokens, SHORT_S between two tokens.
LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

# name, help text, the engine's counter, divisor
_ENGINE = (
    ("prompt_tokens", "Prompt tokens, including those found in the prefix cache.", "prompt_tokens", 1),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "cached_tokens", 1),
    ("generation_tokens", "Generated tokens.", "generated_tokens", 1),
    ("num_preemptions", "Preemptions of sequences, which free their KV cache.", "num_preemptions", 1),
    ("engine_steps", "Engine steps.", "num_steps", 1),
    ("engine_sequences", "Sequences summed over steps; divide by steps for the mean batch.", "batch_sum", 1),
    (
        "engine_kv_cache_usage_ratio",
        "Used share of the KV cache summed over steps; divide by steps for the mean.",
        "kv_used_ppm_sum",
        1e6,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of a run at one moment. `health`: of each actor, by `Progress.health`."""

    job: str
    status: Status
    actors: Sequence[ActorState]
    rows: RowStats
    error_rows: Mapping[str, int]
    health: Sequence[str]
    progress: Progress
    prices: Prices = field(default_factory=Prices)

    def families(self) -> Iterator[Metric]:
        status, run = self.status, {"job_name": self.job, "run": self.status.run_id}
        gauges = (
            ("rows", "Rows of the job.", status.rows_total),
            ("rows_done", "Computed rows, including those whose part is not written yet.", status.rows_done),
            ("rows_written", "Rows in parts, including those of earlier runs.", status.rows_written),
            ("units_written", "Units in parts, including those of earlier runs.", status.units),
            ("run_start_timestamp_seconds", "Unix time at which the run began.", self.progress.began_at),
            (
                "last_progress_timestamp_seconds",
                "Unix time at which rows, tokens or the loading of a model last progressed.",
                self.progress.moved_at,
            ),
        )
        for name, help_text, value in gauges:
            yield _family(GaugeMetricFamily, name, help_text, run, [({}, value)])
        codes = [({"code": code}, float(count)) for code, count in sorted(self.error_rows.items())]
        yield _family(CounterMetricFamily, "error_rows", "Error rows in parts.", run, codes, ("code",))
        yield from self._of_actors(run)
        if (quality := self.rows.quality).rows:
            for name, help_text, total in (
                ("quality_rows", "Rows compared with the reference model.", quality.rows),
                ("quality_tokens", "Tokens of the compared rows.", quality.tokens),
                ("quality_agreed_tokens", "Compared tokens that the reference model predicts too.", quality.agreed),
                ("quality_kl_nats", "KL divergence from the reference model; divide by tokens for the mean.",
                 quality.kl_nanonats / 1e9),
            ):  # fmt: skip
                yield _family(CounterMetricFamily, name, help_text, run, [({}, total)])
        latency = self.rows.latency
        for name, help_text, found, bounds in (
            ("time_to_first_token_seconds", "Time to the first token of written rows, including queueing.",
             latency.first_token_us, LONG_S),
            ("inter_token_latency_seconds", "Mean time between two tokens of written rows.",
             latency.per_token_us, SHORT_S),
            ("e2e_request_latency_seconds", "Latency of written rows, including queueing.",
             latency.row_us, LONG_S),
        ):  # fmt: skip
            family = HistogramMetricFamily(f"pipeline_{name}", help_text, labels=list(run))
            buckets, total_s = cumulative(found, bounds)
            family.add_metric(list(run.values()), buckets, total_s)
            yield family

    def _of_actors(self, run: dict[str, str]) -> Iterator[Metric]:
        actors = [state.record for state in self.actors]

        def each(name: str, help_text: str, values: Sequence[float]) -> Metric:
            samples = [({"actor": str(record.actor)}, value) for record, value in zip(actors, values)]
            return _family(CounterMetricFamily, name, help_text, run, samples, ("actor",))

        for name, help_text, key, divisor in _ENGINE:
            yield each(name, help_text, [record.stats.get(key, 0) / divisor for record in actors])
        yield each("engine_restarts", "Engine processes that died and were restarted.", [r.restarts for r in actors])
        phases = [
            ({"actor": str(r.actor), "phase": phase}, us / 1e6) for r in actors for phase, us in r.phases_us.items()
        ]
        help_text = "Machine time by phase."
        yield _family(CounterMetricFamily, "phase_seconds", help_text, run, phases, ("actor", "phase"))
        retries: dict[str, int] = {}
        for record in actors:
            for kind, count in record.storage_retries.items():
                retries[kind] = retries.get(kind, 0) + count
        tried = [({"kind": kind}, float(count)) for kind, count in sorted(retries.items())]
        yield _family(CounterMetricFamily, "storage_retries", "Retried requests to stores.", run, tried, ("kind",))
        if self.prices.are_declared:
            usd = sum(self.prices.machine_usd(r.machine_us) + sum(self.prices.token_usd(r.stats)) for r in actors)
            yield _family(CounterMetricFamily, "cost_usd", "Cost at the prices of section cost.", run, [({}, usd)])
        open_units = [({"actor": str(r.actor)}, float(r.units_in_progress)) for r in actors]
        yield _family(
            GaugeMetricFamily, "units_in_progress", "Units in progress on an engine.", run, open_units, ("actor",)
        )
        health = [
            ({"actor": str(record.actor), "host": record.host, "health": name}, float(name == now))
            for record, now in zip(actors, self.health)
            for name in HEALTH
        ]
        help_text = "1 for the health of an engine actor, 0 for the other values."
        yield _family(GaugeMetricFamily, "actor_health", help_text, run, health, ("actor", "host", "health"))


class MetricsServer:
    """HTTP server of the last snapshot, for Prometheus. There is no authentication: bind it to a private interface."""

    def __init__(self, address: str) -> None:
        """`address`: host:port. Raises OSError if it cannot be bound."""
        self.snapshot: Snapshot | None = None
        registry = CollectorRegistry()
        registry.register(self)
        host, _, port = address.rpartition(":")
        self._server, _ = start_http_server(int(port), host.strip("[]"), registry)

    @property
    def port(self) -> int:
        return self._server.server_port

    def collect(self) -> Iterable[Metric]:
        return self.snapshot.families() if self.snapshot is not None else ()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def cumulative(found: Histogram, bounds_s: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Convert a histogram of microseconds to Prometheus' form: cumulative counts per bound, and the sum in seconds."""
    values = [(us / 1e6, count) for us, count in found.values()]
    buckets = [(str(bound), float(sum(n for value, n in values if value <= bound))) for bound in bounds_s]
    return [*buckets, ("+Inf", float(found.count))], sum(value * n for value, n in values)


def _family(
    kind: type,
    name: str,
    help_text: str,
    run: dict[str, str],
    samples: Sequence[tuple[dict[str, str], float]],
    more: Sequence[str] = (),
) -> Metric:
    family = kind(f"pipeline_{name}", help_text, labels=[*run, *more])
    for labels, value in samples:
        family.add_metric([*run.values(), *(labels[label] for label in more)], value)
    return family
