"""From what a user writes for a model to a local folder: a folder, `demo` names, or a Hugging Face id."""

import os
from pathlib import Path

from pipeline.demo import demo_model
from pipeline.errors import ModelError

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]  # no pickles, no code


def locate_model(name: str) -> Path:
    """The folder of a model. A Hugging Face id is downloaded once (only safetensors, JSON and tokenizer files).

    Raises ModelError saying what was tried.
    """
    if name == "demo" or name.startswith("demo:"):
        try:
            return demo_model(name.partition(":")[2] or "target")
        except KeyError as error:
            raise ModelError(f"model {name!r}: {error.args[0]}") from None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"model {name!r}: {why_no_checkpoint(name)}")
    return _download(name)


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
