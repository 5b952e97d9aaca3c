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
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(f"model {name!r}: no such folder, and not a Hugging Face id of the form owner/name")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelError(
            f"model {name!r}: no such folder, and Hugging Face has it not or cannot be reached{offline}: {error}"
        ) from None
