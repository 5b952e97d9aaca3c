"""The three classes that a job's keys fall into, by the mark of each field: identity, numerics, free.

*Identity* is what makes the output another output: resuming with a change there is refused. *Numerics* may change a
token by rounding. *Free* may change from run to run.
"""

from typing import Any

from pydantic import BaseModel

from pipeline.config.keys import JobKeys
from pipeline.config.mistakes import model_of
from pipeline.data.source import WINDOW_BYTES
from pipeline.data.units import UNIT_TOKENS
from pipeline.stores.redaction import shown_url


def identity_of(job: JobKeys) -> dict[str, Any]:
    """What makes two jobs different jobs, by the job file alone: `job/planning/fingerprint.py` adds the digests
    of the input's files, of the model and of a chat template's file, and the date that a chat template receives.

    Paths are not in it: data copied elsewhere is the same data. The constants by which windows and units are cut are,
    since parts of two cuts do not fit together.
    """
    identity = job.model_dump(mode="json", include=_marked(JobKeys, "identity"))
    identity["sampling"]["seed"] = job.seed
    return identity | {"cut": {"window_bytes": WINDOW_BYTES, "unit_tokens": UNIT_TOKENS}}


def numerics_of(job: JobKeys) -> dict[str, Any]:
    """What may change a token by rounding, as configured; the fingerprint has what `device: auto` became."""
    numerics = job.model_dump(mode="json", include=_marked(JobKeys, "numerics"))
    numerics["engine"]["device"] = job.engine.device.partition(":")[0]
    return numerics


def free_of(job: JobKeys) -> dict[str, Any]:
    """What may change from run to run, without secrets: no storage options, no passwords in urls."""
    return _shown(job.model_dump(mode="json", include=_marked(JobKeys, "free")))


def _marked(section: type[BaseModel], mark: str) -> dict[str, Any]:
    """The fields with this mark, as pydantic's `include`. The mark of a section in a section is that of its own fields
    where they have one (`prompt.chat`)."""
    included: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        extra = field.json_schema_extra
        own = extra.get("resume", "free") if isinstance(extra, dict) else "free"
        inner = model_of(field.annotation)
        if inner is not None and own != "hidden" and (section is JobKeys or _marked(inner, "identity")):
            if section is JobKeys or own == mark:
                included[name] = _marked(inner, mark)
        elif own == mark:
            included[name] = True
    return {name: found for name, found in included.items() if found}


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items()}
    return shown_url(value) if isinstance(value, str) else value
