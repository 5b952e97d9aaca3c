"""Section `run`: engines, their machines, and limits of a run."""

from typing import Annotated

from pydantic import Field

from pipeline.config.values import HIDDEN, IDENTITY, Actors, ConfigSection, Duration, PathOrUrl, Switch
from pipeline.machine.liveness import LOAD_TIMEOUTS, PROGRESS_TIMEOUTS


class RunSection(ConfigSection):
    """Number of engines and limits of a run."""

    actors: Actors = Field(
        default=1,
        description="Number of engines, each with a copy of the model. [1, 64]: one engine at the start; others start "
        "as machines join the cluster, up to 64, and are released as soon as no unit is left for them.",
        examples=[8, [1, 64]],
    )
    cpus_per_actor: float | None = Field(
        default=None,
        gt=0,
        description="CPUs that an engine reserves. Default: its share of the machine.",
        examples=[4],
    )
    gpus_per_actor: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that an engine reserves. Default: 0 on cpu, engine.tensor_parallel_size on cuda.",
        examples=[1],
    )
    window_rows: int = Field(
        default=65_536,
        ge=1,
        description="Maximum rows read and sorted into units at a time.",
        examples=[65536],
        json_schema_extra=IDENTITY,
    )
    max_error_rate: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Stop the job, resumably, at a larger fraction of error rows. From 0 to 1.",
        examples=[0.001],
    )
    drain_timeout: Duration = Field(
        default=30.0,
        description="Time for running rows to finish after a stop signal.",
        examples=["2 min"],
        json_schema_extra={"default": "30 s"},
    )
    copy_equal_rows: Switch = Field(
        default=True,
        description="Compute greedy rows of a unit with the same prompt and parameters once, and copy the result; rows "
        "with a temperature above 0 are always computed. false: compute each row.",
        examples=[False],
    )
    stall_timeout: Annotated[Duration, Field(gt=0)] = Field(
        default=300.0,
        description="Restart an engine that finishes no step for this long; while it loads, for "
        f"{LOAD_TIMEOUTS} times as long. A run without progress for {PROGRESS_TIMEOUTS} times as long ends with exit "
        "code 3.",
        examples=["10 min"],
        json_schema_extra={"default": "5 min"},
    )
    max_runtime: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None,
        description="Maximum time of a run. It ends in time, resumably, with exit code 75.",
        examples=["6 h"],
    )
    notify: PathOrUrl | None = Field(
        default=None,
        description="Where to send an event when quality drops, or cost.budget_usd or run.max_runtime is near or "
        "reached: an http(s) url that accepts a POST of JSON, or a file to append JSON "
        "lines to.",
        examples=["https://hooks.example.com/jobs", "missed.jsonl"],
        json_schema_extra=HIDDEN,
    )

    @property
    def pool(self) -> tuple[int, int]:
        """Minimum and maximum number of engines."""
        return (self.actors, self.actors) if isinstance(self.actors, int) else self.actors

    @property
    def step_timeout_s(self) -> float:
        """Seconds without a finished step after which an engine is restarted."""
        return self.stall_timeout

    @property
    def load_timeout_s(self) -> float:
        """Seconds without a message from a loading engine after which it is restarted."""
        return LOAD_TIMEOUTS * self.stall_timeout

    @property
    def progress_timeout_s(self) -> float:
        """Seconds without progress after which a run ends."""
        return PROGRESS_TIMEOUTS * self.stall_timeout
