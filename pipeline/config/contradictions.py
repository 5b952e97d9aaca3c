"""Checks between keys of a job file: keys without effect under the job's task or with lines of requests.

Also adds the rules that JSON Schema can express to the schema for editors. Checks within a section are in that section.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.config.keys import JobKeys
from pipeline.config.requests import FROM_LINES
from pipeline.config.sections.prompt import SOURCES
from pipeline.config.sections.server import ServerSection
from pipeline.config.sections.steps import DRAFT, StepSection
from pipeline.config.sections.task import KEYS_OF, TaskSection
from pipeline.config.values import FromColumn
from pipeline.data.requests.request_row import CUSTOM_ID
from pipeline.stores.filesystem import storage_prefix
from pipeline.stores.redaction import shown_url

if TYPE_CHECKING:
    from pipeline.data.requests.input_checks import Requests

Contradiction = tuple[str, str]  # a dotted key, and the reason
OF_JOB_ALONE = ("n", "seed", "generation_config", "logprobs", "prompt_logprobs")  # keys of `sampling`


def contradictions(job: JobKeys, written: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Yield keys that are missing or have no effect because of others. written: the job file without defaults."""
    yield from _check_storage(job)
    yield from _check_task(job.task, "")
    if job.input.has_requests:
        yield from _with_requests(job, written.get("prompt"))
    if job.input.format == "pdf" and job.prompt.images != ("page",):
        yield "prompt.images", "required by input.format pdf: write images: [page]"
    yield from _check_adapters(job)
    yield from _check_ranks(job)
    if job.server is not None:
        yield from _with_server(job, job.server)
    elif job.prompt.images:
        yield "prompt.images", "needs a server; our own engine reads only text"
    elif job.images.model_fields_set:
        yield "images", "has no effect without a server; remove it"
    elif job.cost.usd_per_million is not None:
        yield "cost.usd_per_million", "needs a server; the price of our engine is hourly_usd"
    if job.prompt.continues_chat:
        yield "prompt.continues_chat", "has no effect in the first prompt; remove it"
    if job.steps:
        yield from _with_steps(job)
    if job.task.type == "generate":
        yield from _equal_samples(job)
    else:
        yield from _without_completions(job)


def _check_task(task: TaskSection, at: str) -> Iterator[Contradiction]:
    """Check a section `task`. at: begin of its key."""
    for key in sorted(task.model_fields_set - {"type", *KEYS_OF[task.type]}):
        owner = next(name for name, keys in KEYS_OF.items() if key in keys)
        yield f"{at}task.{key}", f"has no effect with task {task.type}; write type: {owner}, or remove it"
    if task.type == "choice" and not task.labels:
        yield f"{at}task.labels", "required by task choice, but missing"


def _check_storage(job: JobKeys) -> Iterator[Contradiction]:
    used = {storage_prefix(url, job.storage_options) for url in job.urls.values()}
    for prefix in job.storage_options.keys() - used:
        urls = ", ".join(f"{key} {url!r}" for key, url in job.urls.items())
        reason = f"matches no path of this job; expected the beginning of one of: {shown_url(urls)}"
        yield f"storage_options.{shown_url(prefix)}", reason


def _check_adapters(job: JobKeys) -> Iterator[Contradiction]:
    adapter, names = job.model.adapter, ", ".join(job.model.adapters)
    if adapter is None and names and not any(step.adapter for step in job.steps):
        yield "model.adapters", "has no effect without model.adapter, the name of one of them or {column: name}"
    elif adapter is not None and not names:
        yield "model.adapter", "needs model.adapters, which maps names to folders"
    elif isinstance(adapter, str) and adapter not in job.model.adapters:
        yield "model.adapter", f"{adapter!r} is not in model.adapters; expected one of {names}"
    for i, step in enumerate(job.steps):
        if step.adapter is not None and step.adapter not in job.model.adapters:
            reason = f"{step.adapter!r} is not in model.adapters; expected one of {names or 'its names'}"
            yield f"steps[{i}].adapter", reason
    if job.model.adapters and job.engine.deterministic:
        yield "engine.deterministic", "is not supported with model.adapters, whose products are not batch-invariant"


def _check_ranks(job: JobKeys) -> Iterator[Contradiction]:
    size, gpus = job.engine.tensor_parallel_size, job.run.gpus_per_actor
    if size > 1 and gpus is not None and job.engine.device != "cpu" and 0 < gpus < size:
        yield "run.gpus_per_actor", f"{gpus:g}: engine.tensor_parallel_size {size} needs as many; remove the key"


def _without_completions(job: JobKeys) -> Iterator[Contradiction]:
    """Check a task that generates no text."""
    task = job.task.type
    unused = f"has no effect with task {task}, which generates no text; remove it"
    for name in sorted(job.sampling.model_fields_set):
        yield f"sampling.{name}", unused
    if job.input.has_requests and task != "embed":
        reason = "the lines of format openai are requests for completions or embeddings; use task generate or embed"
        yield "input.format", reason
    if "samples_as" in job.output.model_fields_set:
        yield "output.samples_as", unused
    if job.speculation.method not in ("auto", "off"):
        yield "speculation", unused
    if job.quality.sample > 0:
        yield "quality.sample", f"compares completions; remove it for task {task}"


def _with_requests(job: JobKeys, prompt: object) -> Iterator[Contradiction]:
    """Check a job whose input lines are requests. prompt: that section of the job file."""
    lines = f"the lines of input.format {job.input.format}"
    for key in FROM_LINES:
        if isinstance(prompt, dict) and prompt.get(key) is not None:
            yield f"prompt.{key}", f"{lines} are the prompts; remove it"
    if job.task.type == "generate":
        for name, value in job.sampling:
            if isinstance(value, FromColumn):
                yield f"sampling.{name}", f"{lines} set their own values; write one value for lines that set none"
    for key, condition in (("input.when", job.input.when), ("output.accept", job.output.accept)):
        if condition is not None:
            yield key, f"{lines} are requests, each of which needs its answer; remove it"
    if CUSTOM_ID not in (job.input.columns or ()):
        yield "input.columns", f"must include {CUSTOM_ID}, which identifies each answer"


def _with_server(job: JobKeys, server: ServerSection) -> Iterator[Contradiction]:
    """Check a job whose rows a server computes."""
    unused = "has no effect with a server; give the server its own options, and remove it"
    for name in sorted(job.engine.model_fields_set - {"max_num_seqs"}):
        yield f"engine.{name}", unused
    for name in sorted(job.speculation.model_fields_set):
        yield f"speculation.{name}", unused
    if job.model.quantization != "none":
        yield "model.quantization", unused
    if job.model.adapters:
        yield "model.adapters", "is not supported with a server; name the server's adapter as server.model"
    if job.task.type not in ("generate", "embed"):
        yield "task.type", f"{job.task.type} is not supported with a server; expected generate or embed"
    for name in ("pooling", "normalize"):
        if name in job.task.model_fields_set:
            yield f"task.{name}", unused
    if job.task.type == "embed" and (job.prompt.messages is not None or job.prompt.chat is not None):
        key = "messages" if job.prompt.messages is not None else "images" if job.prompt.images else "chat"
        yield f"prompt.{key}", "is not supported with a server and task embed, which sends texts; use template"
    if job.task.type == "embed" and job.task.dimensions is None:
        yield "task.dimensions", "required with a server: the length of the server's vectors"
    if job.sampling.prompt_logprobs is not None:
        yield "sampling.prompt_logprobs", "is not supported with a server; remove it"
    if job.sampling.generation_config == "model":
        yield "sampling.generation_config", "model needs the checkpoint, which the server has; write the values"
    if job.quality.sample > 0:
        yield "quality.sample", "is not supported with a server; remove it"
    if job.prompt.chat is not None and job.prompt.chat.chat_template is not None:
        yield "prompt.chat.chat_template", unused
    if server.base_url is not None and job.run.actors != 1:
        yield "run.actors", "must be 1 with server.base_url: one engine keeps all servers busy"


def _with_steps(job: JobKeys) -> Iterator[Contradiction]:
    """Check the steps, and that the first prompt can be followed by any."""
    yield from of_several_requests(job, "steps")
    names = [step.name for step in job.steps]
    for i, step in enumerate(job.steps):
        at = f"steps[{i}]."
        if step.name in names[:i]:
            yield f"{at}name", f"{step.name!r} is the name of two steps"
        if step.name == DRAFT:
            yield f"{at}name", "is the name of the latest text in prompts; choose another name"
        if step.repeat is not None and step.repeat.from_step not in names[: i + 1]:
            reason = f"{step.repeat.from_step!r}: expected this step or an earlier one: {', '.join(names[: i + 1])}"
            yield f"{at}repeat.from", reason
        yield from _of_step(job, step, at)


def of_several_requests(job: JobKeys, source: str) -> Iterator[Contradiction]:
    """Check a job whose rows have several requests. source: their key."""
    if job.task.type != "generate":
        yield source, f"the first prompt must generate text, and the job's task is {job.task.type}"
    if job.input.has_requests:
        yield source, f"not supported with input.format {job.input.format}, whose lines are the prompts"
    if isinstance(job.sampling.n, FromColumn) or job.sampling.n != 1:
        yield "sampling.n", f"must be 1 with {source}: a row continues one answer"


def _of_step(job: JobKeys, step: StepSection, at: str) -> Iterator[Contradiction]:
    """Check one step. at: begin of its keys."""
    task, prompt = step.task, step.prompt
    yield from _check_task(task, at)
    if task.type not in ("generate", "choice", "score"):
        yield f"{at}task.type", f"{task.type} is not supported in a step; expected generate, choice or score"
    elif job.server is not None and task.type != "generate":
        yield f"{at}task.type", f"{task.type} is not supported with a server; expected generate"
    for name, value in step.sampling:
        if name not in step.sampling.model_fields_set:
            continue
        if task.type != "generate":
            yield f"{at}sampling.{name}", f"has no effect with task {task.type}, which generates no text; remove it"
        elif name in OF_JOB_ALONE:
            yield f"{at}sampling.{name}", "is not supported in a step; it belongs to the job's sampling"
        elif isinstance(value, FromColumn):
            yield f"{at}sampling.{name}", "is not supported in a step as {column: name}; write one value"
    if step.replaces is not None and task.type != "generate":
        yield f"{at}replaces", f"needs task generate; task {task.type} has no text"
    if step.vote is not None and (task.type != "generate" or step.sampling.temperature == 0):
        yield f"{at}vote", "needs task generate and sampling.temperature above 0; else all samples are equal"
    if prompt.images:
        yield f"{at}prompt.images", "are not supported in a step; the first prompt may have images"
    if prompt.chat is not None and job.prompt.chat is None:
        yield f"{at}prompt.chat", "needs prompt.chat in the job: either all prompts of a row are chats, or none is"
    if prompt.chat is not None and prompt.chat.chat_template is not None:
        yield f"{at}prompt.chat.chat_template", "is not supported in a step; all prompts use that of prompt.chat"
    if prompt.chat is not None and prompt.chat.date is not None:
        yield f"{at}prompt.chat.date", "is not supported in a step; all prompts use that of prompt.chat"
    if prompt.special_tokens == "template" and job.prompt.chat is not None:
        yield f"{at}prompt.special_tokens", "template needs a prompt that is sent as plain text; the job's is a chat"
    if prompt.continues_chat:
        if job.prompt.chat is None:
            yield f"{at}prompt.continues_chat", "needs prompt.chat in the job, which starts the chat"
        if prompt.messages is not None or prompt.chat is not None:
            yield f"{at}prompt.continues_chat", "needs prompt.template or prompt.column, and the job's chat options"
        if job.prompt.images:
            yield f"{at}prompt.continues_chat", "is not supported after a prompt with images"


def _equal_samples(job: JobKeys) -> Iterator[Contradiction]:
    """Refuse `n` above 1 at temperature 0, which gives equal texts. A temperature that the job leaves open may come
    from the model or from the lines."""
    sampling = job.sampling
    named = "temperature" in sampling.model_fields_set
    is_final = named or (not job.input.has_requests and sampling.generation_config != "model")
    if is_final and isinstance(sampling.n, int) and sampling.n > 1 and sampling.temperature == 0:
        reason = f"{sampling.n} with temperature 0 gives {sampling.n} equal texts; set sampling.temperature above 0"
        yield "sampling.n", reason


def contradiction_of_lines(job: JobKeys, found: "Requests", wants_chats: bool) -> Contradiction | None:
    """Return the key that contradicts the input's lines, if any. wants_chats: whether the job file sets prompt.chat."""
    task, dimensions = job.task.type, job.task.dimensions
    if (task == "embed") != (found.endpoint == "embedding"):
        use = "generate" if task == "embed" else "embed"
        return "task.type", f"{task}, but {found.first_line} is for {found.url}; use task: {use}"
    if wants_chats and found.endpoint != "chat":
        return "prompt.chat", f"the lines are for {found.url}, which has no chats; remove it"
    if None not in (dimensions, found.dimensions) and dimensions != found.dimensions:
        return "task.dimensions", f"{dimensions}, but {found.first_line} has body.dimensions {found.dimensions}"
    return None


def rules_for_editors(schema: dict[str, Any]) -> None:
    """Add the rules that JSON Schema can express to a job file's schema, in place: one source of prompts, none with
    requests, no sampling for tasks without completions, and a model unless a server has it."""
    of_requests = {"properties": {"format": {"const": "openai"}}, "required": ["format"]}
    one_source = {"oneOf": [{"required": [key], "properties": {key: {"type": "string"}}} for key in SOURCES]}
    no_source = {"not": {"anyOf": [{"required": [key]} for key in FROM_LINES]}}
    schema["if"] = {"properties": {"input": of_requests}, "required": ["input"]}
    schema["then"] = {"properties": {"prompt": no_source}}
    schema["else"] = {"required": ["prompt"], "properties": {"prompt": one_source}}
    schema["required"] = [name for name in schema["required"] if name not in ("prompt", "model")]
    others = [name for name in KEYS_OF if name != "generate"]
    is_other = {"anyOf": [{"enum": others}, {"properties": {"type": {"enum": others}}, "required": ["type"]}]}
    schema["allOf"] = [
        {
            "if": {"properties": {"task": is_other}, "required": ["task"]},
            "then": {"properties": {"sampling": {"maxProperties": 0}}},
        },
        {"if": {"properties": {"server": {"type": "object"}}, "required": ["server"]}, "else": {"required": ["model"]}},
    ]
