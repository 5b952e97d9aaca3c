"""Create a file's RayJob under a name, from a pod: `python -m pipeline.cluster.create_ray_job FILE NAME`.

The CronJob of `pipeline manifests --schedule` runs it in the job's own image. An existing RayJob of that name belongs
to the same scheduled run, whose pod was started twice.
"""

import json
import os
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import yaml

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts a pod's credentials
TIMEOUT_S = 30


def create(ray_job: dict[str, Any], server: str, account: Path = ACCOUNT) -> bool:
    """Create a RayJob through the Kubernetes API of `server`, https://HOST:PORT. Returns False if its name exists.

    Raises HTTPError when Kubernetes rejects it, such as for an unknown field.
    """
    namespace = (account / "namespace").read_text().strip()
    request = Request(
        f"{server}/apis/{ray_job['apiVersion']}/namespaces/{namespace}/rayjobs?fieldValidation=Strict",
        data=json.dumps(ray_job).encode(),
        headers={
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    try:
        with urlopen(request, timeout=TIMEOUT_S, context=trusted):
            return True
    except HTTPError as error:
        answer = error.read()
        if error.code == 409 and json.loads(answer).get("reason") == "AlreadyExists":
            return False
        error.msg = f"{error.msg}: {answer.decode(errors='replace')}"
        raise


def main() -> None:
    file, name = sys.argv[1:]
    ray_job = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    ray_job["metadata"]["name"] = name
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    print(f"RayJob {name}", "was created" if create(ray_job, server) else "already exists", flush=True)


if __name__ == "__main__":
    main()
