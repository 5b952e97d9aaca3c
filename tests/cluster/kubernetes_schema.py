"""Check of a manifest, field by field, against `kubernetes_types.yaml`: unknown fields and wrong types are errors."""

import re
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

TYPES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("kubernetes_types.yaml").read_text())
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _type(text: str) -> dict[str, Any]:
    word, _, rest = text.partition(" ")
    if word == "list":
        return {"type": "array", "items": _type(rest)}
    if word == "map":
        return {"type": "object", "additionalProperties": _type(rest)}
    plain: dict[str, dict[str, Any]] = {
        "str": {"type": "string"}, "int": {"type": "integer"}, "bool": {"type": "boolean"}, "any": {},
    }  # fmt: skip
    return plain.get(word, {"$ref": f"#/$defs/{word}"})


DEFINITIONS = {
    name: {
        "type": "object",
        "additionalProperties": False,
        "properties": {field.rstrip("!"): _type(text) for field, text in fields.items()},
        "required": [field.rstrip("!") for field in fields if field.endswith("!")],
    }
    for name, fields in TYPES.items()
}
VALIDATORS = {
    name: Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": DEFINITIONS})
    for name, fields in TYPES.items()
    if "apiVersion" in fields
}


def wrong(made: dict[str, Any]) -> list[str]:
    """Return what Kubernetes or KubeRay would refuse of a manifest, each with its path."""
    kind, name = made["kind"], made["metadata"]["name"]
    found = [f"{error.json_path}: {error.message}" for error in VALIDATORS[kind].iter_errors(made)]
    if NAME.fullmatch(name) is None:
        found.append(f"metadata.name: {name}")
    if found:
        return found
    if kind == "RayJob":
        found += _rules(made["spec"], len(name) <= 47)
    return found


def _rules(job: dict[str, Any], short: bool) -> list[str]:
    """Return KubeRay's broken rules: its checks at admission and reconciliation, for the fields of our manifests."""
    cluster = job["rayClusterSpec"]
    rules = {
        "the name is short enough": short,
        "a deadline is positive": job.get("activeDeadlineSeconds", 1) > 0,
        "retries are not negative": job.get("backoffLimit", 0) >= 0,
        "a time to live needs the shutdown": job.get("shutdownAfterJobFinishes", False)
        or not job.get("ttlSecondsAfterFinished"),
        "a deletion strategy excludes the shutdown": "deletionStrategy" not in job
        or not job.get("shutdownAfterJobFinishes"),
        "the token has a mode": cluster.get("authOptions", {"mode": "token"}).get("mode") in ("token", "disabled"),
        "Kubernetes' own tokens are not for jobs": "enableK8sTokenAuth" not in cluster.get("authOptions", {}),
        "a submitter ends": job["submitterPodTemplate"]["spec"]["restartPolicy"] in ("Never", "OnFailure"),
        "groups have distinct names": len({g["groupName"] for g in cluster["workerGroupSpecs"]})
        == len(cluster["workerGroupSpecs"]),
    }
    for group in cluster["workerGroupSpecs"]:
        rules["replicas are in order"] = group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    return [rule for rule, holds in rules.items() if not holds]
