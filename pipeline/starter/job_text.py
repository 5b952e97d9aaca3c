"""The text of a first job file: every key that a job needs, with what was found as comments, and the next choices."""

import json
from pathlib import Path

import yaml

from pipeline.checkpoints.locate import model_kind
from pipeline.config.requests import DEFAULTS
from pipeline.config.schema import FILE_NAME, schema_text
from pipeline.errors import ConfigError
from pipeline.formatting import counted
from pipeline.starter.look import Look

MAX_TOKENS = 256
LENGTH_STEP = 256  # of max_model_len


def job_text(name: str, place: str, model: str, output: str, seen: Look) -> str:
    """A job file that `pipeline validate` takes."""
    lines = [
        f"# yaml-language-server: $schema={FILE_NAME}",
        "# Written by `pipeline init`. An editor that knows the line above explains each key and what else there is.",
        "",
        f"name: {_text(name)}",
        "",
        "input:",
        f"  path: {_text(place)}",
        *_input(seen),
        "",
        *(["prompt:", *_prompt(seen, model_kind(model) == "embedded"), ""] if seen.requests is None else []),
        "model:",
        f"  path: {_text(model)}",
        *([f"  # It was not looked at: {_comment(seen.why_not)}."] if seen.why_not else []),
        "",
        *_limits(seen),
        "",
        "output:",
        f"  path: {_text(output)}",
        *(["  # rename: {generated_text: answer}"] if not _is_embed(seen) else []),
        "",
        "run:",
        "  max_error_rate: 0.01         # a larger share of error rows stops the job, resumably",
        "",
        "# cost:",
        "#   hourly_usd: 2.50           # what the machine costs for an hour; the report then tells what a row cost",
    ]
    return "\n".join(lines) + "\n"


def write_job(path: str, text: str) -> bool:
    """Write the job file, and beside it the schema that editors look for; True where that was not there yet. Neither
    replaces a file. Raises ConfigError."""
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: is there already, and is not replaced; give another name") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with open(place.with_name(FILE_NAME), "x", encoding="utf-8") as file:
            file.write(schema_text() + "\n")
    except OSError:  # it is there, or the folder is full: editors miss it, jobs do not
        return False
    return True


def _input(seen: Look) -> list[str]:
    found = f"  # {counted(seen.num_files, 'file')}, {counted(seen.num_rows, 'row')}"
    if seen.requests is not None:
        own = "" if _is_embed(seen) else " and sampling values"
        model = _comment(f" for {seen.requests.model!r}" if seen.requests.model else "")
        return [
            f"  format: openai               # each line has its own prompt{own}",
            f"{found}: requests{model}; custom_id is kept",
        ]
    columns = ", ".join(f"{column} ({kind})" for column, kind in seen.columns.items())
    return [f"{found}; columns: {_comment(columns)}", *_columns(seen)]


def _columns(seen: Look) -> list[str]:
    if seen.keep:
        return [f"  columns: [{', '.join(map(_text, seen.keep))}]  # kept beside each answer; all when left out"]
    return ["  # columns: []                # those kept beside each answer; all when left out"]


def _prompt(seen: Look, is_embedded: bool) -> list[str]:
    if seen.kind == "messages":
        return [f"  messages: {_text(seen.prompt)}  # lists of role and content, through the model's chat template"]
    if seen.kind == "column":
        lines = [f"  column: {_text(seen.prompt)}  # sent as it is; or `template:` with {{column}} for columns"]
    elif is_embedded:
        lines = [
            "  # What is asked of each row, with {column} for its columns. The embedded model was trained on this",
            "  # prompt alone, with field-service reports; write your own for another model.",
            "  template: |-",
            *(f"    {line}" for line in seen.template.split("\n")),
        ]
    else:
        lines = [
            "  # What is asked of each row, with {column} for its columns. Write your question around it.",
            f"  template: {_text(seen.template)}",
        ]
    if seen.has_chat:
        lines += ["  chat:                        # through the model's own chat template, as the user's turn"]
        lines += ["    system: null               # such as: Answer with one word."]
    elif not is_embedded:
        lines += [
            "  # chat: true                 # through the model's chat template; this one has none, or is not at hand"
        ]
    return lines


def _limits(seen: Look) -> list[str]:
    """Sampling and the longest sequence, as what was seen suggests; of embeddings the task."""
    if _is_embed(seen):
        return ["task: embed                    # the lines are for /v1/embeddings: a vector for each"]
    defaults = {"max_tokens": MAX_TOKENS, "temperature": 0}
    if seen.requests is not None:
        defaults = DEFAULTS[seen.requests.endpoint]
    max_tokens, longest = defaults["max_tokens"], seen.lengths[-1] if seen.lengths else None
    notes = []
    if longest is not None and seen.max_position is not None:
        median, some = seen.lengths[len(seen.lengths) // 2], counted(len(seen.lengths), "prompt")
        notes = [f"# The first {some}: {median:,} tokens in the middle, {longest:,} at most; the model takes",
                 f"# {seen.max_position:,} with the completion."]  # fmt: skip
        room = seen.max_position - longest
        if room < max_tokens:
            notes += ["# Prompts longer than it takes, less one token, become error rows (prompt_too_long)."]
            max_tokens = max(16, min(max_tokens, seen.max_position // 4))
    whose = "sampling:" if seen.requests is None else "sampling:                      # of lines that do not say"
    lines = [*notes, whose, f"  max_tokens: {max_tokens:<16} # a completion ends here at the latest",
             f"  temperature: {defaults['temperature']:<15g} # 0 takes the likeliest token each time"]  # fmt: skip
    if longest is not None and seen.max_position is not None:
        wanted = -(-(2 * longest + max_tokens) // LENGTH_STEP) * LENGTH_STEP
        if wanted < seen.max_position:
            lines += ["", "# engine:",
                      f"#   max_model_len: {wanted:<12} # twice the longest prompt seen, and max_tokens"]  # fmt: skip
    return lines


def _is_embed(seen: Look) -> bool:
    return seen.requests is not None and seen.requests.endpoint == "embedding"


def _text(value: str) -> str:
    """A text as YAML reads it back: bare where that is plain, else in quotes."""
    plain = value.replace("_", "").replace("-", "").replace("/", "").replace(".", "")
    is_word = (
        plain.isascii() and plain.isalnum() and value[0].isalpha() and value.lower() not in ("null", "true", "false")
    )
    if is_word:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=value.isprintable(), width=1 << 20).strip()


def _comment(text: str) -> str:
    """On one line of a comment, and no longer than that."""
    line = json.dumps(text, ensure_ascii=True)[1:-1].replace('\\"', '"')
    return line if len(line) <= 90 else line[:87] + "..."
