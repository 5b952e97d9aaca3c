"""Specification of a dataflow: the remaining windows and the settings of its actors. Does not import Ray."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.source import InputWindow, Source
from pipeline.data.units import UnitSpec
from pipeline.job.actor.work_spec import WorkSpec
from pipeline.stores.filesystem import storage_for

NUM_READERS = 2  # windows read at once; one for a single actor, since each reader is a process to start
# Larger pools have more readers. One rendered 16,000 rows of 2,000 characters a second (two shared cores, local disk),
# about eight million tokens. A GPU engine's demand was not measured; a tenth of that would be high.
ACTORS_PER_READER = 8

MIN_IN_FLIGHT, MAX_IN_FLIGHT = 4, 48
FULL_BATCHES = 4  # full batches of rows in flight: some rows wait, and of most units only the longest rows still run


def units_in_flight(
    max_num_seqs: int, unit_rows: int, unit_tokens: int, max_tokens: int, n: int = 1, has_images: bool = False
) -> int:
    """Return the number of open units that keep the batch of an engine with `max_num_seqs` sequences full, from the
    largest number of rows with `n` samples that a unit can have. `python -m benchmarks.simulate pools` compares
    values. has_images: units are large, so that fewer are open."""
    rows = max(1, min(unit_rows, unit_tokens // max(1, max_tokens * n)))
    batches = 1 if has_images else FULL_BATCHES
    return min(MAX_IN_FLIGHT, max(MIN_IN_FLIGHT, -(-batches * max_num_seqs // (rows * n))))


@dataclass(frozen=True)
class WindowTask:
    """An incomplete window and its existing parts. Picklable: it is a read task."""

    window: InputWindow
    parts: Mapping[int, int] = field(default_factory=dict)  # number of rows of each existing part, by unit
    units_of: int | None = None  # number of units according to the existing parts
    again: frozenset[int] = frozenset()  # units whose part is computed again
    sample: int | None = None  # compute only this number of its rows

    @property
    def done(self) -> frozenset[int]:
        """Finished units."""
        return frozenset(self.parts) - self.again


@dataclass(frozen=True, kw_only=True)
class ReadSpec:
    """Settings that read tasks need. Picklable; storage options may hold secrets and are never shown."""

    source: Source = field(repr=False)
    units: UnitSpec
    output: str
    storage: Mapping[str, Any] = field(repr=False)  # fsspec options of the output
    fingerprint: str
    retry_failed: bool


@dataclass(frozen=True, kw_only=True)
class FlowSpec:
    """Specification of a dataflow. `cpus` and `gpus`: resources of one actor. `actors`: maximum size of the pool.
    `min_actors`: its initial size, if smaller."""

    source: Source = field(repr=False)
    tasks: tuple[WindowTask, ...] = field(repr=False)
    work: WorkSpec = field(repr=False)
    actors: int
    cpus: float
    gpus: float
    units_in_flight: int
    ray_address: str | None = None
    drain_timeout_s: float = 30.0  # for open units on a machine that leaves the cluster
    failpoints: str = ""  # set by tests
    always_ray: bool = False
    min_actors: int | None = None

    @property
    def reading(self) -> ReadSpec:
        """Settings of the read tasks."""
        return ReadSpec(
            source=self.source,
            units=self.work.job.units,
            output=self.work.output,
            storage=storage_for(self.work.output, self.work.job.config.storage_options),
            fingerprint=self.work.fingerprint,
            retry_failed=self.work.again.has_failed,
        )

    @property
    def is_elastic(self) -> bool:
        return self.min_actors is not None and self.min_actors < self.actors

    @property
    def needs_ray(self) -> bool:
        """Return whether Ray is needed. For one engine on this machine and one window, or a sample, it would only add
        its start-up time."""
        if self.always_ray or self.ray_address is not None or self.actors > 1:
            return True
        return len(self.tasks) > 1 and any(task.sample is None for task in self.tasks)


def ray_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return RAY_ADDRESS, the Ray cluster to join; None if it is not set, or `local`, which starts Ray here."""
    address = environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


class EndOfUnits(Exception):
    """All units of a dataflow have been computed."""
