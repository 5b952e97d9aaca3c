"""The section `run`: engines, their machines, and how work is cut."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from pipeline.config.sections.section import Section
from pipeline.config.values import UNION_TAGS, Bytes, Duration, false_is_off


class PoolSection(Section):
    """How many engines an elastic pool has."""

    min: int = Field(ge=1, le=100_000, description="Engines that the run starts with.", examples=[1])
    max: int = Field(ge=1, le=100_000, description="The most engines, where the cluster has room.", examples=[64])

    @model_validator(mode="after")
    def _in_order(self) -> "PoolSection":
        if self.max < self.min:
            raise ValueError(f"expected max to be at least min; got min {self.min} and max {self.max}")
        return self


def _kind_of_pool(value: object) -> str:
    return UNION_TAGS[isinstance(value, dict | PoolSection)]


class RunSection(Section):
    """How the work is cut and run. `gpus_per_actor` null means 0 on cpu and 1 on cuda."""

    actors: Annotated[
        Annotated[int, Field(ge=1, le=100_000), Tag(UNION_TAGS[0])] | Annotated[PoolSection, Tag(UNION_TAGS[1])],
        Discriminator(_kind_of_pool),
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
    )
    window_bytes: Bytes = Field(
        default=256 * 2**20,
        description="About the most bytes that are read at a time. 256 MiB when left out.",
        examples=["64 MiB"],
    )
    unit_tokens: int = Field(
        default=100_000,
        ge=1,
        description="About the most tokens of a unit of work.",
        examples=[50000],
    )
    unit_rows: int = Field(
        default=512,
        ge=1,
        description="The most rows of a unit of work, which is a part file; a kill loses the units in flight.",
        examples=[256],
    )
    units_in_flight: int | None = Field(
        default=None,
        ge=1,
        description="Units that an engine works on at once. Left out, four, or as many as fill its batch where units "
        "are cut into few rows because each may generate many tokens.",
        examples=[8],
    )
    max_error_rate: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="A larger share of error rows stops the job, resumably. From 0 to 1.",
        examples=[0.001],
    )
    drain_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="After a stop signal or a spot notice: seconds to finish what is open.",
        examples=[60],
    )
    step_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="An engine that ends no step for so many seconds is started again.",
        examples=[600],
    )
    load_timeout_s: float = Field(
        default=3600.0,
        gt=0,
        le=604_800,
        description="An engine that says nothing for so many seconds while it loads is started again.",
        examples=[7200],
    )
    progress_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        le=604_800,
        description="A run in which nothing moves for so many seconds ends with exit code 3.",
        examples=[3600],
    )
    max_runtime: Duration | None = Field(
        default=None,
        description="A run ends itself in time to be over after so long, resumably, with exit code 75.",
        examples=["6 h"],
    )
    quality_sample: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The share of rows that are compared with a reference model while the job runs (section quality). "
        "From 0 to 1; 0 is off.",
        examples=[0.001],
    )
    spot_notice: Annotated[
        Literal["off", "aws", "gcp", "azure"], false_is_off(Literal["off", "aws", "gcp", "azure"])
    ] = Field(
        default="off",
        description="Whose metadata service is asked whether a spot machine is about to go.",
        examples=["aws"],
    )
    ray: Literal["auto", "always"] = Field(
        default="auto",
        description="auto: where one engine on this machine computes one window, the job runs without Ray, whose "
        "start takes some seconds. always: every job runs with it.",
        examples=["always"],
    )
    ray_address: str | None = Field(
        default=None,
        description="A Ray cluster to run on. Ray is started on this machine when left out.",
        examples=["auto"],
    )

    metrics_address: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.\-\[\]:]+:[0-9]{1,5}$")] | None = Field(
        default=None,
        description="Where the driver shows /metrics to Prometheus, and /healthz: host:port. Nowhere when left out.",
        examples=["0.0.0.0:9400"],
    )

    @property
    def pool(self) -> tuple[int, int]:
        """The fewest and the most engines."""
        return (self.actors, self.actors) if isinstance(self.actors, int) else (self.actors.min, self.actors.max)
