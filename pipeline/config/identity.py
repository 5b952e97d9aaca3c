"""The three classes that a job's keys fall into: identity, numerics, free.

*Identity* is what makes the output another output: resuming with a change there is refused. *Numerics* may
change a token by rounding. *Free* may change from run to run.
"""

from typing import Any

from pipeline.config.keys import JobKeys
from pipeline.stores.redaction import shown_url

_CUT = {"window_rows", "window_bytes", "unit_tokens", "unit_rows"}  # of `run`: what the parts are made of


def identity_of(job: JobKeys) -> dict[str, Any]:
    """What makes two jobs different jobs, by the job file alone: `job/planning/fingerprint.py` adds the digests
    of the input's files, of the model and of a chat template's file, and the date that a chat template is told.

    Paths are not in it: data copied elsewhere is the same data. Keys that are younger than the first outputs are in it
    only where they are on, so that jobs of earlier versions go on.
    """
    sampling = job.sampling.model_dump(mode="json", exclude={"seed", "defaults", "response_format"})
    optional = "repetition_detection", "structured_outputs", "prompt_logprobs", "reasoning", "thinking_token_budget"
    for name in optional:
        if sampling[name] is None:
            del sampling[name]
    if sampling["n"] == 1:
        del sampling["n"]
    return {
        "input": job.input.model_dump(mode="json", include={"columns", "limit"}) | _format(job),
        "prompt": _prompt_identity(job),
        "sampling": sampling,
        "seed": job.seed,
        "max_model_len": job.engine.max_model_len,
        "rename": dict(job.output.rename),
        "cut": job.run.model_dump(include=_CUT),
        **({"samples": "rows"} if job.output.samples == "rows" else {}),
        **_task_identity(job),
    }


def _task_identity(job: JobKeys) -> dict[str, Any]:
    if job.task == "generate":
        return {}
    return {"task": job.task, job.task: getattr(job, job.task).model_dump(mode="json")}


def _format(job: JobKeys) -> dict[str, str]:
    return {"format": job.input.format} if job.input.has_requests else {}


def _prompt_identity(job: JobKeys) -> dict[str, Any]:
    prompt = job.prompt.model_dump(mode="json", exclude={"chat": {"date", "template"}})
    if prompt["chat"] is not None and prompt["chat"]["continue_final_message"]:
        del prompt["chat"]["continue_final_message"]
    if prompt["special_tokens"] == "text":
        del prompt["special_tokens"]
    return prompt if prompt["defaults"] else {k: v for k, v in prompt.items() if k != "defaults"}


def numerics_of(job: JobKeys) -> dict[str, Any]:
    """What may change a token by rounding, as configured; the fingerprint has what `device: auto` became. Younger keys
    are in it only where they are on, as in `identity_of`."""
    numerics: dict[str, Any] = {
        "device": job.engine.device.partition(":")[0],
        "dtype": job.engine.dtype,
        "kv_cache_dtype": job.engine.kv_cache_dtype,
        "activation_dtype": job.engine.activation_dtype,
        "kernels": job.engine.kernels,
    }
    if job.engine.deterministic:
        numerics["deterministic"] = True
    wanted = job.model.quantization
    return numerics if wanted == "none" else numerics | {"quantization": wanted}


def free_of(job: JobKeys) -> dict[str, Any]:
    """What may change from run to run, without secrets: no storage options, no passwords in urls."""
    engine = job.engine.model_dump(exclude={"max_model_len", "seed", "deterministic", *numerics_of(job)})
    return {
        "name": job.name,
        "input": {"path": shown_url(job.input.path), "on_corrupt": job.input.on_corrupt},
        "model": job.model.model_dump(exclude={"storage", "quantization"})
        | {"path": shown_url(job.model.path), "draft": job.model.draft and shown_url(job.model.draft)},
        "engine": {"device": job.engine.device, **engine},
        "output": {"path": shown_url(job.output.path)},
        "run": job.run.model_dump(exclude=_CUT),
        "cost": job.cost.model_dump(),
        "targets": job.targets.limits(),
        "quality": job.quality.model_dump() | {"model": job.quality.model and shown_url(job.quality.model)},
    }
