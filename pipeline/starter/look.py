"""Inspect a dataset and a model before there is a job: columns, the prompt column, the model's chat template, and the
tokens of the first prompts.

Reads only a model's small files, never its weights, and fetches them for a Hugging Face id.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from pipeline.checkpoints.file_checks import is_gguf
from pipeline.checkpoints.locate import checkpoint_problem, locate_model, model_kind
from pipeline.config import job_from_flags
from pipeline.data.columns import is_text
from pipeline.data.requests.input_checks import Requests
from pipeline.data.requests.openai_batch import OF_LINE
from pipeline.data.requests.request_row import PROMPT_COLUMN
from pipeline.data.source import Source, cut_windows, open_source, read_window
from pipeline.demo.reports import PROMPT_TEMPLATE
from pipeline.errors import InputError, ModelError
from pipeline.formatting import counted
from pipeline.job.planning.resolution import resolve_prompts
from pipeline.job.preview.dataset_tokens import read_samples
from pipeline.machine.caches import hub_folder
from pipeline.model.config import read_config
from pipeline.tokenization.tokenizer import Tokenizer

LOOKED_AT_ROWS = 200
_WINDOW_BYTES = 16 << 20
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
# Usual names of the prompt column, the most likely first.
PROMPT_NAMES = ("messages", "conversation", "turns", "prompt", "instruction", "question", "text", "content", "body",
                 "document", "input", "report")  # fmt: skip


@dataclass(frozen=True)
class Look:
    """Facts about a dataset and a model.

    lengths: tokens of the first rows' prompts, sorted; empty if the model could not be inspected, for the reason
    `skip_reason`. max_position: longest sequence that the model supports. is_demo: the embedded model on its own
    reports, whose prompt is the one that it was trained on. has_chat: whether to use the model's chat template for
    prompts.
    """

    columns: Mapping[str, str]  # name -> type
    num_rows: int
    num_files: int
    prompt: str  # name of the column
    kind: Literal["messages", "column", "template", "requests"]
    template: str = ""  # of the prompt, if `kind` is template
    keep: tuple[str, ...] = ()  # columns that identify rows
    is_demo: bool = False
    has_chat: bool = False
    lengths: tuple[int, ...] = ()
    max_position: int | None = None
    skip_reason: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)  # rows without a prompt, by RowError code
    requests: Requests | None = None  # if lines are requests


def look(path: str, model: str, log: Callable[[str], None]) -> Look:
    """Inspect a dataset and a model.

    Raises InputError for a missing dataset or one without text, ModelError for an unsupported model.
    """
    source = open_source(path)
    rows = _first_rows(source)
    if {*OF_LINE} <= {*source.schema.names}:
        source = open_source(path, kind="openai")
        rows = _first_rows(source)
    requests = source.requests
    prompt, kind = (PROMPT_COLUMN[requests.endpoint], "requests") if requests else _prompt_of(source, rows)
    keep = tuple(name for name in source.schema.names if name != prompt and _is_row_id(name, rows))
    columns = {f.name: str(f.type) for f in source.schema}
    is_demo = kind == "template" and prompt == "report" and model_kind(model) == "embedded"
    template = PROMPT_TEMPLATE if is_demo else "{" + prompt + "}"
    seen = Look(columns, source.num_rows, len(source.files), prompt, kind, template, keep, is_demo, requests=requests)
    files = counted(len(source.files), "file")
    found = f"the prompt is in {prompt!r}" if requests is None else "requests of OpenAI's Batch API"
    log(f"{path}: {counted(source.num_rows, 'row')} in {files}; {found}")
    folder, skip_reason = _small_files_of(model)
    if folder is None:
        log(f"{model}: not inspected: {skip_reason}")
        return Look(
            **{
                **vars(seen),
                "has_chat": prompt == "messages" or kind == "messages",
                "skip_reason": skip_reason,
            }
        )
    max_position = read_config(folder).max_position
    tokenizer = Tokenizer.from_folder(str(folder))
    try:
        has_chat = tokenizer.has_chat_template and not is_demo
        if kind == "messages" or (requests is not None and requests.endpoint == "chat"):
            tokenizer.check_chat_template()
        read = read_samples(resolve_prompts(_job(path, model, seen, has_chat), folder), tokenizer, max_tokens=1 << 40)
    finally:
        tokenizer.close()
    lengths = tuple(sorted(map(len, read.token_ids)))
    found = {"has_chat": has_chat, "lengths": lengths, "max_position": max_position, "left_out": read.left_out}
    return Look(**{**vars(seen), **found})


def _first_rows(source: Source) -> pa.Table:
    windows = cut_windows(source, LOOKED_AT_ROWS, _WINDOW_BYTES, LOOKED_AT_ROWS)
    if not windows:
        raise InputError(f"{source.root}: has no rows")
    return read_window(source, windows[0], source.schema.names)


def _prompt_of(source: Source, rows: pa.Table) -> tuple[str, Literal["messages", "column", "template"]]:
    """Choose the prompt column: a chat, or else a text, preferring usual names and then the longest values."""

    def rank(name: str) -> tuple[int, float]:
        known = PROMPT_NAMES.index(name.lower()) if name.lower() in PROMPT_NAMES else len(PROMPT_NAMES)
        return known, -_mean_length(rows, name)

    chats = [name for name in source.schema.names if _is_chat(rows, name)]
    if chats:
        return min(chats, key=rank), "messages"
    texts = [f.name for f in source.schema if is_text(f.type) and f.name not in source.partitions]
    if not texts:
        raise InputError(f"{source.root}: no text or chat column among {', '.join(source.schema.names)}")
    prompt = min(texts, key=rank)
    return prompt, "column" if prompt.lower() == "prompt" or not prompt.isidentifier() else "template"


def _is_chat(rows: pa.Table, name: str) -> bool:
    """Return whether the column holds lists of role and content, or such lists as JSON."""
    kind = rows.schema.field(name).type
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return {"role", "content"} <= {f.name for f in kind.value_type}
    values = [value for value in rows[name].to_pylist() if value is not None] if pa.types.is_string(kind) else []
    return bool(values) and all(_is_chat_json(value) for value in values)


def _is_chat_json(text: str) -> bool:
    if not text.lstrip().startswith("["):
        return False
    try:
        turns: Any = json.loads(text)
    except ValueError:
        return False
    return bool(turns) and all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns)


def _mean_length(rows: pa.Table, name: str) -> float:
    values = [value for value in rows[name].to_pylist() if value is not None]
    return sum(len(str(value)) for value in values) / max(1, len(values))


def _is_row_id(name: str, rows: pa.Table) -> bool:
    """Return whether a column is an identifier, by its name and unique values."""
    if not name.lower().endswith(("id", "key", "uuid", "url")):
        return False
    values = rows[name].to_pylist()
    return len(set(map(str, values))) == len(values)


def _small_files_of(model: str) -> tuple[Path | None, str]:
    """Return a folder with the model's config and tokenizer, or None and the reason."""
    kind = model_kind(model)
    if kind == "url" or (kind == "id" and is_gguf(model)):
        return None, "its files are downloaded when the job runs"
    if kind == "id":
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(model, allow_patterns=_SMALL_FILES, cache_dir=hub_folder())), ""
        except Exception as error:  # network, hub or cache; the job file can still be written
            return None, f"not found on Hugging Face, or no connection ({type(error).__name__})"
    folder = locate_model(model)
    if reason := checkpoint_problem(str(folder)):
        raise ModelError(f"{model}: {reason}")
    return folder, ""


def _job(path: str, model: str, seen: Look, has_chat: bool) -> Any:
    """Return a job on the first rows, to render and tokenize their prompts."""
    requests = seen.requests
    prompts = {
        "messages": ("prompt.messages", seen.prompt),
        "column": ("prompt.column", seen.prompt),
        "template": ("prompt.template", seen.template),
        "requests": ("input.format", "openai"),
    }
    key, value = prompts[seen.kind]
    flags: dict[str, tuple[Any, str]] = {
        "input.path": (path, "--input"),
        "input.limit": (LOOKED_AT_ROWS, "--input"),
        "model.path": (model, "--model"),
        "output.path": ("-", "--output"),
        key: (value, "--input"),
    }
    if requests is not None and requests.endpoint == "embedding":
        flags["task"] = ("embed", "--input")
    if has_chat and requests is None:
        flags["prompt.chat"] = ({}, "--model")
    return job_from_flags(flags)
