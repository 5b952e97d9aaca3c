"""Text of a first job file: the required keys, with comments on the inspected data and on further options."""

import json
from pathlib import Path

import yaml

from pipeline.config import JobConfig
from pipeline.config.requests import DEFAULTS
from pipeline.config.schema import FILE_NAME, schema_text
from pipeline.errors import ConfigError
from pipeline.formatting import counted
from pipeline.starter.look import Look

MAX_TOKENS = 256
LENGTH_STEP = 256  # of max_model_len


def job_text(name: str, path: str, model: str, output: str, seen: Look) -> str:
    """Return a job file that `pipeline validate` accepts."""
    lines = [
        f"# yaml-language-server: $schema={FILE_NAME}",
        "# Written by `pipeline init`. Editors that support the line above explain every key and list further ones.",
        "",
        f"name: {_text(name)}",
        "",
        "input:",
        f"  path: {_text(path)}",
        *_input(seen),
        "",
        *(["prompt:", *_prompt(seen), ""] if seen.requests is None else []),
        "model:",
        f"  path: {_text(model)}",
        *([f"  # The model was not inspected: {_comment(seen.skip_reason)}."] if seen.skip_reason else []),
        "",
        *_limits(seen),
        "",
        "output:",
        f"  path: {_text(output)}",
        *(["  # rename: {generated_text: answer}"] if not _is_embed(seen) else []),
        "",
        "run:",
        "  max_error_rate: 0.01         # the job stops, resumably, above this share of error rows",
        "",
        "# cost:",
        "#   hourly_usd: 2.50           # price of the machine per hour; the report then shows the cost of a row",
    ]
    return "\n".join(lines) + "\n"


def save_job(path: str, job: JobConfig) -> None:
    """Write the keys of a job of flags as a job file, unless the file holds them already. Raises ConfigError as
    `write_job`."""
    text = yaml.safe_dump(dict(job.written), sort_keys=False, allow_unicode=True, width=110)
    if not Path(path).is_file() or Path(path).read_text(encoding="utf-8", errors="replace") != text:
        write_job(path, text)


def write_job(path: str, text: str) -> bool:
    """Write the job file, and the schema for editors next to it, without replacing either.

    Returns whether the schema was written. Raises ConfigError if the job file cannot be written.
    """
    job_file = Path(path)
    try:
        job_file.parent.mkdir(parents=True, exist_ok=True)
        with open(job_file, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: already exists and is not replaced; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot write it: {error.strerror}") from None
    try:
        with open(job_file.with_name(FILE_NAME), "x", encoding="utf-8") as file:
            file.write(schema_text() + "\n")
    except OSError:  # exists, or the disk is full; only editors need it
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
        return [f"  columns: [{', '.join(map(_text, seen.keep))}]  # copied to the output; all columns if omitted"]
    return ["  # columns: []                # input columns copied to the output; all if omitted"]


def _prompt(seen: Look) -> list[str]:
    if seen.kind == "messages":
        return [f"  messages: {_text(seen.prompt)}  # lists of role and content, for the model's chat template"]
    if seen.kind == "column":
        lines = [f"  column: {_text(seen.prompt)}  # sent unchanged; or use `template:` with {{column}} placeholders"]
    elif seen.is_demo:
        lines = [
            "  # The prompt of each row, with {column} placeholders. The embedded model was trained on this prompt",
            "  # only. Write your own prompt for other models.",
            "  template: |-",
            *(f"    {line}" for line in seen.template.split("\n")),
        ]
    else:
        lines = [
            "  # The prompt of each row, with {column} placeholders. Write your question around them.",
            f"  template: {_text(seen.template)}",
        ]
    if seen.has_chat:
        lines += ["  chat:                        # the prompt is the user's turn of the model's chat template"]
        lines += ["    system: null               # for example: Answer with one word."]
    elif not seen.is_demo:
        lines += [
            "  # chat: true                 # uses the model's chat template; this one has none, or was not inspected"
        ]
    return lines


def _limits(seen: Look) -> list[str]:
    """Return the sampling section and a suggested max_model_len, or the task of embedding requests."""
    if _is_embed(seen):
        return ["task: embed                    # requests of /v1/embeddings: one vector for each line"]
    defaults = {"max_tokens": MAX_TOKENS, "temperature": 0}
    if seen.requests is not None:
        defaults = DEFAULTS[seen.requests.endpoint]
    max_tokens, longest = defaults["max_tokens"], seen.lengths[-1] if seen.lengths else None
    notes = []
    if longest is not None and seen.max_position is not None:
        median, some = seen.lengths[len(seen.lengths) // 2], counted(len(seen.lengths), "prompt")
        notes = [f"# Tokens of the first {some}: median {median:,}, maximum {longest:,}. The model's context holds",
                 f"# {seen.max_position:,}, including the completion."]  # fmt: skip
        room = seen.max_position - longest
        if room < max_tokens:
            notes += ["# Prompts that leave no room for a completion become error rows (prompt_too_long)."]
            max_tokens = max(16, min(max_tokens, seen.max_position // 4))
    head = "sampling:" if seen.requests is None else "sampling:                      # for lines without their own"
    lines = [*notes, head, f"  max_tokens: {max_tokens:<16} # limit of each completion",
             f"  temperature: {defaults['temperature']:<15g} # 0: always the most likely token"]  # fmt: skip
    if longest is not None and seen.max_position is not None:
        wanted = -(-(2 * longest + max_tokens) // LENGTH_STEP) * LENGTH_STEP
        if wanted < seen.max_position:
            lines += ["", "# engine:",
                      f"#   max_model_len: {wanted:<12} # twice the longest prompt seen, plus max_tokens"]  # fmt: skip
    return lines


def _is_embed(seen: Look) -> bool:
    return seen.requests is not None and seen.requests.endpoint == "embedding"


def _text(value: str) -> str:
    """Return a YAML scalar for a text: unquoted if it is plain, else quoted."""
    plain = value.replace("_", "").replace("-", "").replace("/", "").replace(".", "")
    is_word = (
        plain.isascii() and plain.isalnum() and value[0].isalpha() and value.lower() not in ("null", "true", "false")
    )
    if is_word:
        return value
    return yaml.safe_dump(value, default_style='"', allow_unicode=value.isprintable(), width=1 << 20).strip()


def _comment(text: str) -> str:
    """Return a text escaped and truncated to fit one line of a comment."""
    line = json.dumps(text, ensure_ascii=True)[1:-1].replace('\\"', '"')
    return line if len(line) <= 90 else line[:87] + "..."
