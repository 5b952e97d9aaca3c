"""Digests that identify a model without reading all its weights, one per file that the output depends on."""

import hashlib
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoints.file_checks import read_json
from pipeline.checkpoints.quantizer_files import CONFIG, quantizer_file
from pipeline.errors import ModelError

FULL_BYTES = 16 * 2**20  # files up to this size are hashed whole
SAMPLE_BYTES = 64 * 2**10
NUM_SAMPLES = 16

# Files of a checkpoint other than its weights and config.json.
AUXILIARY_FILES = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
                  "merges.txt", "chat_template.*")  # fmt: skip
_IDENTITY = ("config.json", *AUXILIARY_FILES, "*.safetensors", "*.safetensors.index.json", "*.gguf")


def model_digest(folder: Path) -> dict[str, str]:
    """Return the digest of every file that the output depends on, by file name.

    Files up to 16 MiB are hashed whole. For larger files (weights), the digest covers the size, the safetensors header
    and 16 blocks of 64 KiB spread over the file. Another training run or quantization changes these; a flipped bit may
    not.
    """
    files = {file.name: file for pattern in _IDENTITY for file in folder.glob(pattern) if file.is_file()}
    with suppress(ModelError):  # an unreadable config.json is reported when its values are needed
        if (file := quantizer_file(folder, read_json(folder / CONFIG))) is not None:
            files[file.name] = file
    return {name: file_digest(file) for name, file in sorted(files.items())}


def file_digest(path: Path) -> str:
    """Return the digest of one file, as in `model_digest`."""
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
