"""A job that runs by a clock: KubeRay's RayCronJob, or where it is older than 1.7 Kubernetes' own CronJob.

The moment of a firing reaches the job by name alone: both schedulers end a job's name in the minutes since 1970, and
the cluster's name is the job's with five letters more. So all tries of one firing find the same date, and a firing that
comes twice is one object.
"""

import json
import re
from typing import Any
from zoneinfo import ZoneInfo

from pipeline.cluster.kuberay.pods import labels, locked, one_off
from pipeline.cluster.kuberay.rayjob import API, metadata, spec
from pipeline.config import JobConfig
from pipeline.errors import ConfigError

MAX_CRON_NAME = 36  # of a RayCronJob: eleven characters of minutes follow
LATE_S = 3600  # a firing that the controller missed is made up for within this time
# Of the moment, in the shell that Ray starts the driver with: summarize-29400123-x7k2p -> @1764007380
FIRED_AT = ' --logical-date "@$(( $(echo "${RAY_CLUSTER_NAME%-*}" | sed "s/.*-//") * 60 ))"'
_FIELD = re.compile(r"(\*|[0-9A-Za-z]+(-[0-9A-Za-z]+)?)(/[0-9]+)?(,(\*|[0-9A-Za-z]+(-[0-9A-Za-z]+)?)(/[0-9]+)?)*")
_NAMED = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly")


def check_schedule(schedule: str, time_zone: str) -> None:
    """Raises ConfigError."""
    fields = schedule.split()
    if schedule not in _NAMED and not (len(fields) == 5 and all(_FIELD.fullmatch(field) for field in fields)):
        raise ConfigError(
            f"--schedule {schedule!r}: expected minute, hour, day, month and day of the week, such as '0 2 * * *'"
        )
    try:
        ZoneInfo(time_zone)
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"--time-zone {time_zone!r}: expected a name such as Europe/Berlin") from None


def ray_cron_job(config: JobConfig, name: str, schedule: str, time_zone: str) -> list[dict[str, Any]]:
    """For KubeRay 1.7 and newer, with its feature gate RayCronJob on."""
    given = {"schedule": schedule, "timeZone": time_zone, "jobTemplate": spec(config, name, FIRED_AT)}
    return [{"apiVersion": API, "kind": "RayCronJob", "metadata": metadata(config, name), "spec": given}]


def cron_job(config: JobConfig, name: str, schedule: str, time_zone: str) -> list[dict[str, Any]]:
    """For older operators: a CronJob whose pod makes the RayJob. While it is there, making it again does nothing.

    Raises ConfigError without cluster.kubectl_image.
    """
    if config.cluster.kubectl_image is None:
        raise ConfigError("cluster.kubectl_image: is missing. Older operators have no schedules: kubectl makes the job")
    account = f"{name}-scheduler"
    ray_job = {
        "apiVersion": API,
        "kind": "RayJob",
        "metadata": metadata(config, "@JOB@"),
        "spec": spec(config, name, FIRED_AT),
    }
    make = (
        'sed "s/@JOB@/$JOB/" /etc/rayjob/rayjob.json > /tmp/rayjob.json\n'
        'kubectl get rayjob "$JOB" 2> /dev/null || kubectl create -f /tmp/rayjob.json\n'
    )
    container = one_off(
        "create",
        config.cluster.kubectl_image,
        ["/bin/sh", "-c", make],
        env=[{"name": "JOB", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['job-name']"}}}],
        volumeMounts=[
            {"name": "rayjob", "mountPath": "/etc/rayjob", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    )
    pod = {
        **locked(),
        "automountServiceAccountToken": True,
        "serviceAccountName": account,
        "restartPolicy": "OnFailure",
        "containers": [container],
        "volumes": [
            {"name": "rayjob", "configMap": {"name": f"{name}-rayjob"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    template = {"metadata": {"labels": labels(name, "scheduler")}, "spec": pod}
    given = {
        "schedule": schedule,
        "timeZone": time_zone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": LATE_S,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        "jobTemplate": {"spec": {"backoffLimit": 3, "template": template}},
    }
    rbac = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["get", "create"]}]
    subject = {"kind": "ServiceAccount"} | metadata(config, account)
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(config, f"{name}-rayjob"),
            "data": {"rayjob.json": json.dumps(ray_job, indent=1)},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(config, account)},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata(config, account), "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(config, account),
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": account},
            "subjects": [subject],
        },
        {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": metadata(config, name), "spec": given},
    ]
