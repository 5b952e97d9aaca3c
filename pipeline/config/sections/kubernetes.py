"""Section `kubernetes`, used only by `pipeline manifests`."""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pipeline.config.values import ConfigSection

Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Image = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,500}$")]


class PatchSection(ConfigSection):
    """JSON merge patches (RFC 7386) for the manifests of `pipeline manifests`. Lists of objects with a `name` (worker
    groups: `groupName`) merge by it. `null` removes a key."""

    pods: dict[str, Any] = Field(
        default={},
        description="Patch for the pod templates of head and workers; the container is called ray.",
        examples=[{"spec": {"serviceAccountName": "pipeline-s3"}}],
    )
    head: dict[str, Any] = Field(
        default={},
        description="Patch for the head's pod template, applied after pods.",
        examples=[{"spec": {"priorityClassName": "high"}}],
    )
    worker: dict[str, Any] = Field(
        default={},
        description="Patch for the workers' pod template, applied after pods.",
        examples=[{"spec": {"nodeSelector": {"cloud.google.com/gke-spot": "true"}}}],
    )
    job: dict[str, Any] = Field(
        default={},
        description="Patch for the RayJob.",
        examples=[{"spec": {"activeDeadlineSeconds": 18000}}],
    )


class KubernetesSection(ConfigSection):
    """A dedicated Ray cluster for the job, one worker pod per engine."""

    image: Image | None = Field(
        default=None,
        description="Container image of all pods, best by digest: a tag can change between two tries.",
        examples=["registry.example.com/parquet-batch-inference@sha256:0123"],
    )
    cpus: int = Field(
        default=4,
        ge=2,
        description="CPUs of a worker pod: one for reading, the others for its engine, or run.cpus_per_actor.",
        examples=[16],
    )
    memory: Quantity = Field(default="8Gi", description="Memory of a worker pod.", examples=["64Gi"])
    gpus: int = Field(default=0, ge=0, description="GPUs of a worker pod and its engine.", examples=[1])
    patch: PatchSection = Field(
        default=PatchSection(),
        description="JSON merge patches (RFC 7386) for everything without a key here: spot nodes, volumes, secrets. "
        "null removes a key; lists of objects with a name (worker groups: groupName) merge by it.",
        examples=[{"worker": {"spec": {"nodeSelector": {"cloud.google.com/gke-spot": "true"}}}}],
    )
