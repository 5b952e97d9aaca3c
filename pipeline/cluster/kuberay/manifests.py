"""All manifests of a job, in the order in which they are applied, and as one YAML text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pipeline.cluster.kuberay.rayjob import API, MAX_NAME, budgets, check, config_map, metadata, object_name, spec
from pipeline.cluster.kuberay.schedule import MAX_CRON_NAME, check_schedule, cron_job, ray_cron_job
from pipeline.cluster.shipped_job import ShippedJob
from pipeline.config import JobConfig


@dataclass(frozen=True)
class Schedule:
    """`has_ray_cron_job`: whether the operator is KubeRay 1.7 or newer."""

    cron: str
    time_zone: str
    open_vars: Mapping[str, str]  # as `ShippedJob.of` takes them
    has_ray_cron_job: bool = True


def manifests(config: JobConfig, schedule: Schedule | None = None) -> list[dict[str, Any]]:
    """Raises ConfigError for what Kubernetes, KubeRay or the pods could not do."""
    shipped = ShippedJob.of(config, schedule.open_vars if schedule else None)
    check(config, shipped)
    name = object_name(config, MAX_NAME if schedule is None else MAX_CRON_NAME)
    made = [config_map(config, name, shipped), *budgets(config, name)]
    if schedule is None:
        job = {"apiVersion": API, "kind": "RayJob", "metadata": metadata(config, name), "spec": spec(config, name)}
        return [*made, job]
    check_schedule(schedule.cron, schedule.time_zone)
    by_clock = ray_cron_job if schedule.has_ray_cron_job else cron_job
    return [*made, *by_clock(config, name, schedule.cron, schedule.time_zone)]


def to_yaml(made: list[dict[str, Any]], command: str) -> str:
    """With a head that says what it is for. `command`: what was typed."""
    first, last = made[0]["metadata"], made[-1]
    kind = last["kind"].lower()
    needs = [
        f"#   the image {image}{'' if '@sha256:' in image else ', better by its digest'}" for image in _images(last)
    ]
    needs += [f"#   the secret {secret}" for secret in _secrets(last)]
    lines = [
        f"# Made by: {' '.join(command.split())}",
        "# Change the job file and make it anew; then: kubectl apply -f THIS_FILE",
        f"# kubectl delete {kind} {last['metadata']['name']} drains what runs; parts that are written stay.",
        "# Has to be there before:",
        *needs,
        *([f"#   the namespace {first['namespace']}"] if "namespace" in first else []),
    ]
    return "\n".join(lines) + "\n" + yaml.dump_all(made, Dumper=_Plain, sort_keys=False, width=120)


class _Plain(yaml.SafeDumper):
    """Without anchors, and with texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def _images(made: Any) -> list[str]:
    return sorted(set(_found(made, "image")))


def _secrets(made: Any) -> list[str]:
    return sorted({*_found(made, "secretName"), *(ref["name"] for ref in _found(made, "secretRef"))})


def _found(value: Any, key: str) -> list[Any]:
    if isinstance(value, list):
        return [found for item in value for found in _found(item, key)]
    if not isinstance(value, dict):
        return []
    return ([value[key]] if key in value else []) + [found for item in value.values() for found in _found(item, key)]
