"""What tells one model from another without reading all its weights: a digest of each file that the output depends
on."""

import hashlib
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoints.model_values import model_values, quantizer_file
from pipeline.errors import ModelError

FULL_BYTES = 16 * 2**20  # files up to this size are hashed whole
SAMPLE_BYTES = 64 * 2**10
NUM_SAMPLES = 16

# What a checkpoint has beside its weights and its config.json.
BESIDE_WEIGHTS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
                  "merges.txt", "chat_template.*")  # fmt: skip
_IDENTITY = ("config.json", *BESIDE_WEIGHTS, "*.safetensors", "*.safetensors.index.json")


def model_digest(folder: Path) -> dict[str, str]:
    """File name to digest, for every file that the output depends on.

    Files up to 16 MiB are hashed whole. Of larger ones (weights) the size, the safetensors header and 16
    blocks of 64 KiB spread over the file: another training run or quantization changes these, a flipped bit
    may not.
    """
    files = {file.name: file for pattern in _IDENTITY for file in folder.glob(pattern) if file.is_file()}
    with suppress(ModelError):  # a config.json that cannot be read is refused where its values are needed
        if (file := quantizer_file(folder, model_values(folder))) is not None:
            files[file.name] = file
    return {name: file_digest(file) for name, file in sorted(files.items())}


def file_digest(path: Path) -> str:
    """As `model_digest` has it for one file."""
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
