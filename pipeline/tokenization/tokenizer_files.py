"""Reading of a tokenizer from a model folder, without network access or untrusted code.

Defines which files count and their size limits, which ids end a sequence, and the digest of all of it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from pipeline.checkpoints.file_checks import MAX_JSON_BYTES, checked_file, read_json
from pipeline.errors import ModelError
from pipeline.tokenization.transformers_without_torch import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

# All files that can change the tokens of a text, or where generation ends.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

# Four times the size of the largest known ones; any other file has the limit of a config.json.
_LARGE_FILES: dict[str, int] = dict.fromkeys(
    ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"), 128 << 20
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Contents of a tokenizer's files.

    eos_token_ids: ids that end a sequence, from all files. digest: sha256 over the files and these ids.
    special_tokens: by name (`bos_token`), for chat templates.
    """

    backend: tokenizers.Tokenizer
    eos_token_ids: frozenset[int]
    digest: str
    chat_template: str | None
    special_tokens: Mapping[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a model folder. Raises ModelError if there is no usable tokenizer.json."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: expected a checkpoint folder with a tokenizer.json, found no such folder")
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json. Expected a Hugging Face checkpoint with a fast tokenizer; an "
            "older one can be converted by AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    _check_files(folder)
    config = _read_json(folder / "config.json")
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            str(folder),
            config=_bare_config(config, _read_json(folder / "tokenizer_config.json")),
            local_files_only=True,
            trust_remote_code=False,
        )
        backend = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    eos = _eos_token_ids(folder, config, loaded.eos_token_id)
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    special = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    return TokenizerFiles(backend, eos, _digest(folder, eos), template, special)


def _check_files(folder: Path) -> None:
    """Check that no file that transformers may read is a link out of the folder, a device or too large."""
    for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            try:
                checked_file(file, _LARGE_FILES.get(file.name, MAX_JSON_BYTES))
            except FileNotFoundError:
                raise ModelError(f"{file}: a link to a file that does not exist") from None


def _bare_config(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a config with only the fields of config.json that select the tokenizer's class.

    A family's own config class is needed only if tokenizer_config.json names no class: importing it takes as long as
    importing torch, since it brings in the compiler and much else.
    """
    model_type, tokenizer_class = config.get("model_type"), config.get("tokenizer_class")
    bare = PreTrainedConfig()
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        if isinstance(tokenizer_config.get("tokenizer_class"), str) and "auto_map" not in tokenizer_config:
            bare.model_type = model_type  # pyright: ignore[reportAttributeAccessIssue] - on this instance alone
        else:
            bare = CONFIG_MAPPING[model_type]()
    if isinstance(tokenizer_class, str):
        bare.tokenizer_class = tokenizer_class
    return bare


def _eos_token_ids(folder: Path, config: Mapping[str, Any], tokenizer_eos: int | None) -> frozenset[int]:
    text_config = config.get("text_config")
    found: list[Any] = [
        tokenizer_eos,
        _read_json(folder / "generation_config.json").get("eos_token_id"),
    ]
    found.append(config.get("eos_token_id"))
    if isinstance(text_config, dict):
        found.append(text_config.get("eos_token_id"))
    ids: set[int] = set()
    for value in found:
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                ids.add(token_id)
            elif token_id is not None and token_id != -1:
                raise ModelError(f"{folder}: eos_token_id {token_id!r:.200} is not a token id")
    return frozenset(ids)


def _read_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _digest(folder: Path, eos_token_ids: frozenset[int]) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        file = folder / name
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"{name}:{len(content)}:".encode())
            digest.update(content)
    digest.update(repr(sorted(eos_token_ids)).encode())
    return digest.hexdigest()
