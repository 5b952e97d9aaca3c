"""The section of a job file that Kubernetes needs and a job does not say: `pipeline render` alone reads it."""

from typing import Annotated

from pydantic import Field, StringConstraints

from pipeline.config.values import Section

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Folder = Annotated[str, StringConstraints(pattern=r"^/[A-Za-z0-9._/-]+$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,252}[A-Za-z0-9])?$")]
Image = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,500}$")]


class ClusterSection(Section):
    """A cluster of its own for the job, one worker pod an engine. Secrets are named here and never written down."""

    image: Image | None = Field(
        default=None,
        description="The container image of all pods, best by digest: a tag can move between two tries.",
        examples=["registry.example.com/parquet-batch-inference@sha256:0123"],
    )
    namespace: Name | None = Field(
        default=None, description="Where everything is made. kubectl's own when left out.", examples=["batch"]
    )
    cpus: int = Field(
        default=4,
        ge=2,
        description="CPUs of a worker pod: one for reading, the others its engine's, where run.cpus_per_actor does not "
        "say.",
        examples=[16],
    )
    memory: Quantity = Field(default="8Gi", description="Memory of a worker pod.", examples=["64Gi"])
    head_memory: Quantity = Field(
        default="4Gi", description="Memory of the head pod, in which the driver runs.", examples=["8Gi"]
    )
    gpus: int = Field(default=0, ge=0, description="GPUs of a worker pod and its engine.", examples=[1])
    gpu_resource: Label = Field(
        default="nvidia.com/gpu", description="What Kubernetes calls them.", examples=["nvidia.com/mig-3g.40gb"]
    )
    node_selector: dict[Label, Label] = Field(
        default={},
        description="Labels that a worker's machine must have.",
        examples=[{"cloud.google.com/gke-spot": "true"}],
    )
    tolerations: list[Label] = Field(
        default=[], description="Keys of taints that workers tolerate.", examples=[["nvidia.com/gpu"]]
    )
    service_account: Name | None = Field(
        default=None, description="Who the pods are, for the object store.", examples=["pipeline-s3"]
    )
    secrets: list[Name] = Field(
        default=[],
        description="Secrets whose entries become environment variables of all pods.",
        examples=[["pipeline-s3"]],
    )
    token_secret: Name | None = Field(
        default="ray-token",
        description="The secret that holds Ray's token, under auth_token. null lets everybody in who reaches the head.",
        examples=["ray-token"],
    )
    volumes: dict[Name, Folder] = Field(
        default={},
        description="Volume claims and where they are mounted: shared ones, for input, output or models.",
        examples=[{"shared-data": "/data"}],
    )
    image_folders: list[Folder] = Field(
        default=["/work"],
        description="Folders of the image that hold input or models.",
        examples=[["/work", "/models"]],
    )
    retries: int = Field(
        default=3, ge=0, description="New clusters after one that failed; each goes on from the parts.", examples=[5]
    )
    deadline_s: int = Field(
        default=86_400, ge=60, description="After so many seconds a try is ended for good.", examples=[18_000]
    )
    keep_s: int = Field(
        default=120, ge=0, description="How long a cluster stays after its job, to look at.", examples=[600]
    )
    kubectl_image: Image | None = Field(
        default=None,
        description="An image with sh and kubectl, for schedules where KubeRay is older than 1.7.",
        examples=["registry.example.com/kubectl:1.34"],
    )
