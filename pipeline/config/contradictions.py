"""Keys of a job file that contradict each other: what says nothing with the job's task, or beside lines of requests.

Owns these rules twice: as checks with their reasons, and in JSON Schema, for editors. What must agree within a section
is checked there.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config.keys import JobKeys
from pipeline.config.requests import SOURCES
from pipeline.config.sections.engine import SpeculationSection
from pipeline.config.sections.row.tasks import SECTIONS
from pipeline.config.values import FromColumn
from pipeline.data.requests.request_row import CUSTOM_ID, FORMAT

if TYPE_CHECKING:
    from pipeline.data.requests.input_checks import Requests

Contradiction = tuple[str, str]  # a dotted key, and why it cannot stay as it is
_OF_COMPLETIONS = ("max_usd_per_1m_generated", "min_generated_per_s")  # of `targets`


def contradictions(job: JobKeys, written: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Keys that say nothing beside others, or are missing. written: the job file, before anything was filled in."""
    for name in SECTIONS:
        if name in written and job.task != name:
            yield name, f"task is {job.task}; write task: {name}, or leave it out"
    if job.input.has_requests:
        yield from _beside_requests(job, written.get("prompt"))
    if job.task == "generate":
        yield from _equal_samples(job)
    else:
        yield from _of_task(job)


def _of_task(job: JobKeys) -> Iterator[Contradiction]:
    """Of a task that generates nothing."""
    if job.task == "choice" and not job.choice.labels:
        yield "choice.labels", "required by task choice, but not there"
    nothing = f"says nothing with task {job.task}, which generates no text; leave it out"
    for name in sorted(job.sampling.model_fields_set):
        yield f"sampling.{name}", nothing
    if job.input.has_requests and job.task != "embed":
        why = f"the lines of {job.input.format} ask for completions or embeddings; use task generate or embed"
        yield "input.format", why
    if job.model.draft is not None:
        yield "model.draft", nothing
    if "samples" in job.output.model_fields_set:
        yield "output.samples", nothing
    if isinstance(job.engine.speculation, SpeculationSection):
        yield "engine.speculation", nothing
    if job.run.quality_sample > 0:
        yield "run.quality_sample", f"compares completions; leave it out with task {job.task}"
    for name in _OF_COMPLETIONS:
        if getattr(job.targets, name) is not None:
            yield f"targets.{name}", nothing


def _beside_requests(job: JobKeys, prompt: object) -> Iterator[Contradiction]:
    """Of a job whose lines are requests. prompt: that section as it is written."""
    lines = f"the lines of input.format {job.input.format}"
    for key in (*SOURCES, "defaults"):
        if isinstance(prompt, dict) and prompt.get(key) is not None:
            yield f"prompt.{key}", f"{lines} are the prompts; leave it out"
    if job.task == "generate":
        for name, value in job.sampling:
            if isinstance(value, FromColumn):
                why = f"{lines} give their own values; write one for those that give none"
                yield f"sampling.{name}", why
    if CUSTOM_ID not in (job.input.columns or ()):
        yield "input.columns", f"expected {CUSTOM_ID} among them, by which an answer is found"


def _equal_samples(job: JobKeys) -> Iterator[Contradiction]:
    """Where `n` gives equal texts in every row. A temperature that the job does not name may be the model's, or that of
    the lines' API."""
    sampling = job.sampling
    named = "temperature" in sampling.model_fields_set
    is_final = named or (not job.input.has_requests and sampling.defaults != "model")
    if is_final and isinstance(sampling.n, int) and sampling.n > 1 and sampling.temperature == 0:
        why = f"{sampling.n} with temperature 0 gives {sampling.n} equal texts; set sampling.temperature above 0"
        yield "sampling.n", why


def contradiction_of_lines(job: JobKeys, found: "Requests", wants_chats: bool) -> Contradiction | None:
    """The key that the input's lines contradict, once they are read. wants_chats: whether the job file says how prompts
    become chats."""
    task, dimensions = job.task, job.embed.dimensions
    if (task == "embed") != (found.endpoint == "embedding"):
        use = "generate" if task == "embed" else "embed"
        return "task", f"{task}, but {found.place} is for {found.url}; use task: {use}"
    if wants_chats and found.endpoint != "chat":
        return "prompt.chat", f"the lines are for {found.url}, which has no chats; leave it out"
    if None not in (dimensions, found.dimensions) and dimensions != found.dimensions:
        return "embed.dimensions", f"{dimensions}, but {found.place} has body.dimensions {found.dimensions}"
    return None


def say_for_editors(schema: dict[str, Any]) -> None:
    """Add the rules that JSON Schema can hold to a job file's schema, in place: a job has a prompt from one source, or
    lines that say it; a section has its task, labels are there, and other tasks take no sampling."""
    of_requests = {"properties": {"format": {"const": FORMAT}}, "required": ["format"]}
    one_source = {"oneOf": [{"required": [key], "properties": {key: {"type": "string"}}} for key in SOURCES]}
    no_source = {"not": {"anyOf": [{"required": [key]} for key in (*SOURCES, "defaults")]}}
    schema["if"] = {"properties": {"input": of_requests}, "required": ["input"]}
    schema["then"] = {"properties": {"prompt": no_source}}
    schema["else"] = {"required": ["prompt"], "properties": {"prompt": one_source}}
    schema["required"] = [name for name in schema["required"] if name != "prompt"]
    labels = {"properties": {"choice": {"required": ["labels"]}}, "required": ["choice"]}
    schema["allOf"] = [
        *({"if": {"required": [name]}, "then": _is_task(name)} for name in SECTIONS),
        {"if": _is_task("choice"), "then": labels},
        {"if": _is_task(*SECTIONS), "then": {"properties": {"sampling": {"maxProperties": 0}}}},
    ]


def _is_task(*names: str) -> dict[str, Any]:
    return {"properties": {"task": {"enum": list(names)}}, "required": ["task"]}
