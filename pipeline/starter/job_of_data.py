"""A job of flags instead of a file: `pipeline run DATA --prompt TEXT --model NAME`."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.checkpoints.chat_template import has_template
from pipeline.checkpoints.locate import model_kind, resolve_tokenizer
from pipeline.config import JobConfig
from pipeline.config.identity import identity_of
from pipeline.config.jobfile import parse_value
from pipeline.config.load import load_job, of_flags
from pipeline.data.prompt_template import in_template
from pipeline.data.requests.openai_batch import OF_LINE
from pipeline.data.source import open_source
from pipeline.errors import ConfigError
from pipeline.starter.look import PROMPT_NAMES
from pipeline.stores.redaction import shown_url
from pipeline.stores.retries import RetryCounts

# flag -> key of a job file; the other flags need more than a copy
KEYS = {
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "schema": "sampling.structured_outputs.json_file",
    "budget": "cost.budget_usd",
    "hourly_price": "cost.hourly_usd",
    "output": "output.path",
}

Values = dict[str, tuple[Any, str]]  # key of a job file -> its value, and the flag for messages


def job_of_data(data: str, flags: Mapping[str, Any], log: Callable[[str], None], **overlays: Any) -> JobConfig:
    """Return the job that computes `data`, the path of an input.

    flags: those of `cli/data_flags.py` by name; None if not given. log: called with progress messages. overlays: of
    `load_job`. Without an output the folder is named after the data and a digest of what the job computes, so that the
    same flags resume it. Raises JobFileError with every mistake, by flag, and ConfigError if there is no model or no
    prompt.
    """
    model, url = flags["model"], flags["url"]
    if model is None and url is None:
        raise ConfigError(
            "--model: expected a folder, a GGUF file, a Hugging Face id such as Qwen/Qwen3-4B, or demo:target-awq, the "
            "embedded demonstration; or the address of a server as --url"
        )
    values: Values = {"input.path": (data, "DATA"), "name": (_name_of(data), "DATA")}
    values |= _prompt(data, flags["prompt"])
    if url is None:
        values["model.path"] = (model, "--model")
    else:
        values["server"] = ({"base_url": url} | ({} if model is None else {"model": model}), "--url")
    if flags["system"] is not None:
        values["prompt.chat"] = ({"system": flags["system"]}, "--system")
    elif flags["chat"] or (flags["chat"] is None and _is_chat(values, model, url, log)):
        values["prompt.chat"] = ({}, "--chat")
    if flags["labels"] is not None:
        labels = [label.strip() for label in flags["labels"].split(",")]
        if url is None:
            values["task"] = ({"type": "choice", "labels": labels}, "--labels")
        else:  # servers do not score labels
            values["sampling.structured_outputs.choice"] = (labels, "--labels")
            values["output.rename"] = ({"generated_text": "label"}, "--labels")
    if flags["token_price"] is not None:
        prompt, _, generated = flags["token_price"].partition("/")
        prices = {"input": parse_value(prompt, "--token-price"), "output": parse_value(generated, "--token-price")}
        values["cost.usd_per_million"] = (prices, "--token-price")
    for name, key in KEYS.items():
        if flags[name] is not None:
            values[key] = (flags[name], f"--{name.replace('_', '-')}")
    if flags["output"] is None:
        job = load_job(of_flags(values | {"output.path": ("out", "DATA")}), **overlays)
        # without the version of the cut: a folder of another version is refused, and not computed again elsewhere
        keys = {name: part for name, part in identity_of(job, only_set=True).items() if part and name != "cut"}
        digest = hashlib.sha256(json.dumps([keys, data, model, url], sort_keys=True).encode()).hexdigest()[:8]
        values["output.path"] = (f"out/{_name_of(data)}-{digest}", "DATA")
    return load_job(of_flags(values), **overlays)


def _prompt(data: str, prompt: str | None) -> Values:
    """Return the keys that make prompts: the template, or else what the input's columns leave no doubt about."""
    if prompt is not None:
        return {"prompt.template": (prompt, "--prompt")}
    names = open_source(data).schema.names
    if {*OF_LINE} <= {*names}:  # requests of OpenAI's Batch API
        return {"input.format": ("openai", "DATA")}
    for key, name in (("messages", "messages"), ("column", "prompt")):
        if name in names:
            return {f"prompt.{key}": (name, "DATA")}
    usual = [name for name in names if name.lower() in PROMPT_NAMES]
    example = in_template((usual or names)[0]) if names else "text"
    raise ConfigError(
        f"--prompt: expected a template over the columns of {shown_url(data)} ({', '.join(names)}), such as --prompt "
        f'"Summarize: {{{example}}}"'
    )


def _is_chat(values: Values, model: str | None, url: str | None, log: Callable[[str], None]) -> bool:
    """Return whether texts are sent as a user's turn. The embedded models were trained on plain text."""
    if not {"prompt.template", "prompt.column"} & {*values}:
        return False
    if url is not None or model is None:
        return True
    return model_kind(model) != "embedded" and has_template(resolve_tokenizer(model, {}, RetryCounts(), None, log))


def _name_of(data: str) -> str:
    """Return the last part of a path that is no pattern, without endings and revision, as a name for a folder."""
    parts = data.rpartition("://")[2].rstrip("/").split("/")
    named = [part for part in parts if not any(char in part for char in "*?[")]
    stem = re.split("[.@]", named[-1])[0] if named else ""
    return re.sub(r"[^\w-]+", "-", stem).strip("-") or "data"
