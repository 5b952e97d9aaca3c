"""A RayJob: KubeRay makes a cluster, runs the job on it and removes it; a try that failed is followed by a new one.

Field names and rules are those of KubeRay 1.7's ray.io/v1.
"""

import json
import re
from typing import Any

from pipeline.cluster.kuberay.pods import JOB_FOLDER, head, labels, submitter, worker
from pipeline.cluster.shipped_job import JOB_FILE, ShippedJob
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import secrets_of

RAY_VERSION = "2.60.0"  # of the image, as pyproject.toml pins it
API = "ray.io/v1"
MAX_NAME = 47  # of a RayJob; its pods' names are longer
MAX_CONFIG_MAP = 900_000  # bytes; Kubernetes takes 1 MiB


def object_name(config: JobConfig, longest: int = MAX_NAME) -> str:
    """The job's name as Kubernetes takes it. Raises ConfigError where it is too long."""
    name = re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-")
    if not name or name[0].isdigit():
        name = f"job-{name}".rstrip("-")
    if len(name) > longest:
        raise ConfigError(f"name {config.name}: Kubernetes takes at most {longest} characters here; give a shorter one")
    return name


def config_map(config: JobConfig, name: str, shipped: ShippedJob) -> dict[str, Any]:
    """The job file, for the driver."""
    files = dict(shipped.files)
    data = json.loads(files[JOB_FILE])
    run, cluster = data["run"], config.cluster
    run.setdefault("cpus_per_actor", cluster.cpus - 1)  # a reader takes the other one
    run.setdefault("gpus_per_actor", cluster.gpus)
    data.pop("cluster", None)
    files[JOB_FILE] = json.dumps(data, indent=1)
    if sum(map(len, files.values())) > MAX_CONFIG_MAP:
        raise ConfigError("the job file and its chat template are larger than a ConfigMap may be")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(config, f"{name}-job"), "data": files}


def spec(config: JobConfig, name: str, options: str = "") -> dict[str, Any]:
    """The RayJobSpec. `options`: of `pipeline run`, as a shell reads them."""
    if config.cost.budget_usd is not None or config.run.max_runtime is not None:
        options += " --limit-exit-code 0"  # backoffLimit would spend again
    fewest, most = config.run.pool
    cluster: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": head(config, name, f"{name}-job"),
        },
        "workerGroupSpecs": [
            {
                "groupName": "engines",
                "replicas": fewest,
                "minReplicas": fewest,
                "maxReplicas": most,
                "rayStartParams": {},
                "template": worker(config, name),
            }
        ],
    }
    if fewest < most:
        cluster |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 60}}
    if config.cluster.token_secret is not None:
        cluster["authOptions"] = {"mode": "token", "secretName": config.cluster.token_secret}
    return {
        "entrypoint": f"cd {JOB_FOLDER} && exec pipeline run {JOB_FILE}{options}",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": config.cluster.keep_s,
        "backoffLimit": config.cluster.retries,
        "activeDeadlineSeconds": config.cluster.deadline_s,
        "submitterPodTemplate": submitter(config, name),
        "rayClusterSpec": cluster,
    }


def budgets(config: JobConfig, name: str) -> list[dict[str, Any]]:
    """The head is not moved while it runs, since the driver would go with it; workers leave one at a time."""
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(config, f"{name}-{role}"),
            "spec": {"maxUnavailable": most, "selector": {"matchLabels": labels(name, role)}},
        }
        for role, most in (("head", 0), ("worker", 1))
    ]


def metadata(config: JobConfig, name: str) -> dict[str, Any]:
    return {"name": name} | ({"namespace": config.cluster.namespace} if config.cluster.namespace else {})


def check(config: JobConfig, shipped: ShippedJob) -> None:
    """Raises ConfigError for what pods could not read or write, and for secrets that a manifest would hold."""
    if config.cluster.image is None:
        raise ConfigError(
            "cluster.image: is missing. Build one from infra/docker in the repository, and give it by digest"
        )
    if (config.run.cpus_per_actor or 0) >= config.cluster.cpus:
        raise ConfigError(
            f"run.cpus_per_actor {config.run.cpus_per_actor:g}: a worker has {config.cluster.cpus} CPUs, one of them "
            "for reading; raise cluster.cpus"
        )
    for prefix, options in config.storage.items():
        if secrets_of(options):
            raise ConfigError(
                f"storage.{prefix}: holds a secret, which a manifest must not. Put it into a Kubernetes secret as "
                "environment variables, and name that in cluster.secrets"
            )
    data = json.loads(shipped.files[JOB_FILE])
    shared, readable = list(config.cluster.volumes.values()), config.cluster.image_folders
    for key, place, folders in (
        ("input.path", data["input"]["path"], [*shared, *readable]),
        ("output.path", data["output"]["path"], shared),
        ("model.path", data["model"]["path"], [*shared, *readable]),
    ):
        is_local = isinstance(place, str) and not is_url(place) and place.startswith("/")
        if is_local and not any(place == f.rstrip("/") or place.startswith(f.rstrip("/") + "/") for f in folders):
            raise ConfigError(
                f"{key} {place}: is on no disk of the pods. Expected a url such as s3://bucket/folder, or a path below "
                f"one of {', '.join(folders) or 'cluster.volumes'}"
            )
