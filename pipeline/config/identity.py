"""The three resume classes of a job's keys, by the mark of each field: identity, numerics, free.

Resuming an output is refused if a key of class *identity* changed. *Numerics* may change tokens by rounding. *Free* may
change from run to run.
"""

from typing import Any

from pydantic import BaseModel

from pipeline.config.keys import JobKeys
from pipeline.config.mistakes import model_of
from pipeline.data.source import IMAGE_WINDOW_BYTES, WINDOW_BYTES
from pipeline.data.units import CUT_VERSION, UNIT_TOKENS
from pipeline.stores.redaction import shown_url


def identity_of(job: JobKeys, only_set: bool = False) -> dict[str, Any]:
    """Return what identifies a job, from the job file alone. `job/planning/fingerprint.py` adds the digests of the
    input's files, the model and the chat template, and the date passed to a chat template.

    Paths are left out: data copied elsewhere is the same data. The version and the constants of the cut into windows
    and units are included, since parts of different cuts do not fit together. only_set: leave out values that equal
    their defaults, so that a key which a later version adds changes nothing where it is not set.
    """
    identity = _dump(job, "identity", only_set)
    identity.setdefault("sampling", {})["seed"] = job.seed
    if job.steps:  # never with their defaults, so that a key of a later version changes nothing
        identity["steps"] = [step.to_identity() for step in job.steps]
    return identity | {"cut": {"version": CUT_VERSION, "window_bytes": window_bytes(job), "unit_tokens": UNIT_TOKENS}}


def window_bytes(job: JobKeys) -> int:
    """Return the approximate maximum size of a window."""
    return IMAGE_WINDOW_BYTES if job.prompt.images else WINDOW_BYTES


def numerics_of(job: JobKeys, only_set: bool = False) -> dict[str, Any]:
    """Return the keys that may change tokens by rounding, as configured; the fingerprint resolves `device: auto`.
    only_set: as in `identity_of`."""
    numerics = _dump(job, "numerics", only_set)
    numerics.setdefault("engine", {})["device"] = job.engine.device.partition(":")[0]
    return numerics


def free_of(job: JobKeys) -> dict[str, Any]:
    """Return the keys that may change from run to run, without secrets: no storage options, no passwords in urls."""
    return _shown(_dump(job, "free", only_set=False))


def _dump(job: JobKeys, mark: str, only_set: bool) -> dict[str, Any]:
    """Return the keys with a mark. A key that was renamed keeps its first name in outputs: its serialization alias."""
    return job.model_dump(mode="json", include=_marked(type(job), mark), exclude_defaults=only_set, by_alias=True)


def _marked(section: type[BaseModel], mark: str) -> dict[str, Any]:
    """Return the fields with this mark, in the form of pydantic's `include`. In a nested section, such as
    `prompt.chat`, marks of the inner fields take precedence."""
    included: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        if name == "steps":
            continue  # `identity_of` adds them
        extra = field.json_schema_extra
        own = extra.get("resume", "free") if isinstance(extra, dict) else "free"
        inner = model_of(field.annotation)
        is_top = issubclass(section, JobKeys)
        if inner is not None and own != "hidden" and (is_top or _marked(inner, "identity")):
            if is_top or own in (mark, "free"):
                included[name] = _marked(inner, mark)
        elif own == mark:
            included[name] = True
    return {name: found for name, found in included.items() if found}


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items()}
    return shown_url(value) if isinstance(value, str) else value
