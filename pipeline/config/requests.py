"""Jobs whose input is a file of requests (`input.format: openai-batch` or another API's): the lines say what others'
job files say.

A job file of one has no `prompt`, or one with `chat` and `max_bytes` alone; its `sampling` is for lines that do not
give a value themselves. Which endpoint the lines are for is known once the input is read (`JobConfig.of_lines`); those
for embeddings are of jobs with `task: embed`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pipeline.config.sections.input import InputSection
from pipeline.config.sections.row.prompt import PromptSection
from pipeline.config.sections.row.sampling import SamplingSection
from pipeline.config.values import FromColumn
from pipeline.data.requests.request_row import CUSTOM_ID, ENCODING_FORMAT, PROMPT_COLUMN, Endpoint, RequestFormat

if TYPE_CHECKING:
    from pipeline.data.requests.input_checks import Requests

_OF_CHATS = {"temperature": 1.0, "max_tokens": 4096}
# What the API does where neither a line nor the job file says. A chat there goes on to the model's end; here a row is
# given room for max_tokens, so that there is a bound.
DEFAULTS: Mapping[RequestFormat, Mapping[Endpoint, dict[str, Any]]] = {
    "openai-batch": {"chat": _OF_CHATS, "text": {"temperature": 1.0, "max_tokens": 16}, "embedding": {}},
    "anthropic-batch": {"chat": _OF_CHATS},
    "bedrock-batch": {"chat": _OF_CHATS, "text": {"temperature": 0.5, "top_p": 0.9, "max_tokens": 512}},
}
FORMATS: tuple[RequestFormat, ...] = get_args(RequestFormat)
SOURCES = ("template", "column", "messages")  # of a prompt


def is_of_requests(raw: object) -> bool:
    """Whether a job file, before it is checked, is one of requests."""
    section = raw.get("input") if isinstance(raw, dict) else None
    return isinstance(section, dict) and section.get("format") not in (None, "columns")


def filled(raw: dict[str, Any]) -> dict[str, Any]:
    """A job file of requests with what its format says: the lines' chats or texts to embed, and of their columns
    custom_id. A prompt that names another source is left to be refused."""
    prompt, is_embed = raw.get("prompt") or {}, raw.get("task") == "embed"
    if isinstance(prompt, dict) and all(prompt.get(key) is None for key in SOURCES):
        if is_embed:
            prompt = {**prompt, "column": PROMPT_COLUMN["embedding"]}
        else:
            prompt = {**prompt, "messages": PROMPT_COLUMN["chat"], "chat": prompt.get("chat") or {}}
    kept = [CUSTOM_ID, ENCODING_FORMAT] if is_embed else [CUSTOM_ID]
    return {**raw, "input": {"columns": kept, **raw["input"]}, "prompt": prompt}


def contradiction(given: InputSection, prompt: object, sampling: SamplingSection) -> tuple[str, str] | None:
    """The key that a job file of requests must not have, and why. `prompt`: that section as it is written."""
    named = [key for key in (*SOURCES, "defaults") if isinstance(prompt, dict) and prompt.get(key) is not None]
    if named:
        return f"prompt.{named[0]}", f"the lines of input.format {given.format} are the prompts; leave it out"
    for name, value in sampling:
        if isinstance(value, FromColumn):
            why = f"the lines of input.format {given.format} give their own values; write one for those that give none"
            return f"sampling.{name}", why
    if CUSTOM_ID not in (given.columns or ()):
        return "input.columns", f"expected {CUSTOM_ID} among them, by which an answer is found"
    return None


def contradiction_of_lines(
    found: "Requests", task: str, dimensions: int | None, wants_chats: bool
) -> tuple[str, str] | None:
    """The key of a job file that the lines contradict, and why. dimensions: of the job's embeddings. wants_chats:
    whether the job file says how prompts become chats."""
    if (task == "embed") != (found.endpoint == "embedding"):
        use = "generate" if task == "embed" else "embed"
        return "task", f"{task}, but {found.place} is for {found.asks_for} ({found.endpoint_key}); use task: {use}"
    if wants_chats and found.endpoint != "chat":
        return "prompt.chat", f"the lines are for {found.asks_for}, which has no chats; leave it out"
    if None not in (dimensions, found.dimensions) and dimensions != found.dimensions:
        return "embed.dimensions", f"{dimensions}, but {found.place} has body.dimensions {found.dimensions}"
    return None


def equal_samples(sampling: SamplingSection, is_of_lines: bool) -> tuple[str, str] | None:
    """The key and the reason, where a job file's `n` gives equal texts in every row. A temperature that it does not
    name may be the model's, or that of the lines' API."""
    named = "temperature" in sampling.model_fields_set
    is_final = named or not (is_of_lines or sampling.defaults == "model")
    if is_final and isinstance(sampling.n, int) and sampling.n > 1 and sampling.temperature == 0:
        why = f"{sampling.n} with temperature 0 gives {sampling.n} equal texts; set sampling.temperature above 0"
        return "sampling.n", why
    return None


def prompt_of(endpoint: Endpoint, prompt: PromptSection) -> PromptSection:
    """Where the prompts of lines for this endpoint are."""
    column = PROMPT_COLUMN[endpoint]
    new: dict[str, Any] = (
        {"messages": column} if endpoint == "chat" else {"messages": None, "column": column, "chat": None}
    )
    return prompt.model_copy(update=new)


def sampling_of(
    form: RequestFormat, endpoint: Endpoint, sampling: SamplingSection, samples: bool, prompt_logprobs: bool
) -> SamplingSection:
    """The values for lines that give none, with the API's where the job file has none either. samples,
    prompt_logprobs: whether some lines ask for several completions, or for those of their prompts, so that the output
    has room for them; the job's own values are for those that do not say."""
    missing = {name: value for name, value in DEFAULTS[form][endpoint].items() if name not in sampling.model_fields_set}
    if samples and sampling.n == 1:
        missing["n"] = FromColumn("n")
    if prompt_logprobs and sampling.prompt_logprobs is None:
        missing["prompt_logprobs"] = FromColumn("prompt_logprobs")
    return sampling.model_copy(update=missing)
