"""Chat templates of checkpoints and files, found without loading a tokenizer."""

import contextlib
import json
import os
from pathlib import Path

from pipeline.checkpoints.file_checks import checked_file
from pipeline.errors import ConfigError

MAX_BYTES = 16 * 2**20
ADVICE = (
    "Use prompt.template or prompt.column instead of messages, without prompt.chat or --chat; use the model's instruct "
    "version; or set prompt.chat.chat_template to a file with a template"
)
_FILES = ("chat_template.*", "tokenizer_config.json", "additional_chat_templates/*.jinja")
_CLOCK = "strftime_now"  # the only function that gives a template the date


def read_template(path: str) -> str:
    """Read the template file of `prompt.chat.chat_template`. Raises ConfigError."""
    location, key = Path(os.path.expanduser(path)), f"prompt.chat.chat_template {path}"
    try:
        with open(location, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{key}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: not UTF-8 text (byte {error.start})") from None
    if not text.strip() or len(raw) > MAX_BYTES:
        raise ConfigError(f"{key}: {f'more than {MAX_BYTES >> 20} MiB' if text.strip() else 'the file is empty'}")
    return text


def has_template(folder: Path) -> bool:
    """Return whether a model folder has its own chat template. Raises ModelError for files that `checked_file`
    refuses."""
    if any(True for _ in folder.glob("chat_template.*")):
        return True
    config = folder / "tokenizer_config.json"
    with contextlib.suppress(ValueError, RecursionError, FileNotFoundError):  # loading the tokenizer reports it
        found = json.loads(checked_file(config, MAX_BYTES).read_text(errors="replace"))
        return bool(isinstance(found, dict) and found.get("chat_template"))
    return False


def reads_date(template: str) -> bool:
    return _CLOCK in template


def folder_reads_date(folder: Path) -> bool:
    """Return whether the model's chat template can read the date. Raises ModelError for files that `checked_file`
    refuses."""
    files = {file for pattern in _FILES for file in folder.glob(pattern) if file.exists()}
    return any(reads_date(_text_of(checked_file(file, MAX_BYTES))) for file in files)


def _text_of(file: Path) -> str:
    """Return the file's text; JSON is decoded first, since an escape could hide the name of the clock."""
    text = file.read_text(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: loading the tokenizer reports it
        return json.dumps(json.loads(text), ensure_ascii=False)
    return text
