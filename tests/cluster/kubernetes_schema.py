"""Checks a manifest field by field: unknown names and wrong kinds are refused.

What Kubernetes defines is checked against the models of its Python client. What KubeRay 1.7 defines is written down
here, after the Go types of ray.io/v1.
"""

import re
from typing import Any

POD = "V1PodTemplateSpec"
TEXTS = "dict(str, str)"
RAY: dict[str, dict[str, str]] = {
    "RayJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "RayJobSpec"},
    "RayCronJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "RayCronJobSpec"},
    "RayCronJobSpec": {"schedule": "str", "timeZone": "str", "suspend": "bool", "jobTemplate": "RayJobSpec"},
    "RayJobSpec": {
        "activeDeadlineSeconds": "int",
        "backoffLimit": "int",
        "clusterSelector": TEXTS,
        "deletionStrategy": "object",
        "entrypoint": "str",
        "entrypointNumCpus": "int",
        "entrypointNumGpus": "int",
        "entrypointResources": "str",
        "jobId": "str",
        "managedBy": "str",
        "metadata": TEXTS,
        "preRunningDeadlineSeconds": "int",
        "rayClusterSpec": "RayClusterSpec",
        "runtimeEnvYAML": "str",
        "shutdownAfterJobFinishes": "bool",
        "submissionMode": "str",
        "submitterConfig": "object",
        "submitterPodTemplate": POD,
        "suspend": "bool",
        "ttlSecondsAfterFinished": "int",
    },
    "RayClusterSpec": {
        "authOptions": "AuthOptions",
        "autoscalerOptions": "AutoscalerOptions",
        "enableInTreeAutoscaling": "bool",
        "gcsFaultToleranceOptions": "object",
        "headGroupSpec": "HeadGroupSpec",
        "headServiceAnnotations": TEXTS,
        "managedBy": "str",
        "rayVersion": "str",
        "suspend": "bool",
        "workerGroupSpecs": "list[WorkerGroupSpec]",
    },
    "AuthOptions": {"mode": "str", "secretName": "str", "enableK8sTokenAuth": "bool"},
    "AutoscalerOptions": {
        "env": "list[V1EnvVar]",
        "envFrom": "list[V1EnvFromSource]",
        "idleTimeoutSeconds": "int",
        "image": "str",
        "imagePullPolicy": "str",
        "resources": "V1ResourceRequirements",
        "securityContext": "V1SecurityContext",
        "upscalingMode": "str",
        "version": "str",
        "volumeMounts": "list[V1VolumeMount]",
    },
    "HeadGroupSpec": {
        "enableIngress": "bool",
        "headService": "V1Service",
        "rayStartParams": TEXTS,
        "serviceType": "str",
        "template": POD,
    },
    "WorkerGroupSpec": {
        "groupName": "str",
        "idleTimeoutSeconds": "int",
        "maxReplicas": "int",
        "minReplicas": "int",
        "numOfHosts": "int",
        "priority": "int",
        "rayStartParams": TEXTS,
        "replicas": "int",
        "scaleStrategy": "object",
        "suspend": "bool",
        "template": POD,
    },
}
KINDS = {
    "ConfigMap": "V1ConfigMap",
    "CronJob": "V1CronJob",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "ServiceAccount": "V1ServiceAccount",
}
PLAIN = {"str": str, "int": int, "bool": bool}
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def wrong(made: dict[str, Any]) -> list[str]:
    """What Kubernetes or KubeRay would refuse of a manifest, each with its place."""
    kind = made["kind"]
    found = _wrong(made, KINDS.get(kind, kind), kind)
    if NAME.fullmatch(made["metadata"]["name"]) is None:
        found.append(f"{kind}.metadata.name: {made['metadata']['name']}")
    if found:
        return found
    if kind == "RayJob":
        found += _rules(made["spec"], len(made["metadata"]["name"]) <= 47)
    if kind == "RayCronJob":
        found += _rules(made["spec"]["jobTemplate"], len(made["metadata"]["name"]) <= 36)
        found += ["schedule: has a time zone in it"] if "TZ=" in made["spec"]["schedule"] else []
    return found


def _rules(job: dict[str, Any], short: bool) -> list[str]:
    """KubeRay's checks on admission and reconciliation that concern what is written here."""
    cluster = job["rayClusterSpec"]
    rules = {
        "the name is short enough": short,
        "a deadline is positive": job.get("activeDeadlineSeconds", 1) > 0,
        "retries are not negative": job.get("backoffLimit", 0) >= 0,
        "a time to live needs the shutdown": job.get("shutdownAfterJobFinishes", False)
        or not job.get("ttlSecondsAfterFinished"),
        "a deletion strategy stands alone": "deletionStrategy" not in job or not job.get("shutdownAfterJobFinishes"),
        "the token has a mode": cluster.get("authOptions", {"mode": "token"}).get("mode") in ("token", "disabled"),
        "Kubernetes' own tokens are not for jobs": "enableK8sTokenAuth" not in cluster.get("authOptions", {}),
        "a submitter ends": job["submitterPodTemplate"]["spec"]["restartPolicy"] in ("Never", "OnFailure"),
        "groups have names of their own": len({g["groupName"] for g in cluster["workerGroupSpecs"]})
        == len(cluster["workerGroupSpecs"]),
    }
    for group in cluster["workerGroupSpecs"]:
        rules["replicas are in order"] = group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    return [rule for rule, holds in rules.items() if not holds]


def _wrong(value: Any, kind: str, place: str) -> list[str]:
    if kind == "object":
        return []
    if kind in PLAIN:
        right = type(value) is PLAIN[kind] or (kind == "str" and place.endswith(("maxUnavailable", "port")))
        return [] if right else [f"{place}: {value!r} is no {kind}"]
    if each := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{place}: no list"]
        return [found for i, item in enumerate(value) for found in _wrong(item, each[1], f"{place}[{i}]")]
    if each := re.fullmatch(r"dict[(\[]str, (.*)[)\]]", kind):
        if not isinstance(value, dict):
            return [f"{place}: no mapping"]
        return [found for key, item in value.items() for found in _wrong(item, each[1], f"{place}.{key}")]
    if not isinstance(value, dict):
        return [f"{place}: no mapping"]
    fields, needed = _fields(kind)
    found = [f"{place}.{key}: unknown" for key in value.keys() - fields.keys()]
    found += [f"{place}.{key}: missing" for key in needed - value.keys()]
    for key in value.keys() & fields.keys():
        found += _wrong(value[key], fields[key], f"{place}.{key}")
    return found


def _fields(kind: str) -> tuple[dict[str, str], set[str]]:
    """Kinds of a type's fields by their names in manifests, and those without which it is refused."""
    if kind in RAY:
        return RAY[kind], {
            "RayJobSpec": {"rayClusterSpec", "entrypoint"},
            "RayCronJobSpec": {"schedule", "jobTemplate"},
            "RayClusterSpec": {"headGroupSpec"},
            "HeadGroupSpec": {"template", "rayStartParams"},
            "WorkerGroupSpec": {"template", "rayStartParams", "groupName", "minReplicas", "maxReplicas"},
        }.get(kind, set())
    from kubernetes.client import models  # takes a second, which every worker of pytest would pay

    model = getattr(models, kind)
    fields = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
    if kind == "V1PodDisruptionBudgetSpec":
        fields["maxUnavailable"] = "int"  # a number or a share
    needed = {"V1Container": {"name"}, "V1PodSpec": {"containers"}, "V1VolumeMount": {"name", "mountPath"},
              "V1CronJobSpec": {"schedule", "jobTemplate"}, "V1Volume": {"name"}}  # fmt: skip
    return fields, needed.get(kind, set())
