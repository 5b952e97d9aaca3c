"""The model's folder: where it is, and a digest that tells one model from another without reading all its
weights."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoints.cache import cache_folder, fetch_model
from pipeline.checkpoints.files import checked_file
from pipeline.checkpoints.locate import locate_model, why_no_checkpoint
from pipeline.errors import ModelError
from pipeline.stores.redaction import shown_url
from pipeline.stores.storage import RetryCounts, is_url

FULL_BYTES = 16 * 2**20  # files up to this size are hashed whole
SAMPLE_BYTES = 64 * 2**10
NUM_SAMPLES = 16

_IDENTITY = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.safetensors",
    "*.safetensors.index.json",
)
_CHAT_TEMPLATES = ("chat_template.*", "tokenizer_config.json", "additional_chat_templates/*.jinja")


def resolve_draft(
    path: str | None,
    storage: Mapping[str, Any],
    say: Callable[[str], None] | None = None,
    retries: RetryCounts | None = None,
) -> Path | None:
    """As `resolve_model`, of `model.draft`, if there is one; a url takes the model's storage options."""
    return None if path is None else resolve_model(path, storage, say, retries, "model.draft")


def resolve_model(
    path: str,
    storage: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
    retries: RetryCounts | None = None,
    key: str = "model.path",
) -> Path:
    """The local folder of a model. A url is downloaded once per machine (`cache.py`); a Hugging Face id is fetched into
    its own cache, or only looked up there with HF_HUB_OFFLINE=1.

    storage: fsspec options, for a url alone. say: told what is being downloaded. retries: counts requests to a store
    that are tried again. key: of the job file, which errors name. Raises ModelError, and EnvironmentFailed when a store
    or the disk fails.
    """
    if is_url(path):
        say = say or (lambda text: None)
        folder = fetch_model(path, storage or {}, cache_folder(), _file_digest, say, retries, key)
    else:
        folder = locate_model(path)
    if reason := why_no_checkpoint(str(folder)):
        raise ModelError(f"{key} {shown_url(path)}: {reason}")
    return folder.resolve()


def model_digest(folder: Path) -> dict[str, str]:
    """File name to digest, for every file that the output depends on.

    Files up to 16 MiB are hashed whole. Of larger ones (weights) the size, the safetensors header and 16
    blocks of 64 KiB spread over the file: another training run or quantization changes these, a flipped bit
    may not.
    """
    files = {file.name: file for pattern in _IDENTITY for file in folder.glob(pattern) if file.is_file()}
    return {name: _file_digest(file) for name, file in sorted(files.items())}


def asks_for_date(folder: Path) -> bool:
    """Whether the model's chat template can ask for the date, which it can by one name alone.

    Raises ModelError for files that are no model's.
    """
    files = {file for pattern in _CHAT_TEMPLATES for file in folder.glob(pattern) if file.exists()}
    return any("strftime_now" in _text_of(checked_file(file, FULL_BYTES)) for file in files)


def _text_of(file: Path) -> str:
    """Of JSON without its escapes, which could hide a name."""
    text = file.read_text(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: refused by who loads it
        return json.dumps(json.loads(text), ensure_ascii=False)
    return text


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with open(path, "rb") as file:
        if size <= FULL_BYTES:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            header = int.from_bytes(file.read(8), "little")
            file.seek(0)
            digest.update(file.read(8 + min(header, 64 * 2**20) if path.suffix == ".safetensors" else SAMPLE_BYTES))
            for i in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
