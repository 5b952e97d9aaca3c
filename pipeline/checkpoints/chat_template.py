"""Which chat template a job's prompts go through, found without loading a tokenizer: the checkpoint's, or a file."""

import contextlib
import json
import os
from pathlib import Path

from pipeline.checkpoints.file_checks import checked_file
from pipeline.errors import ConfigError

MAX_BYTES = 16 * 2**20
ADVICE = (
    "Use prompt.template or prompt.column instead of messages, and no prompt.chat or --chat; take the model's instruct "
    "version; or name a file with a template as prompt.chat.template"
)
_FILES = ("chat_template.*", "tokenizer_config.json", "additional_chat_templates/*.jinja")
_CLOCK = "strftime_now"  # the one name by which a template can ask for the date


def read_template(path: str) -> str:
    """The template in the file that `prompt.chat.template` names. Raises ConfigError."""
    place, key = Path(os.path.expanduser(path)), f"prompt.chat.template {path}"
    try:
        with open(place, "rb") as file:
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
    """Whether a model folder has a chat template of its own. Raises ModelError for files that are no model's."""
    if any(True for _ in folder.glob("chat_template.*")):
        return True
    config = folder / "tokenizer_config.json"
    with contextlib.suppress(ValueError, RecursionError, FileNotFoundError):  # refused by who loads it
        found = json.loads(checked_file(config, MAX_BYTES).read_text(errors="replace"))
        return bool(isinstance(found, dict) and found.get("chat_template"))
    return False


def asks_for_date(template: str) -> bool:
    return _CLOCK in template


def folder_asks_for_date(folder: Path) -> bool:
    """Whether the model's chat template can ask for the date. Raises ModelError for files that are no model's."""
    files = {file for pattern in _FILES for file in folder.glob(pattern) if file.exists()}
    return any(asks_for_date(_text_of(checked_file(file, MAX_BYTES))) for file in files)


def _text_of(file: Path) -> str:
    """Of JSON without its escapes, which could hide a name."""
    text = file.read_text(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: refused by who loads it
        return json.dumps(json.loads(text), ensure_ascii=False)
    return text
