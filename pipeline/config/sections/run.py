"""The section `run`: engines, their machines, and when a run ends."""

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from pipeline.config.values import (
    HIDDEN,
    IDENTITY,
    OPTIONS,
    WORD,
    Duration,
    Place,
    Section,
    by_form,
    false_is_off,
)

# What `run.stall_timeout` bounds is one step of an engine. A load is a step of many minutes, and a run in which nothing
# moves may have an engine that is restarted in it several times.
LOAD_TIMEOUTS = 12
PROGRESS_TIMEOUTS = 6

SpotNotice = Literal["off", "aws", "gcp", "azure"]


class PoolSection(Section):
    """Size of an elastic pool of engines."""

    min: int = Field(ge=1, le=100_000, description="Engines that the run starts with.", examples=[1])
    max: int = Field(ge=1, le=100_000, description="The most engines, where the cluster has room.", examples=[64])

    @model_validator(mode="after")
    def _in_order(self) -> "PoolSection":
        if self.max < self.min:
            raise ValueError(f"expected max to be at least min; got min {self.min} and max {self.max}")
        return self


class RunSection(Section):
    """How the work is run. `gpus_per_actor` null means 0 on cpu and 1 on cuda."""

    actors: Annotated[
        Annotated[int, Field(ge=1, le=100_000), Tag(WORD)] | Annotated[PoolSection, Tag(OPTIONS)],
        by_form,
    ] = Field(
        default=1,
        description="Engines at once, each a copy of the model. With {min: 1, max: 64} engines start as machines join "
        "the cluster, and are given back as soon as no unit is left for them.",
        examples=[8, {"min": 1, "max": 64}],
    )
    cpus_per_actor: float | None = Field(
        default=None,
        gt=0,
        description="Processors that an engine reserves. Its share of the machine's when left out.",
        examples=[4],
    )
    gpus_per_actor: float | None = Field(
        default=None,
        ge=0,
        description="GPUs that an engine reserves. 0 on cpu and 1 on cuda when left out.",
        examples=[1],
    )
    window_rows: int = Field(
        default=65_536,
        ge=1,
        description="The most rows that are read and sorted into units at a time.",
        examples=[65536],
        json_schema_extra=IDENTITY,
    )
    max_error_rate: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="A larger share of error rows stops the job, resumably. From 0 to 1.",
        examples=[0.001],
    )
    drain_timeout: Duration = Field(
        default=30.0,
        description="Time to finish open work after a stop signal or a spot notice.",
        examples=["2 min"],
        json_schema_extra={"default": "30 s"},
    )
    stall_timeout: Annotated[Duration, Field(gt=0)] = Field(
        default=300.0,
        description="An engine that ends no step for this long is started again; one that is loading, after "
        f"{LOAD_TIMEOUTS} times as long. A run in which nothing moves for {PROGRESS_TIMEOUTS} times as long ends with "
        "exit code 3.",
        examples=["10 min"],
        json_schema_extra={"default": "5 min"},
    )
    max_runtime: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None,
        description="A run ends itself in time to be over after this long, resumably, with exit code 75.",
        examples=["6 h"],
    )
    spot_notice: Annotated[SpotNotice, false_is_off(SpotNotice)] = Field(
        default="off",
        description="Whose metadata service announces that a spot machine is about to be taken away.",
        examples=["aws"],
    )
    ray_address: str | None = Field(
        default=None,
        min_length=1,
        description="The Ray cluster to run on: an address, or auto for the one that this machine is part of. local "
        "starts Ray on this machine. When left out Ray is started here where it is needed: one engine that computes "
        "one window runs without it, which saves some seconds.",
        examples=["auto"],
    )
    notify: Place | None = Field(
        default=None,
        description="Receives an event when a target is missed, quality drops, or a limit of cost.budget_usd or "
        "run.max_runtime is near or reached: an http(s) url that takes a POST of JSON, or a file to which a line of "
        "JSON is added.",
        examples=["https://hooks.example.com/jobs", "missed.jsonl"],
        json_schema_extra=HIDDEN,
    )

    @property
    def pool(self) -> tuple[int, int]:
        """The fewest and the most engines."""
        return (self.actors, self.actors) if isinstance(self.actors, int) else (self.actors.min, self.actors.max)

    @property
    def step_timeout_s(self) -> float:
        """Seconds without the end of a step after which an engine is started again."""
        return self.stall_timeout

    @property
    def load_timeout_s(self) -> float:
        """Seconds without a word from an engine that is loading after which it is started again."""
        return LOAD_TIMEOUTS * self.stall_timeout

    @property
    def progress_timeout_s(self) -> float:
        """Seconds in which nothing moves after which a run ends."""
        return PROGRESS_TIMEOUTS * self.stall_timeout

    @property
    def cluster_address(self) -> str | None:
        """The Ray cluster to join; None where Ray is started on this machine, if at all."""
        return None if self.ray_address == "local" else self.ray_address
