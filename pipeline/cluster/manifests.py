"""Kubernetes manifests of a job: `base.yaml`, filled in from the job file and patched by `kubernetes.patch`."""

import copy
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeGuard
from zoneinfo import ZoneInfo

import yaml

from pipeline.checkpoints.chat_template import read_template
from pipeline.cluster.merge_patch import merged
from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.stores.filesystem import is_url
from pipeline.stores.redaction import secrets_of

RAY_VERSION = "2.60.0"  # in the image; pinned in pyproject.toml
JOB_FILE = "job.json"  # JSON is YAML with all strings quoted
TEMPLATE_FILE = "chat_template.jinja"
STOP_WAIT_BEYOND_DRAIN_S = 30  # from the end of run.drain_timeout to SIGKILL, while the driver writes parts and records
GRACE_BEYOND_HOOK_S = 15
MAX_NAME = 47  # of a RayJob; KubeRay appends to it for pod names
MAX_CRON_NAME = 36  # a CronJob appends `-` and the scheduled time in minutes since 1970
MAX_CONFIG_MAP = 900_000  # bytes; Kubernetes accepts 1 MiB
# A CronJob appends the scheduled time in minutes since 1970 to a RayJob's name. KubeRay derives the names of clusters
# from it: summarize-29400123-x7k2p -> @1764007380. All retries of a scheduled run thus use the same date.
FIRED_AT = ' --logical-date "@$(( $(echo "${RAY_CLUSTER_NAME%-*}" | sed "s/.*-//") * 60 ))"'

_VALUE = re.compile(r"<([a-z_]+)>")
_CRON_NAMES = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")
_UNSHARED = {"emptyDir", "configMap", "secret", "ephemeral"}  # kinds of volumes that workers and head do not share


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of a job. open_vars: variables that each scheduled run fills in with its date -> their placeholder text
    in the paths of the config."""

    cron: str
    time_zone: str
    open_vars: Mapping[str, str]

    def check(self) -> None:
        """Raise ConfigError for an invalid cron expression or time zone."""
        if self.cron not in _CRON_NAMES and len(self.cron.split()) != 5:
            raise ConfigError(
                f"--schedule {self.cron!r}: expected minute, hour, day, month and day of the week, such as '0 2 * * *'"
            )
        try:
            ZoneInfo(self.time_zone)
        except (OSError, ValueError, KeyError):
            raise ConfigError(f"--time-zone {self.time_zone!r}: expected a name such as Europe/Berlin") from None


def manifests(config: JobConfig, schedule: Schedule | None = None) -> list[dict[str, Any]]:
    """Return all objects of a job in the order to apply them.

    Raises ConfigError for settings that Kubernetes, KubeRay or the pods do not support.
    """
    _check(config)
    kubernetes, (min_workers, max_workers) = config.kubernetes, config.run.pool
    options = FIRED_AT if schedule else ""
    if config.cost.budget_usd is not None or config.run.max_runtime is not None:
        options += " --limit-exit-code 0"  # otherwise backoffLimit would retry and spend more
    stop_wait_s = int(config.run.drain_timeout) + STOP_WAIT_BEYOND_DRAIN_S
    values: dict[str, Any] = {
        "name": _object_name(config.name, MAX_NAME if schedule is None else MAX_CRON_NAME),
        "image": kubernetes.image,
        "cpus": str(kubernetes.cpus),
        "memory": kubernetes.memory,
        "gpus": str(kubernetes.gpus) if kubernetes.gpus else None,
        "min_workers": min_workers,
        "max_workers": max_workers,
        "ray_version": RAY_VERSION,
        "options": options,
        "stop_wait_s": str(stop_wait_s),
        "grace_s": stop_wait_s + GRACE_BEYOND_HOOK_S,
    }
    base = yaml.safe_load(files("pipeline.cluster").joinpath("base.yaml").read_text(encoding="utf-8"))
    elastic, patch = base["elastic"] if min_workers < max_workers else {}, kubernetes.patch

    def made(name: str, *patches: dict[str, Any]) -> Any:
        filled = _filled(base[name], values)
        for each in patches:
            filled = merged(filled, each)
        return filled

    values["head"] = made("head", elastic.get("head", {}), patch.pods, patch.head)
    values["worker"] = made("worker", patch.pods, patch.worker)
    _check_pods(config.output.path, values["head"], values["worker"])
    job = made("job", elastic.get("job", {}), patch.job)
    values["files"] = _files(config, schedule.open_vars if schedule else {})
    budgets = [made("head_budget"), made("worker_budget")]
    if schedule is None:
        return [made("config_map"), *budgets, job]
    schedule.check()
    values |= {"schedule": schedule.cron, "time_zone": schedule.time_zone}
    values["files"]["rayjob.yaml"] = _dump([job])
    account = [made("service_account"), made("role"), made("role_binding")]
    return [made("config_map"), *budgets, *account, made("cron_job")]


def to_yaml(made: list[dict[str, Any]], command: str) -> str:
    """Return the manifests as YAML, with comments on how to recreate, apply and delete them. command: as typed."""
    config_map, last = made[0], made[-1]
    pods = [last, yaml.safe_load(config_map["data"].get("rayjob.yaml", ""))]
    needs = {
        *(f"image {image}" for image in _values(pods, "image")),
        *(f"secret {secret}" for secret in _values(pods, "secretName")),
        *(f"secret {secret}" for secret in _values(_values(pods, "secretRef"), "name")),
        *(f"volume claim {claim}" for claim in _values(pods, "claimName")),
    }
    name, kind = config_map["metadata"]["name"].removesuffix("-job"), last["kind"].lower()
    effect = "stops the schedule; delete a rayjob to drain a run" if kind == "cronjob" else "drains the run"
    lines = [
        f"# Created by: {' '.join(command.split())}",
        "# To change it, edit the job file, run the command again, and run: kubectl apply -f THIS_FILE",
        f"# kubectl delete {kind} {name} {effect}. Written parts are kept.",
        "# Requires:",
        *(f"#   {need}" for need in sorted(needs)),
    ]
    return "\n".join(lines) + "\n" + _dump(made)


class _Plain(yaml.SafeDumper):
    """YAML dumper without anchors, and with multi-line strings as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _represent_text)


def _dump(objects: list[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=120)


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    """Return `node` with each `<name>` replaced by its value. Names in values are not replaced.

    A text that consists of one name becomes the value itself. Keys whose value is None are removed.
    """
    if isinstance(node, dict):
        filled = {key: _filled(value, values) for key, value in node.items()}
        return {key: value for key, value in filled.items() if value is not None}
    if isinstance(node, list):
        return [_filled(item, values) for item in node]
    if not isinstance(node, str):
        return node
    if whole := _VALUE.fullmatch(node):
        return values[whole[1]]
    return _VALUE.sub(lambda found: str(values[found[1]]), node)


def _values(value: Any, key: str) -> list[Any]:
    """Return all values under `key`, at any depth."""
    if isinstance(value, list):
        return [found for item in value for found in _values(item, key)]
    if not isinstance(value, dict):
        return []
    return ([value[key]] if key in value else []) + [found for item in value.values() for found in _values(item, key)]


def _files(config: JobConfig, open_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the ConfigMap: the job and its chat template.

    Overlays, `--set`, variables and environment variables are resolved, so the cluster runs the job that was validated
    here, and no setting passes through a shell. open_vars: as in `Schedule`.
    """
    data: dict[str, Any] = copy.deepcopy(dict(config.data))
    data.pop("kubernetes", None)
    data["run"] = {
        "cpus_per_actor": config.kubernetes.cpus - 1,  # one CPU is left for reading
        "gpus_per_actor": config.kubernetes.gpus,
        **data.get("run", {}),
    }
    declared = data.pop("vars", {})
    if open_vars:
        data["vars"] = {name: declared[name] for name in open_vars}
    for name, text in open_vars.items():
        for section in ("input", "output"):
            data[section]["path"] = data[section]["path"].replace(text, f"${{{name}}}")
    found = {}
    if (chat := config.prompt.chat) is not None and chat.chat_template is not None:
        found[TEMPLATE_FILE] = read_template(chat.chat_template)
        data["prompt"]["chat"]["chat_template"] = TEMPLATE_FILE
    found[JOB_FILE] = json.dumps(data, indent=1)
    if sum(map(len, found.values())) > MAX_CONFIG_MAP:
        raise ConfigError(f"the job file and its chat template exceed a ConfigMap's limit of {MAX_CONFIG_MAP:,} bytes")
    return found


def _object_name(name: str, max_length: int) -> str:
    """Return the job's name as a Kubernetes object name. Raises ConfigError if it is too long."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not found or found[0].isdigit():
        found = f"job-{found}".rstrip("-")
    if len(found) > max_length:
        raise ConfigError(f"name {name}: Kubernetes accepts up to {max_length} characters here; choose a shorter name")
    return found


def _check(config: JobConfig) -> None:
    """Raise ConfigError for a missing image, too few CPUs, relative paths, and secrets."""
    kubernetes = config.kubernetes
    if kubernetes.image is None:
        raise ConfigError(
            "kubernetes.image: missing. Build an image from infra/docker in the repository, and set its digest"
        )
    if (config.run.cpus_per_actor or 0) >= kubernetes.cpus:
        raise ConfigError(
            f"run.cpus_per_actor {config.run.cpus_per_actor:g}: a worker has {kubernetes.cpus} CPUs and needs one for "
            "reading; raise kubernetes.cpus"
        )
    if 0 < kubernetes.gpus < (size := config.engine.tensor_parallel_size):
        raise ConfigError(
            f"kubernetes.gpus {kubernetes.gpus}: engine.tensor_parallel_size {size} needs as many in each worker pod; "
            "raise kubernetes.gpus"
        )
    for prefix, options in config.storage_options.items():
        if secrets_of(options):
            raise ConfigError(
                f"storage_options.{prefix}: contains a secret, which a manifest must not. Store it in a Kubernetes "
                "secret as environment variables, and reference that under envFrom in kubernetes.patch"
            )
    for key, path in config.urls.items():
        is_path = key in ("input.path", "output.path") or os.path.exists(os.path.expanduser(path))
        if is_path and not is_url(path) and not os.path.isabs(path):
            raise ConfigError(
                f"{key} {path}: is a relative path on this machine. Expected a url such as s3://bucket/folder, or an "
                "absolute path in the image or on a volume of kubernetes.patch"
            )


def _check_pods(output: str, *templates: dict[str, Any]) -> None:
    """Raise ConfigError for a patch that breaks a pod template, and for an output that is not on a shared disk."""
    for template in templates:
        spec = template.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        containers, volumes = spec.get("containers"), spec.get("volumes", [])
        if not (_is_list_of_objects(containers) and _is_list_of_objects(volumes)):
            raise ConfigError(
                "kubernetes.patch: leaves a pod without lists of containers and volumes. Expected, for example, "
                "pods: {spec: {containers: [{name: ray, env: [{name: NAME, value: VALUE}]}]}}"
            )
        shared = {volume.get("name") for volume in volumes if not _UNSHARED & volume.keys()}
        mounts = [mount for container in containers for mount in container.get("volumeMounts") or ()]
        folders = [str(mount.get("mountPath")).rstrip("/") for mount in mounts if mount.get("name") in shared]
        if not is_url(output) and not any(output == folder or output.startswith(f"{folder}/") for folder in folders):
            raise ConfigError(
                f"output.path {output}: is not on a disk that the pods share. Expected a url such as "
                "s3://bucket/folder, or a path on a volume of kubernetes.patch.pods"
            )


def _is_list_of_objects(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
