"""What a model's path means (a folder, a url, an embedded model, a Hugging Face id), and from it to a local folder."""

import os
from pathlib import Path
from typing import Literal

from pipeline.demo import NAMES, demo_model
from pipeline.errors import ModelError
from pipeline.stores.storage import is_url

EMBEDDED_MODELS = ("demo", *(f"demo:{name}" for name in NAMES))
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # no pickles, no code


def model_kind(path: str) -> Literal["embedded", "url", "folder", "id", "missing"]:
    """What a model's path can only mean, by its form and by what is there on this machine."""
    if path in EMBEDDED_MODELS:
        return "embedded"
    if is_url(path):
        return "url"
    place = Path(path).expanduser()
    if place.exists():
        return "folder" if place.is_dir() else "missing"
    is_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return "id" if is_id else "missing"


def locate_model(name: str) -> Path:
    """The folder of a model that is no url. A Hugging Face id is downloaded once (only safetensors, JSON and tokenizer
    files).

    Raises ModelError saying what was tried.
    """
    if name.startswith("demo:") and name not in EMBEDDED_MODELS:
        raise ModelError(f"model {name!r}: no such embedded model; there are {', '.join(EMBEDDED_MODELS)}")
    match model_kind(name):
        case "embedded":
            return demo_model(name.partition(":")[2] or "target")
        case "folder":
            return Path(name).expanduser()
        case "id":
            return _download(name)
    raise ModelError(f"model {name!r}: {why_no_checkpoint(name)}")


def why_no_checkpoint(name: str) -> str:
    """What is at `name`, a local path, in the place of a checkpoint's folder; empty where it may be one."""
    place = Path(name).expanduser()
    if not place.exists():
        return "no such folder, and not a Hugging Face id (owner/name)"
    if not place.is_dir():
        kind = "a GGUF file" if place.suffix == ".gguf" else "a file"
        return f"{kind}; this program reads safetensors checkpoints: give the folder of one"
    try:
        names = {file.name for file in place.iterdir()}
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if "config.json" in names:
        return ""
    if not names:
        return "an empty folder, so it has no config.json; give the folder of a safetensors checkpoint"
    if "adapter_config.json" in names:
        return "has no config.json but an adapter_config.json: a LoRA adapter; give its base model, or both merged"
    if any(found.endswith(".gguf") for found in names):
        return "has no config.json but GGUF files; this program reads safetensors checkpoints"
    return "has no config.json; give the folder of a safetensors checkpoint"


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"and Hugging Face has it not or cannot be reached: {error}"
        if os.environ.get("HF_HUB_OFFLINE"):
            reason = "and not in this machine's Hugging Face cache; HF_HUB_OFFLINE is set, so that it is not downloaded"
        raise ModelError(f"model {name!r}: no such folder, {reason}") from None
