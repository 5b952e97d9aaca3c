"""The pods of a job's cluster: what they run as, what they get, and how they leave.

KubeRay gives a pod no time to drain. So each has a preStop hook that stays while there is something to finish, and a
grace that is longer than the hook. A worker's hook first tells Ray that its node is draining: it gets no more units.
"""

from typing import Any

from pipeline.cluster.job_server import BEYOND_DRAIN_S
from pipeline.config import JobConfig

USER = 10_001  # of infra/docker
GRACE_BEYOND_HOOK_S = 15
JOB_FOLDER = "/etc/pipeline"
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_PORTS = (("gcs-server", 6379), ("dashboard", 8265), ("client", 10001))
# A bracket around one letter: the pattern must not find the shell that looks for it.
DRIVER, ENGINE = "/bin/[p]ipeline", "ray::.*[E]ngineActor"


def labels(name: str, role: str) -> dict[str, str]:
    """By which a disruption budget finds the pods of every cluster of the job."""
    return {"app.kubernetes.io/name": "parquet-batch-inference", "app.kubernetes.io/instance": name,
            "app.kubernetes.io/component": role}  # fmt: skip


def wait_s(config: JobConfig) -> int:
    """From the wish to stop to the end of whoever is asked."""
    return int(config.run.drain_timeout) + BEYOND_DRAIN_S


def head(config: JobConfig, name: str, config_map: str) -> dict[str, Any]:
    """The pod template of the head: the driver runs there, and no engine."""
    container = {
        "name": "ray-head",
        "image": config.cluster.image,
        "securityContext": _CONTAINER_SECURITY,
        "ports": [{"name": port, "containerPort": number} for port, number in _PORTS],
        "env": [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(wait_s(config))}],
        **_environment(config),
        "lifecycle": _stays_while(DRIVER, config),
        "resources": _resources({"cpu": "1", "memory": config.cluster.head_memory}),
    }
    job = {"name": "job", "configMap": {"name": config_map}}
    return _template(config, name, "head", container, {"job": (job, JOB_FOLDER)})


def worker(config: JobConfig, name: str) -> dict[str, Any]:
    """The pod template of a worker: one engine, and room for a reader."""
    cluster = config.cluster
    asked = {"cpu": str(cluster.cpus), "memory": cluster.memory}
    if cluster.gpus:
        asked[cluster.gpu_resource] = str(cluster.gpus)
    container = {
        "name": "ray-worker",
        "image": cluster.image,
        "securityContext": _CONTAINER_SECURITY,
        **_environment(config),
        "lifecycle": _stays_while(ENGINE, config, drains=True),
        "resources": _resources(asked),
    }
    made = _template(config, name, "worker", container, {})
    if cluster.node_selector:
        made["spec"]["nodeSelector"] = dict(cluster.node_selector)
    if cluster.tolerations:
        made["spec"]["tolerations"] = [{"key": key, "operator": "Exists"} for key in cluster.tolerations]
    return made


def submitter(config: JobConfig, name: str) -> dict[str, Any]:
    """The pod template of what KubeRay submits the job from."""
    container = {
        "name": "submitter",
        "image": config.cluster.image,
        "securityContext": _CONTAINER_SECURITY,
        "resources": _resources({"cpu": "1", "memory": "512Mi"}),
    }
    return {
        "metadata": {"labels": labels(name, "submitter")},
        "spec": {**locked(), "restartPolicy": "Never", "containers": [container]},
    }


def locked() -> dict[str, Any]:
    """Of a pod that asks nothing of Kubernetes."""
    return {"automountServiceAccountToken": False, "securityContext": _POD_SECURITY}


def one_off(name: str, image: str | None, command: list[str], **more: Any) -> dict[str, Any]:
    """A small container."""
    asked = _resources({"cpu": "100m", "memory": "128Mi"})
    return {"name": name, "image": image, "securityContext": _CONTAINER_SECURITY, "command": command,
            "resources": asked, **more}  # fmt: skip


def _template(
    config: JobConfig, name: str, role: str, container: dict[str, Any], more: dict[str, tuple[dict[str, Any], str]]
) -> dict[str, Any]:
    cluster = config.cluster
    volumes = {
        "ray": ({"name": "ray", "emptyDir": {}}, "/tmp/ray"),
        "cache": ({"name": "cache", "emptyDir": {}}, "/var/cache/pipeline"),  # models of a store, compiled kernels
        **more,
        **{
            claim: ({"name": claim, "persistentVolumeClaim": {"claimName": claim}}, folder)
            for claim, folder in cluster.volumes.items()
        },
    }
    mounts = [{"name": volume, "mountPath": folder} for volume, (_, folder) in volumes.items()]
    if role == "head":
        next(m for m in mounts if m["name"] == "job")["readOnly"] = True
    spec: dict[str, Any] = {
        **locked(),
        "terminationGracePeriodSeconds": wait_s(config) + GRACE_BEYOND_HOOK_S,
        "containers": [container | {"volumeMounts": mounts}],
        "volumes": [volume for volume, _ in volumes.values()],
    }
    if role == "head" and _is_elastic(config):
        del spec["automountServiceAccountToken"]  # its autoscaler asks Kubernetes, as the account KubeRay makes for it
    elif cluster.service_account:
        spec["serviceAccountName"] = cluster.service_account
    return {"metadata": {"labels": labels(name, role)}, "spec": spec}


def _is_elastic(config: JobConfig) -> bool:
    fewest, most = config.run.pool
    return fewest < most


def _environment(config: JobConfig) -> dict[str, Any]:
    found = [{"secretRef": {"name": secret}} for secret in config.cluster.secrets]
    return {"envFrom": found} if found else {}


def _resources(asked: dict[str, str]) -> dict[str, Any]:
    return {"requests": asked, "limits": dict(asked)}


def _stays_while(process: str, config: JobConfig, drains: bool = False) -> dict[str, Any]:
    seconds = wait_s(config)
    told = (
        "ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is to end' "
        f"--deadline-remaining-seconds {seconds}\n"
    )
    stay = f"for i in {{1..{seconds}}}; do\n  grep -qs '{process}' /proc/[0-9]*/cmdline || exit 0\n  sleep 1\ndone\n"
    return {"preStop": {"exec": {"command": ["/bin/bash", "-c", (told if drains else "") + stay]}}}
